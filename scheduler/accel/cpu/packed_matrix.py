"""``PackedMatrix``: a weight of few bits, as the C++ kernel multiplies with it, made from a `PackedSource`."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

import torch

from cache.memory import huge
from scheduler.accel.cpu.kept_tiles import TilePlace
from scheduler.accel.cpu.matrix import GROUP, Matrix
from scheduler.accel.cpu.packed_form import NotHalf, NotPackable, PackedForm
from scheduler.accel.cpu.real_form import RealForm
from scheduler.weights.packed_source import PackedSource
from scheduler.weights.packed_values import in_order
from scheduler.weights.scale_layout import StoredSource

__all__ = ["NotPackable", "PackedMatrix"]
# Values that are packed at a time, if 64 rows have not more: torch works on so few in one thread; and without torch.
_TOGETHER, _STORED_TOGETHER = 1 << 19, 1 << 22


class PackedMatrix(Matrix):
    """A weight ``[out, inside]`` of 4, 5, 6 or 8 bits a value, with scales of two levels, in float16 or float32; or the
    weights of experts, each of them padded with rows of zeros to whole groups of columns. Its form is a ``PackedForm``
    where values are whole numbers, else a ``RealForm``.
    """

    def __init__(self, source: PackedSource, experts: int = 1, place: TilePlace | None = None) -> None:
        """Copies a packed weight, some rows at a time, if it is not in its ``place`` of an earlier start. Raises
        ``NotPackable``.
        """
        each = source.out // experts
        groups = -(-each // GROUP)
        self.out, self.inside, self.limit = each if experts == 1 else experts * groups * GROUP, source.inside, None
        self._experts, self._groups, self._each = experts, groups, each
        self.order = None if source.order is None else source.order.numpy()
        self.kept = place is not None and self._take(place)
        if self.kept:
            return
        forms = _forms(source)
        began = time.perf_counter()
        try:
            self._copy(source, forms[0])
        except NotHalf:
            self._copy(source, forms[-1])
        if place is not None:
            place.note(self, time.perf_counter() - began)

    @property
    def shape(self) -> tuple[int, int, int]:
        return self._experts, self._each, self.inside

    @property
    def form(self) -> dict[str, Any]:
        return {"whole": isinstance(self._form, PackedForm), **asdict(self._form)}

    def _take(self, place: TilePlace) -> bool:
        """Whether the weight is there. Nothing of its source is read for that."""
        if (found := place.take(self)) is None:
            return False
        kept, self.data = found
        said: dict[str, Any] = {**kept.form, "table": tuple(kept.form["table"])}
        self._form = PackedForm(**said) if said.pop("whole", True) else RealForm(**said)
        self.kind = self._form.type
        return (kept.kind, kept.nbytes) == (self.kind, self._experts * self._groups * self._form.nbytes(self.inside))

    def _copy(self, source: PackedSource, form: PackedForm | RealForm) -> None:
        values = _STORED_TOGETHER if isinstance(source, StoredSource) else _TOGETHER
        size, together = form.nbytes(self.inside), max(1, values // (GROUP * self.inside))
        data = huge.empty(self._experts * self._groups * size, torch.uint8)
        parts = []
        for expert, groups in enumerate(data.view(self._experts, -1, size)):
            first, last = expert * self._each, (expert + 1) * self._each
            for some in groups.split(together):
                parts.append((first, min(first + len(some) * GROUP, last), some))
                first += len(some) * GROUP
        form.pack(source, *parts[0])  # before all others: it may raise
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            list(pool.map(lambda part: form.pack(source, *part), parts[1:]))
        self.data, self._form, self.kind = data, form, form.type

    def dense(self) -> torch.Tensor:
        """The values: float32 ``[out, inside]``."""
        return self.dequantise(0, self.out)

    def take(self, ids: torch.Tensor) -> torch.Tensor:
        """The rows of int64 ``ids [n]``: float32 ``[n, inside]``."""
        return torch.cat([self.dequantise(row, row + 1) for row in ids.tolist()])

    def dequantise(self, start: int, stop: int) -> torch.Tensor:
        """Rows ``start`` to ``stop``: float32 ``[rows, inside]``."""
        groups = self.data.view(-1, self._form.nbytes(self.inside))
        first, last = start // GROUP, -(-stop // GROUP)
        plain = torch.empty((last - first) * GROUP, self.inside)
        for number in range(first, last):
            at = (number - first) * GROUP
            plain[at : at + GROUP] = self._form.values(groups[number], self.inside)
        found = plain[start - first * GROUP : stop - first * GROUP]
        return in_order(found, None if self.order is None else torch.from_numpy(self.order))


def _forms(source: PackedSource) -> list[PackedForm | RealForm]:
    """Those that a weight may have, the smallest first. Raises ``NotPackable``."""
    if (real := RealForm.of(source)) is not None:
        return [real]
    form = PackedForm.of(source)
    return [form, form.exact]
