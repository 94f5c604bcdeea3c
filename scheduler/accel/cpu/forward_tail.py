"""``ForwardTail``: what a forward does with the result of its last chain, where that is done for every row alone and
then some rows are chosen, those whose logits are wanted: these can be chosen first, and the last layer's block after
its attention is computed for them alone, as llama.cpp does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from scheduler.accel.cpu.recorded_call import RecordedCall, Slice, StepValue, users

_ALL = Slice(None, None, None)


class ForwardTail(NamedTuple):
    """The numbers of calls."""

    last: int  # of the chain
    modules: tuple[int, ...]  # each gets the result of the one before
    choice: int  # gets that of the last one of these, and chooses rows
    axis: int  # of the rows
    rows: str  # the argument of the forward that has their numbers

    @property
    def before(self) -> int:
        """What rows are chosen of."""
        return self.modules[-1] if self.modules else self.last

    def is_row_by_row(self, calls: Mapping[int, RecordedCall], results: Sequence[Any], rows: Any) -> bool:
        """Whether modules do the same for some rows, in the forward that had these ``results`` and chose ``rows``."""
        hidden, before = results[self.last], results[self.before]
        if not isinstance(rows, torch.Tensor) or rows.dtype is not torch.int64 or rows.dim() != 1:
            return False
        if not all(isinstance(one, torch.Tensor) and one.dim() > self.axis for one in (hidden, before)):
            return False
        some = torch.arange(hidden.shape[self.axis]).flip(0)[: hidden.shape[self.axis] // 2]
        found = hidden.index_select(self.axis, some)
        for number in self.modules:
            found = calls[number].function(found)
        return bool(found.any()) and torch.equal(found, before.index_select(self.axis, some))


def find_tail(calls: Mapping[int, RecordedCall]) -> ForwardTail | None:
    """The tail of a forward that makes these calls; None if it has no such."""
    first = max((number for number, call in calls.items() if call.chain), default=None)
    if first is None:
        return None
    modules: list[int] = []
    last = at = calls[first].chain[-1]
    while len(behind := users(calls, at)) == 1:
        (number,) = behind
        call = calls[number]
        if isinstance(call.function, torch.nn.Module) and (call.args, call.kwargs) == ((StepValue(at),), {}):
            modules.append(at := number)
        elif (found := _chosen(call, at)) is not None:
            return ForwardTail(last, tuple(modules), number, *found)
        else:
            return None
    return None


def _chosen(call: RecordedCall, of: int) -> tuple[int, str] | None:
    """The axis along which a call chooses rows of a result, and the argument of the forward that names them."""
    if call.function is not torch.Tensor.__getitem__ or len(call.args) != 2 or call.args[0] != StepValue(of):
        return None
    keys = call.args[1] if type(call.args[1]) is tuple else (call.args[1],)
    others = [axis for axis, key in enumerate(keys) if key != _ALL]
    if len(others) != 1:
        return None
    key = keys[others[0]]
    named = isinstance(key, StepValue) and isinstance(key.of, str) and not key.path
    return (others[0], key.of) if named else None
