"""`CodeLayout`: where the bits of a packed weight's codes lie in a row as its checkpoint stores it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch


class Field(NamedTuple):
    """Some bits of all codes of a block. ``times`` parts of ``nbytes`` bytes follow each other from byte ``at`` on, and
    each byte holds ``8 / width`` fields: the lowest of all bytes of a part are of the next elements, then the next ones
    of those that follow. ``across``: those of one byte are of elements that follow each other instead, and ``width``
    is 1. ``up``: which bit of a code their lowest is.
    """

    at: int
    nbytes: int
    width: int
    times: int = 1
    up: int = 0
    across: bool = False


@dataclass(frozen=True)
class CodeLayout:
    """A row is blocks of ``elements`` codes, a multiple of 32 and at most 256, in ``nbytes`` bytes each. Every field
    has bits of all of them. ``flipped``: bits of a code that are stored the other way round.
    """

    elements: int
    nbytes: int
    fields: tuple[Field, ...]
    flipped: int = 0

    @property
    def bits(self) -> int:
        """Of a code."""
        return max(field.up + field.width for field in self.fields)

    def unpack(self, data: torch.Tensor) -> torch.Tensor:
        """The codes of rows, uint8 ``[rows, inside]``, of uint8 ``[rows, bytes]``, on their device."""
        if self is ONE_TO_A_BYTE:
            return data
        blocks = data.view(len(data), -1, self.nbytes)
        first, *others = (_unpack(blocks, field) for field in self.fields)
        codes = first ^ self.flipped if self.flipped else first
        for more in others:
            codes |= more
        return codes.reshape(len(data), -1)


def _unpack(blocks: torch.Tensor, field: Field) -> torch.Tensor:
    """uint8 ``[rows, blocks, elements]``: the codes with the bits of this field alone."""
    parts = blocks[..., field.at : field.at + field.times * field.nbytes]
    if field.width == 8:
        return parts
    if field.across:
        bits = parts[..., None] >> _SHIFTS[field.width].to(parts.device)
    else:
        bits = parts.view(*parts.shape[:2], field.times, 1, -1) >> _SHIFTS[field.width].to(parts.device)[:, None]
    bits &= (1 << field.width) - 1
    return (bits << field.up if field.up else bits).flatten(2)


_SHIFTS = {width: torch.arange(0, 8, width, dtype=torch.uint8) for width in (1, 2, 4)}
ONE_TO_A_BYTE = CodeLayout(32, 32, (Field(0, 32, 8),))
