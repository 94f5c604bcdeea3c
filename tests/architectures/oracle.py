"""What a model itself says about a timeline: from-scratch forwards, no cache, no positions, no mask."""

from __future__ import annotations

from typing import Any

import torch

_DRAWS = 8
_ROUNDING = 3e-7  # relative, of a float32 product


class Oracle:
    """Logits after a prompt and each generated token.

    Decoder-only: one forward of the whole timeline, where that gives the logits of its prefixes; a model whose
    logits depend on what comes later is asked once per prefix. Encoder-decoder: the prompt is the encoder's input.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._encodes = bool(model.config.is_encoder_decoder)
        self.causal = self._is_causal()

    def logits(self, prompt: list[int], generated: list[int]) -> torch.Tensor:
        """``[len(generated), V]``: row i is what token i of ``generated`` was drawn from."""
        if self._encodes:
            start = [int(self._model.generation_config.decoder_start_token_id)]
            return self._rows(lambda ids: self._forward(prompt, ids), start, generated)
        return self._rows(lambda ids: self._forward(ids), prompt, generated)

    def moved_by_rounding(self, prompt: list[int], generated: list[int]) -> float:
        """How far the model's own logits move, relative to the largest, if its weights are off by a few roundings. A
        timeline where a token is as near to one choice (of experts, of blocks of keys) as to another has two right
        answers.
        """
        ids = [*prompt, *generated[:-1]]
        want = self._anew(ids)
        kept = [weight.clone() for weight in self._model.parameters()]
        moved = 0.0
        for seed in range(_DRAWS):
            generator = torch.Generator().manual_seed(seed)
            with torch.no_grad():
                for weight in self._model.parameters():
                    weight.mul_(1 + _ROUNDING * torch.randn(weight.shape, generator=generator))
                moved = max(moved, float((self._anew(ids) - want).abs().max() / want.abs().max()))
                for weight, before in zip(self._model.parameters(), kept, strict=True):
                    weight.copy_(before)
        return moved

    def _anew(self, ids: list[int]) -> torch.Tensor:
        return Oracle._forward(self, ids)

    def _rows(self, forward: Any, before: list[int], generated: list[int]) -> torch.Tensor:
        timeline = [*before, *generated[:-1]]
        if self.causal:
            rows: torch.Tensor = forward(timeline)[len(before) - 1 :]
            return rows
        lengths = range(len(before), len(timeline) + 1)
        return torch.stack([forward(timeline[:length])[-1] for length in lengths])

    def _is_causal(self) -> bool:
        ids = list(range(20, 42))
        forward = (lambda part: self._forward(ids, part)) if self._encodes else self._forward
        whole, half = forward(ids)[:11], forward(ids[:11])
        return bool((whole - half).abs().max() <= 1e-3 * half.abs().max())

    @torch.no_grad()
    def _forward(self, ids: list[int], decoder_ids: list[int] | None = None) -> torch.Tensor:
        inputs = {"input_ids": torch.tensor([ids]), "use_cache": False, "return_dict": True}
        if decoder_ids is not None:
            inputs["decoder_input_ids"] = torch.tensor([decoder_ids])
        logits: torch.Tensor = self._model(**inputs).logits[0].float()
        return logits
