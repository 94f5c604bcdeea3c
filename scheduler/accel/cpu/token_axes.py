"""Axes of tensors that have the rows of a step: what of a tensor belongs to which token.

A row is one token. Functions take an axis that has all tokens out of a shape, or apart from another one that it was
joined with.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch


class Rows(NamedTuple):
    """For every element of a tensor its number (see ``basic_block``) and its token; both have the tensor's shape."""

    elements: torch.Tensor
    tokens: torch.Tensor


def without(shape: Sequence[int], axis: int) -> tuple[int, ...]:
    """A shape without one of its axes."""
    return (*shape[:axis], *shape[axis + 1 :])


def numbers_of(shape: Sequence[int], axis: int) -> torch.Tensor:
    """The token of every element of a tensor whose token axis is ``axis``."""
    view = [1] * len(shape)
    view[axis] = -1
    return torch.arange(shape[axis]).view(view).expand(shape)


def joined_axis(rows: Rows, tokens: int) -> int | None:
    """The axis of a tensor that has all ``tokens`` and, within each, more than one element; None if there is none."""
    shape = rows.tokens.shape
    if tokens in shape:
        return None
    for axis, size in enumerate(shape):
        if size and size % tokens == 0 and torch.equal(rows.tokens, numbers_of(shape, axis) // (size // tokens)):
            return axis
    return None


def dims_apart(dims: Any, axis: int) -> Any:
    """The axes that a function names, where ``axis`` has become two. Raises ValueError if it is one of them."""
    if dims is None or axis in ([dims] if isinstance(dims, int) else dims):
        raise ValueError("tokens meet")
    if isinstance(dims, int):
        return dims + (dims > axis)
    return [dim + (dim > axis) for dim in dims]
