"""The kinds of torch's functions that ``scheduler.accel.cpu.recorder`` tells apart."""

from __future__ import annotations

from typing import Any

import torch


def _names_of(names: str) -> frozenset[Any]:
    return frozenset(getattr(torch.ops.aten, name) for name in names.split() if hasattr(torch.ops.aten, name))


KEEPS = _names_of("_to_copy clone contiguous alias detach lift_fresh")  # the result has the elements of the argument
RESHAPES = _names_of("view _unsafe_view _reshape_alias reshape")
MOVES = (  # what only moves data
    KEEPS
    | RESHAPES
    | _names_of("transpose permute t unsqueeze squeeze expand slice select split split_with_sizes unbind chunk repeat")
    | _names_of("flip roll narrow unfold cat stack")
)
CHOOSING = _names_of("topk _to_copy bitwise_not logical_not")  # what makes places and masks
SEVERAL = _names_of("topk")  # has more than one result that matters
SCATTERS = _names_of("scatter_")
REDUCES = _names_of("sum mean amax _softmax")  # their second argument names axes
ZEROS = _names_of("zeros zeros_like new_zeros")
