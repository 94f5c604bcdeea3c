"""`ScaleLayout`: where the scales and minima of a packed weight lie in a block as its checkpoint stores it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import torch

from scheduler.weights.code_layout import CodeLayout
from scheduler.weights.packed_source import PackedRows


class Bits(NamedTuple):
    """``width`` bits, from the ``shift``-th on, of each of ``length`` bytes from byte ``at`` of a block: the bits from
    the ``up``-th on of small numbers, of the ``first`` one and every ``step`` behind it.
    """

    at: int
    length: int
    shift: int
    width: int
    up: int = 0
    first: int = 0
    step: int = 1


@dataclass(frozen=True)
class ScaleLayout:
    """``halves``: the bytes of a block at which a float16 scale and, where there is one, a minimum begin. ``negated``:
    that minimum is added. Blocks with scales of two levels have ``fine`` ones, whole numbers of which each is
    ``less`` smaller than what is stored, and the minima have their own.
    """

    halves: tuple[int, ...]
    fine: tuple[Bits, ...] = ()
    minima: tuple[Bits, ...] = ()
    less: int = 0
    negated: bool = False

    def unpack(self, blocks: torch.Tensor, codes: CodeLayout) -> PackedRows:
        """The rows of uint8 ``blocks [rows, blocks, bytes]``, whose ``codes`` stay as they are."""
        values = blocks.reshape(len(blocks), -1)
        scales, *minima = (_half(blocks, at) for at in self.halves)
        least = minima[0] if minima else None
        if not self.fine:
            return PackedRows(values, scales, -least if least is not None and self.negated else least, layout=codes)
        return PackedRows(
            values,
            coarse_scales=scales,
            fine_scales=_small(blocks, self.fine) - self.less,
            coarse_minima=least,
            fine_minima=_small(blocks, self.minima) if self.minima else None,
            layout=codes,
        )


class StoredRows(NamedTuple):
    """Rows as a checkpoint stores them, uint8 ``[rows, bytes]``, and where in their blocks codes and scales lie."""

    values: torch.Tensor
    layout: CodeLayout
    scales: ScaleLayout


@runtime_checkable
class StoredSource(Protocol):
    """A packed weight whose checkpoint stores rows as layouts say."""

    def stored(self, start: int, stop: int) -> StoredRows | None:
        """Rows ``start`` to ``stop``; None where a layout does not say where scales are."""
        ...


def _half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """The float16 number at byte ``at`` of each block, as float32 ``[rows, blocks]``."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16).float().squeeze(-1)


def _small(blocks: torch.Tensor, fields: Sequence[Bits]) -> torch.Tensor:
    """int8 ``[rows, numbers]``, those of a block after those of the one before."""
    count = max(field.first + field.step * (field.length - 1) for field in fields) + 1
    found = torch.zeros(*blocks.shape[:2], count, dtype=torch.uint8)
    for field in fields:
        bits = blocks[..., field.at : field.at + field.length] >> field.shift & ((1 << field.width) - 1)
        found[..., field.first : field.first + field.step * field.length : field.step] |= bits << field.up
    return found.flatten(1).view(torch.int8)
