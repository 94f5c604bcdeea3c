"""`QuantisedWeight`: a parameter that stays as its checkpoint packed it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

import torch

from scheduler.weights.packed_source import PackedSource, RowSource
from scheduler.weights.stand_in import WeightStandIn

_ROWS = 64  # that are unpacked at a time
_FEW = 16  # rows of an embedding, each of which is looked for among those that were taken before
_KEPT = 8 << 20  # bytes of such rows: a few tokens are most of a text


class QuantisedWeight:
    """What `WeightStandIn` stands for: a weight ``[out, inside]``, or of experts ``[count, out, inside]``, whose rows
    are those of a `PackedSource`, one expert's after the other's.
    """

    def __init__(
        self,
        source: PackedSource,
        dtype: torch.dtype,
        count: int = 1,
        flipped: bool = False,
        release: Callable[[], None] = lambda: None,
        lasting: bool = True,
    ) -> None:
        """``dtype``: of the unpacked values. ``count`` of experts; ``flipped``: the module has ``[count, inside,
        out]``. ``release`` is called when many rows were read, and may give memory back that they were read into.
        ``lasting``: the source takes no memory that ``replace`` would save.
        """
        self.source: PackedSource = source
        self._rows: RowSource = source
        self.dtype, self.count, self.flipped = dtype, count, flipped
        self.release, self.lasting = release, lasting
        self.touched = False
        self._taken: OrderedDict[int, torch.Tensor] = OrderedDict()  # the last one used is at the end
        self._most_taken = max(1, _KEPT // (source.inside * dtype.itemsize))

    @property
    def out(self) -> int:
        """Rows of one expert, or of the weight."""
        return self._rows.out // self.count

    @property
    def nbytes(self) -> int:
        """Bytes of the weight in its checkpoint."""
        return self._rows.nbytes

    def replace(self, by: RowSource) -> None:
        """Read rows from ``by`` from now on, which has the same; the source is let go unless it lasts."""
        if not self.lasting:
            del self.source
            self._rows = by
            self._taken.clear()

    def dequantise(self, start: int, stop: int) -> torch.Tensor:
        """Rows ``start`` to ``stop``: float32 ``[rows, inside]``."""
        return self._rows.dequantise(start, stop)

    def dense(self) -> torch.Tensor:
        """The plain weight, in the module's layout: ``[out, inside]``."""
        source = self._rows
        whole = torch.empty(source.out, source.inside, dtype=self.dtype)
        for start in range(0, source.out, _ROWS):
            stop = min(start + _ROWS, source.out)
            whole[start:stop] = source.dequantise(start, stop)
        self.release()
        if self.count > 1:
            whole = whole.view(self.count, -1, source.inside)
        return whole.transpose(-1, -2).contiguous() if self.flipped else whole

    def dense_of(self, experts: Sequence[int]) -> torch.Tensor:
        """The plain weights of some experts, in the module's layout."""
        each = [self.dequantise(number * self.out, (number + 1) * self.out) for number in experts]
        whole = torch.stack(each).to(self.dtype)
        return whole.transpose(1, 2).contiguous() if self.flipped else whole

    def take(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of an embedding: ``[..., inside]`` for int64 ``ids [...]``."""
        flat = ids.flatten()
        if 0 < len(flat) <= _FEW:
            rows = torch.stack(
                [self._row(number) for number in flat.tolist()]
            )  # of its own: it may be changed in place
        else:
            rows = self._rows.take(flat).to(self.dtype)
        return rows.view(*ids.shape, -1)

    def _row(self, number: int) -> torch.Tensor:
        row = self._taken.pop(number, None)
        if row is None:
            row = self._rows.dequantise(number, number + 1).to(self.dtype)[0]
            if len(self._taken) == self._most_taken:
                self._taken.popitem(last=False)
        self._taken[number] = row
        return row


def quantised_weight_of(parameter: torch.Tensor | None) -> QuantisedWeight | None:
    """The weight that a parameter, of its shape, stands for; None if it is no stand-in."""
    of = parameter.of if isinstance(parameter, WeightStandIn) else None
    return of if isinstance(of, QuantisedWeight) else None
