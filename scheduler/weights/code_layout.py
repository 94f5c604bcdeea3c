"""`CodeLayout`: where the bits of a packed weight's codes lie in a row as its checkpoint stores it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch


class Field(NamedTuple):
    """Bits of the codes of a block: ``nbytes`` bytes from byte ``at`` on hold ``8 / width`` of them each. The lowest of
    all bytes are of the elements from ``first`` on, the next ones of those that follow. ``across``: those of one byte
    are of elements that follow each other instead, and ``width`` is 1. ``up``: which bit of a code their lowest is.
    """

    at: int
    nbytes: int
    width: int
    first: int = 0
    up: int = 0
    across: bool = False


@dataclass(frozen=True)
class CodeLayout:
    """A row is blocks of ``elements`` codes, a multiple of 32 and at most 256, in ``nbytes`` bytes each. ``flipped``:
    bits of a code that are stored the other way round.
    """

    elements: int
    nbytes: int
    fields: tuple[Field, ...]
    flipped: int = 0

    def unpack(self, data: torch.Tensor) -> torch.Tensor:
        """The codes of rows, uint8 ``[rows, inside]``, of uint8 ``[rows, bytes]``."""
        if self is ONE_TO_A_BYTE:
            return data
        blocks = data.view(len(data), -1, self.nbytes)
        codes = torch.full((*blocks.shape[:2], self.elements), self.flipped, dtype=torch.uint8)
        for field in self.fields:
            shifts = torch.arange(0, 8, field.width, dtype=torch.uint8)[:, None]
            bits = blocks[..., None, field.at : field.at + field.nbytes] >> shifts & (1 << field.width) - 1
            found = (bits.transpose(-1, -2) if field.across else bits).flatten(-2) << field.up
            codes[..., field.first : field.first + found.shape[-1]] ^= found
        return codes.view(len(data), -1)


ONE_TO_A_BYTE = CodeLayout(32, 32, (Field(0, 32, 8),))
