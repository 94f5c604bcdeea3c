"""What a model itself says about a timeline: from-scratch forwards, no cache, no positions, no mask."""

from __future__ import annotations

from typing import Any

import torch


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
