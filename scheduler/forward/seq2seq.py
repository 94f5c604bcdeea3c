"""Modes for encoder-decoder models: the encoder reads the prompt, and the timeline is the decoder's.

A different prompt changes the cross-attention of every layer, so no KV is reused between requests. A session's state is
the encoder's output and the decoder's cache. Decoders at the same position with prompts of the same length run as one
batch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from cache.pages import state as states
from cache.pages.packed import PackedStep, Span
from scheduler.forward.mode import Mode


class EncoderDecoderMode(Mode):
    """The decoder on a cache per request, with the encoder's output kept beside it."""

    name = "encoder-decoder"
    stateful = True
    caches = False
    _output: type[BaseModelOutput] = BaseModelOutput

    def install(self) -> None:
        """Nothing: the model runs as it is."""

    def remove(self) -> None:
        """Nothing was changed."""

    def forward(self, step: PackedStep, keep: torch.Tensor) -> torch.Tensor:
        found: dict[int, torch.Tensor] = {}
        for group in self._groups(step):
            for span, logits in zip(group, self._run(step, group), strict=True):
                found[span.row] = logits
        return torch.cat([found[span.row] for span in step.spans])[keep]

    def fresh(self) -> Any:
        """An empty cache: what the decoder says can be windowed, what it reads of the encoder never is."""
        own = DynamicCache(config=self.model.config.get_text_config(decoder=True))
        return EncoderDecoderCache(own, DynamicCache())

    def _groups(self, step: PackedStep) -> list[list[Span]]:
        """Spans that may share a forward."""
        alike: defaultdict[tuple[int, ...], list[Span]] = defaultdict(list)
        for span in step.spans:
            source = span.session.source
            assert source is not None
            single = span.size == 1 and span.start > 0
            alike[(span.start, len(source)) if single else (-1, span.row)].append(span)
        return list(alike.values())

    def _run(self, step: PackedStep, group: Sequence[Span]) -> list[torch.Tensor]:
        """Logits ``[size, V]`` of each span."""
        kept = [span.session.state or self._begin(span) for span in group]
        hidden, cache = states.stack(kept) if len(kept) > 1 else kept[0]
        ids = torch.cat([step.token_ids[:, s.row : s.row + s.size] for s in group])
        out = self.model(
            encoder_outputs=self._output(last_hidden_state=hidden),
            decoder_input_ids=ids,
            past_key_values=cache,
            use_cache=True,
            return_dict=True,
        )
        after = (hidden, out.past_key_values)
        parts = states.unstack(after, len(group)) if len(group) > 1 else [after]
        for span, part in zip(group, parts, strict=True):
            span.session.state = part
        return list(out.logits)

    def _begin(self, span: Span) -> Any:
        source = torch.tensor([list(span.session.source or ())], device=self.model.device)
        out = self.model.get_encoder()(input_ids=source, return_dict=True)
        self._output = type(out)  # some decoders look for more fields than the plain output has
        return out.last_hidden_state, self.fresh()


class OwnCacheEncoderDecoderMode(EncoderDecoderMode):
    """The same on the cache that the model makes for itself."""

    name = "encoder-decoder, own cache"

    def fresh(self) -> Any:
        """The model makes it."""
        return None


class RecomputedDecoderMode(EncoderDecoderMode):
    """Encoder and decoder from their first tokens at every step: right where only a plain forward is, and slow."""

    name = "encoder-decoder, recomputed"
    stateful = False

    def _run(self, step: PackedStep, group: Sequence[Span]) -> list[torch.Tensor]:
        (span,) = group
        return [plain_forward(self.model, span.session)[span.stop - span.size : span.stop]]

    def _groups(self, step: PackedStep) -> list[list[Span]]:
        return [[span] for span in step.spans]


def plain_forward(model: Any, session: Any) -> torch.Tensor:
    """Logits of all of a session's tokens ``[tokens, V]`` from a forward of encoder and decoder, no cache."""
    source = torch.tensor([list(session.source)], device=model.device)
    ids = torch.tensor([list(session.token_ids)], device=model.device)
    logits: torch.Tensor = model(input_ids=source, decoder_input_ids=ids, use_cache=False, return_dict=True).logits[0]
    return logits


ENCODER_DECODER: tuple[type[Mode], ...] = (EncoderDecoderMode, OwnCacheEncoderDecoderMode)
ENCODER_DECODER_LAST: tuple[type[Mode], ...] = (RecomputedDecoderMode,)


def first_tokens(model: Any) -> tuple[int, ...]:
    """What the decoder is fed first: its start token, then one that the model forces (a target language), if any."""
    settings = model.generation_config
    start = settings.decoder_start_token_id
    for other in (getattr(model.config, "decoder_start_token_id", None), settings.bos_token_id, 0):
        start = other if start is None else start
    forced = settings.forced_bos_token_id
    return (int(start),) if forced is None else (int(start), int(forced))
