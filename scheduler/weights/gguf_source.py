"""`GgufSource`: a packed tensor of a GGUF file as a `PackedSource`, and the values of plain tensors."""

from __future__ import annotations

import torch

from scheduler.weights.gguf_file import GgufTensor
from scheduler.weights.gguf_types import TYPES
from scheduler.weights.packed_source import PackedRows
from scheduler.weights.packed_values import unpacked

_ROWS = 64  # that are unpacked at a time


class GgufSource:
    """The rows of a packed tensor, or some of them in another order; they stay in the file until they are read."""

    order: torch.Tensor | None = None

    def __init__(self, tensor: GgufTensor, rows: torch.Tensor | None = None) -> None:
        """``rows``: int64 ``[out]``, which row of the tensor each row is; None for all of them as they are. A tensor of
        more than two dimensions is taken as ``[all others, last]``.
        """
        kind = TYPES[tensor.kind]
        if kind.unpack is None:
            raise ValueError(f"{kind.name} is not packed")
        self._unpack, self._size = kind.unpack, kind.nbytes
        self._data, self._index = tensor.data, rows
        self.out = len(tensor.data) if rows is None else len(rows)
        self.inside = tensor.shape[-1]
        self.bits, self.group, self.zero, self.table = kind.bits, kind.group, kind.zero, kind.table

    def rows(self, start: int, stop: int) -> PackedRows:
        """Rows ``start`` to ``stop``, packed."""
        data = self._data[start:stop] if self._index is None else self._data[self._index[start:stop]]
        return self._unpack(data.view(len(data), -1, self._size))

    def dequantise(self, start: int, stop: int) -> torch.Tensor:
        """Rows ``start`` to ``stop``: float32 ``[rows, inside]``."""
        return unpacked(self.rows(start, stop), self.zero, self.table)


def values(tensor: GgufTensor) -> torch.Tensor:
    """A plain tensor, as the file stores it: a view of the file's mapping. Raises ``ValueError`` for a packed one."""
    kind = TYPES[tensor.kind]
    if kind.dtype is None:
        raise ValueError(f"{kind.name} is packed")
    return tensor.data.view(kind.dtype).view(tensor.shape)


def all_values(tensor: GgufTensor, dtype: torch.dtype) -> torch.Tensor:
    """A tensor as floats, packed or not; a view of the file's mapping where it is stored so."""
    if tensor.plain:
        return values(tensor).to(dtype)
    source = GgufSource(tensor)
    whole = torch.empty(source.out, source.inside, dtype=dtype)
    for start in range(0, source.out, _ROWS):
        whole[start : start + _ROWS] = source.dequantise(start, min(start + _ROWS, source.out))
    return whole.view(tensor.shape)
