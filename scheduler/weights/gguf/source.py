"""`GgufSource`: a packed tensor of a GGUF file as a `PackedSource`, and the values of plain tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from scheduler.weights.gguf.file import GgufTensor
from scheduler.weights.gguf.types import TYPES
from scheduler.weights.packed_source import PackedRows
from scheduler.weights.packed_values import in_order, unpack
from scheduler.weights.scale_layout import StoredRows

_BLOCK = 32
_ROWS = 64  # that are unpacked at a time


class GgufSource:
    """The rows of packed tensors of one type, or some of them in another order; they stay in the file until they are
    read.
    """

    def __init__(
        self, tensors: Sequence[GgufTensor], rows: torch.Tensor | None = None, columns: torch.Tensor | None = None
    ) -> None:
        """``rows``: int64 ``[out]``, which row of the tensors, one after the other, each row is; ``columns``: int64
        ``[inside]``, which input each column is multiplied by; None: as they are. A tensor of more than two dimensions
        is taken as ``[all others, last]``. Raises ``ValueError`` for tensors that are not packed, or have different
        types.
        """
        kind = TYPES[tensors[0].kind]
        if kind.dtype is not None or any(tensor.kind != tensors[0].kind for tensor in tensors):
            raise ValueError(f"the tensors are not packed in one type ({kind.name})")
        self._kind = kind
        self._parts = [tensor.data for tensor in tensors]
        count = sum(len(part) for part in self._parts)
        self._index = torch.arange(count) if rows is None and len(tensors) > 1 else rows
        self.out = count if rows is None else len(rows)
        self.inside = tensors[0].shape[-1]
        self.nbytes = sum(part.nbytes for part in self._parts) * self.out // max(count, 1)
        self.bits, self.group, self.zero, self.table = kind.bits, kind.group, kind.zero, kind.table
        self.order = columns

    def rows(self, start: int, stop: int) -> PackedRows:
        """Rows ``start`` to ``stop``, packed."""
        return self._unpack(self._bytes(start, stop))

    def stored(self, start: int, stop: int) -> StoredRows | None:
        """Rows ``start`` to ``stop`` as the file stores them; None where a table does not say where scales are, or
        blocks of one scale have more than 32 elements.
        """
        scales = self._kind.scales
        if scales is None or self.group > _BLOCK:
            return None
        return StoredRows(self._bytes(start, stop), self._kind.codes, scales)

    def take(self, ids: torch.Tensor) -> torch.Tensor:
        """The rows of int64 ``ids [n]``: float32 ``[n, inside]``."""
        found = self._find(ids if self._index is None else self._index[ids])
        return in_order(unpack(self._unpack(found), self.zero, self.table), self.order)

    def dequantise(self, start: int, stop: int) -> torch.Tensor:
        """Rows ``start`` to ``stop``: float32 ``[rows, inside]``, columns in the order of the inputs."""
        return in_order(unpack(self.rows(start, stop), self.zero, self.table), self.order)

    def _find(self, numbers: torch.Tensor) -> torch.Tensor:
        """uint8 ``[n, bytes]``: the rows of these numbers."""
        if len(self._parts) == 1:
            return self._parts[0].index_select(0, numbers)
        found, first = torch.empty(len(numbers), self._parts[0].shape[1], dtype=torch.uint8), 0
        for part in self._parts:
            mine = (numbers >= first) & (numbers < first + len(part))
            found[mine] = part.index_select(0, numbers[mine] - first)
            first += len(part)
        return found

    def _bytes(self, start: int, stop: int) -> torch.Tensor:
        return self._parts[0][start:stop] if self._index is None else self._find(self._index[start:stop])

    def _unpack(self, data: torch.Tensor) -> PackedRows:
        return self._kind.unpack(data.view(len(data), -1, self._kind.nbytes))


def values(tensor: GgufTensor) -> torch.Tensor:
    """A plain tensor in its shape and dtype, as the file stores it: a view of the file's mapping. Raises ``ValueError``
    for a packed one.
    """
    kind = TYPES[tensor.kind]
    if kind.dtype is None:
        raise ValueError(f"{kind.name} is packed")
    return tensor.data.view(kind.dtype).view(tensor.shape)


def all_values(tensor: GgufTensor, dtype: torch.dtype) -> torch.Tensor:
    """A tensor in its shape as floats of ``dtype``; a view of the file's mapping where it is stored so."""
    if tensor.plain:
        return values(tensor).to(dtype)
    source = GgufSource([tensor])
    whole = torch.empty(source.out, source.inside, dtype=dtype)
    for start in range(0, source.out, _ROWS):
        whole[start : start + _ROWS] = source.dequantise(start, min(start + _ROWS, source.out))
    return whole.view(tensor.shape)
