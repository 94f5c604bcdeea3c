"""``SegmentAttention``: attention of inputs that stand one behind the other, each over its own tokens only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count, groupby
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

_numbers = count()
# What layers pass along that says nothing about which keys count; windows are in the masks.
HARMLESS = frozenset({"position_ids", "position_embeddings", "sliding_window", "output_attentions", "use_cache"})


class Unsegmented(ValueError):
    """The model's attention needs something that inputs side by side do not have."""


class SegmentMask:
    """The mask that a model would have built for one input: which keys a query sees, for inputs of each length."""

    def __init__(self, rule: dict[str, Any]) -> None:
        """``rule``: the arguments of a mask function of transformers. Raises Unsegmented."""
        padding = rule.get("attention_mask")
        if padding is not None and not bool(padding.all()):
            raise Unsegmented("the model masks some of the tokens")
        self._rule = rule
        self.alike = not rule.get("use_vmap", False)  # inputs of one length have one mask
        self._made: dict[tuple[int, int], torch.Tensor | None] = {}

    def of(self, start: int, length: int) -> torch.Tensor | None:
        """Bool ``[1, 1, length, length]`` for an input that begins in row ``start``; None: every query sees all."""
        place = 0 if self.alike else start, length
        if place not in self._made:
            self._made[place] = sdpa_mask(
                1,
                length,
                length,
                start,
                start,
                self._rule["mask_function"],
                local_size=self._rule.get("local_size"),
                allow_is_causal_skip=False,
                allow_is_bidirectional_skip=self._rule.get("allow_is_bidirectional_skip", False),
                use_vmap=not self.alike,
                device=self._rule.get("device", "cpu"),
            )
        return self._made[place]


class SegmentAttention:
    """An attention function of transformers, with its mask function. ``name``: to be set at the model."""

    def __init__(self) -> None:
        self.name = f"warmturn_segments_{next(_numbers)}"
        self._lengths: Sequence[int] = ()
        AttentionInterface.register(self.name, self)
        AttentionMaskInterface.register(self.name, self.mask)

    @contextmanager
    def over(self, lengths: Sequence[int]) -> Iterator[None]:
        """Within it a forward ``[1, T]`` has inputs of these lengths; equal ones are best side by side."""
        self._lengths = lengths
        try:
            yield
        finally:
            self._lengths = ()

    def mask(self, **rule: Any) -> SegmentMask | None:
        """What a model gets for its mask, and hands to its layers; None where these do not run. Raises Unsegmented."""
        return SegmentMask(rule) if self._lengths else None

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: SegmentMask | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        **others: Any,
    ) -> tuple[torch.Tensor, None]:
        """``query [1, H, T, D]``, ``key`` and ``value [1, G, T, D]`` -> ``[1, T, H, D]``. Raises Unsegmented."""
        for name, other in others.items():
            if name not in HARMLESS and (isinstance(other, torch.Tensor) or (name in ("softcap", "s_aux") and other)):
                raise Unsegmented(f"attention with {name}")
        if not (attention_mask is None or isinstance(attention_mask, SegmentMask)):
            raise Unsegmented("the model builds a mask of its own")
        causal = attention_mask is None and bool(getattr(module, "is_causal", False))
        out = query.new_empty(query.shape[2], query.shape[1], value.shape[-1])
        start = 0
        for length, number in self._runs(attention_mask):
            stop = start + number * length
            sides = (side[0, :, start:stop] for side in (query, key, value))
            q, k, v = (side.reshape(side.shape[0], number, length, -1).transpose(0, 1) for side in sides)
            seen = None if attention_mask is None else attention_mask.of(start, length)
            made = F.scaled_dot_product_attention(
                q, k, v, seen, scale=scaling, is_causal=causal and length > 1, enable_gqa=q.shape[1] != k.shape[1]
            )
            out[start:stop] = made.transpose(1, 2).flatten(0, 1)
            start = stop
        if start != query.shape[2]:
            raise Unsegmented("attention over other rows than those of the inputs")
        return out[None], None

    def _runs(self, mask: SegmentMask | None) -> list[tuple[int, int]]:
        """The lengths of inputs, and how many of each are computed at once."""
        if mask is not None and not mask.alike:
            return [(length, 1) for length in self._lengths]
        return [(length, len([*same])) for length, same in groupby(self._lengths)]
