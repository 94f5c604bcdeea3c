"""``Matrix``: a weight in the layout that the MATMUL instruction of programs reads, plain or in tiles."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from cache.memory import huge
from scheduler.accel.cpu.kept_tiles import TilePlace

TILED, PACKED = 3, 16  # beside the types of plain elements; the second is a bit, see kernels/packed.h
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
GROUP, _DEPTH = 64, 32
_PAIR = torch.int32  # two elements of 16 bits, which stay together


class Matrix:
    """A weight ``[out, inside]``. ``limit``: the number of rows up to which it is at least as fast as torch; None:
    any.
    """

    number = -1  # by which adapters know it, if they may add to products with it
    kept = False  # of an earlier start, which has found it right
    order: npt.NDArray[np.int64] | None = None  # which input each column is multiplied by, where they are not in order

    def __init__(
        self, weight: torch.Tensor, tiled: bool, limit: int | None = None, place: TilePlace | None = None
    ) -> None:
        """``weight [out, inside]`` is used as it is if it is contiguous, and copied if it is to be ``tiled`` and is not
        in its ``place`` of an earlier start.
        """
        self.out, self.inside = weight.shape
        self.kind = TILED if tiled else TYPES[weight.dtype]
        self.limit = limit
        if not tiled:
            self.data = weight.contiguous()
            return
        found = None if place is None else place.take(self)
        size = -(-self.out // GROUP) * GROUP * -(-self.inside // _DEPTH) * _DEPTH * weight.itemsize
        self.kept = found is not None and (found[0].kind, found[0].nbytes) == (TILED, size)
        began = time.perf_counter()
        self.data = found[1].view(weight.dtype) if found is not None and self.kept else _tile(weight)
        if place is not None and not self.kept:
            place.note(self, time.perf_counter() - began)

    @property
    def form(self) -> dict[str, Any]:
        """What is to be known of its tiles beside their kind."""
        return {}

    @property
    def shape(self) -> tuple[int, int, int]:
        """How many experts, rows of each, and elements of a row."""
        return 1, self.out, self.inside

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return self.data.nbytes

    def dense(self) -> torch.Tensor:
        """The plain weight ``[out, inside]``."""
        if self.kind != TILED:
            return self.data
        pairs = self.data.view(_PAIR).view(-1, -(-self.inside // _DEPTH) * _DEPTH // 2, GROUP)
        plain = pairs.transpose(1, 2).reshape(-1, pairs.shape[1]).contiguous().view(self.data.dtype)
        return plain[: self.out, : self.inside].contiguous()


def _tile(weight: torch.Tensor) -> torch.Tensor:
    """Groups of 64 columns, then pairs of elements, then columns: ``[out / 64, inside / 2, 4, 16, 2]``, padded with
    zeros; aligned.
    """
    out, inside = weight.shape
    padded = F.pad(weight, (0, -inside % _DEPTH, 0, -out % GROUP))
    pairs = padded.view(_PAIR).view(-1, GROUP, padded.shape[1] // 2)
    tiled = huge.empty(pairs.numel(), _PAIR)
    for to, group in zip(tiled.view(len(pairs), -1, GROUP), pairs, strict=True):
        to.copy_(group.t())  # torch transposes matrices in blocks, and other tensors element by element
    return tiled.view(weight.dtype)
