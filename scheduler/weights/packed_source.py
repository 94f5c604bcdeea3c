"""`PackedSource`: a packed weight as its checkpoint stores it, the same for all formats; `PackedRows`: rows of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from scheduler.weights.code_layout import ONE_TO_A_BYTE, CodeLayout


@dataclass(frozen=True)
class PackedRows:
    """Rows of a packed weight, ``w = scale * (value - zero) - minimum``, or ``scale * table[value]``.

    ``values`` are unsigned codes as ``layout`` says, uint8 ``[rows, bytes]``; ``codes`` are they one to a byte, uint8
    ``[rows, inside]``. ``scales`` and ``minima`` are float32
    ``[rows, inside / group]``. Formats with scales of two levels give coarse ones, float32 ``[rows, inside / 256]``,
    and fine ones, int8 ``[rows, inside / group]``, instead: a scale is their product, and so is a minimum. Formats
    with a zero of each group give ``zeros``, int8 ``[rows, inside / group]``, beside ``zero``: a minimum is such a
    number times the scale.
    """

    values: torch.Tensor
    scales: torch.Tensor | None = None
    minima: torch.Tensor | None = None
    coarse_scales: torch.Tensor | None = None
    fine_scales: torch.Tensor | None = None
    coarse_minima: torch.Tensor | None = None
    fine_minima: torch.Tensor | None = None
    zeros: torch.Tensor | None = None
    layout: CodeLayout = ONE_TO_A_BYTE

    @property
    def codes(self) -> torch.Tensor:
        return self.layout.unpack(self.values)


class RowSource(Protocol):
    """A packed weight ``[out, inside]`` of which rows can be had as floats."""

    out: int
    inside: int

    @property
    def nbytes(self) -> int:
        """Bytes of the packed weight."""
        ...

    def take(self, ids: torch.Tensor) -> torch.Tensor:
        """The rows of int64 ``ids [n]``, as ``dequantise`` gives them: float32 ``[n, inside]``."""
        ...

    def dequantise(self, start: int, stop: int) -> torch.Tensor:
        """Rows ``start`` to ``stop``: float32 ``[rows, inside]``, columns in the order of the inputs."""
        ...


class PackedSource(RowSource, Protocol):
    """A packed weight as a checkpoint stores it. ``group`` consecutive elements of a row share a scale. ``order`` is
    int64 ``[inside]`` where the columns are stored in another order: column ``i`` is multiplied by input ``order[i]``.
    """

    bits: int
    group: int
    zero: int
    table: tuple[float, ...] | None
    order: torch.Tensor | None

    def rows(self, start: int, stop: int) -> PackedRows:
        """Rows ``start`` to ``stop``, packed."""
        ...
