"""``PackedInputs``: a forward of several inputs side by side, without padding."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch

from scheduler.pooling.scoring_head import ScoringHead
from scheduler.pooling.segments import SegmentAttention, Unsegmented


class PackedInputs:
    """Runs ``model`` of transformers on inputs in one row, each with positions and attention of its own. Whether that
    gives what each input gives alone is to be measured. ``head``: of a cross-encoder, for the hidden states.
    """

    def __init__(self, model: Any, first: int, scores: bool) -> None:
        """``first``: the position of an input's first token. ``scores``: it is a cross-encoder. Raises Unsegmented for
        a model that is told no positions, and what it raises itself when its attention function is replaced.
        """
        self.head = ScoringHead(model) if scores else None
        self._model = model if self.head is None else self.head.base
        if "position_ids" not in inspect.signature(self._model.forward).parameters:
            raise Unsegmented("the model's forward takes no position_ids")
        self._first = first
        self._attention = SegmentAttention()
        self._before = model.config._attn_implementation
        model.set_attn_implementation(self._attention.name)
        if model.config._attn_implementation != self._attention.name:
            raise Unsegmented("the model's attention function cannot be replaced")

    def remove(self) -> None:
        """Back to the attention function that the model was loaded with."""
        self._model.set_attn_implementation(self._before)

    def run(self, rows: Sequence[Sequence[int]], types: Sequence[bytes] | None) -> list[torch.Tensor]:
        """The last hidden states ``[tokens, H]`` of each input. ``types``: which text of a pair each token is of, b"":
        all are of the first; None: the model is not told.
        """
        device, lengths = self._model.device, [len(row) for row in rows]
        given = {
            "input_ids": torch.tensor([[i for row in rows for i in row]], device=device),
            "position_ids": torch.cat([torch.arange(n) + self._first for n in lengths])[None].to(device),
        }
        if types is not None:
            flat = b"".join(one or bytes(n) for one, n in zip(types, lengths, strict=True))
            given["token_type_ids"] = torch.tensor([[*flat]], device=device)
        with self._attention.over(lengths):
            hidden: torch.Tensor = self._model(**given, return_dict=True).last_hidden_state[0]
        return [*torch.split(hidden, lengths)]
