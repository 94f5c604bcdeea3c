"""``RecordedForward``: the modules and functions that a model's forward calls, in order, so that a step can call them
without the code between them. Beside small layers that code takes long: arguments and outputs are wrapped, masks that
nothing reads are asked for, and each layer of a chain is called for a result that is ready.

Modules are called as a whole. Those with a chain of programs inside are *opened*: what they call is recorded instead.
Two steps of different lengths are recorded, and must agree in everything but tensors and the cache. The probe compares
results afterwards, as it does for programs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch.overrides import TorchFunctionMode

from scheduler.accel.cpu.embedding_rows import EmbeddingRows
from scheduler.accel.cpu.forward_tail import find_tail
from scheduler.accel.cpu.fused_module import any_hook, hooks_of
from scheduler.accel.cpu.position_table import PositionTable
from scheduler.accel.cpu.recorded_call import Fill, RecordedCall, RunAhead, Slice, StepValue, filler, users
from scheduler.accel.cpu.recorder import Unrecordable

_PLAIN = (type(None), bool, str, int, float, torch.dtype, torch.device, type(...))
_OPERATORS = "add|sub|mul|truediv|floordiv|mod|pow|and|or|xor|lshift|rshift"
_IN_PLACE = re.compile(rf"[a-z]\w*[^_]_|__i({_OPERATORS})__|__set(item)?__")
_POSITIONS = StepValue("position_ids")  # of each token of a step, int64 [1, T]
_RESHAPES = (torch.Tensor.reshape, torch.Tensor.view)
# What tells of a tensor nothing that depends on its values.
_METADATA = frozenset(
    "__get__ __len__ size dim ndimension numel nelement stride storage_offset is_contiguous element_size data_ptr "
    "get_device is_floating_point is_complex".split()
)


class ChainedModule(Protocol):
    """A module of a chain, as ``FusedModule`` is one."""

    @property
    def module(self) -> torch.nn.Module:
        """The module itself."""

    @property
    def run_ahead(self) -> RunAhead:
        """Computes a chain of which it is the first module."""

    @property
    def run_some(self) -> RunAhead:
        """Computes this module, for some rows."""

    @property
    def ready(self) -> torch.Tensor | None:
        """What its next call returns if the arguments are those that were foreseen."""


class RecordedForward:
    """The calls of a forward. ``run`` makes them with the arguments of another step."""

    def __init__(self, recorder: ForwardRecorder) -> None:
        """``recorder`` has seen one forward. Raises Unrecordable."""
        given, result = recorder.given, recorder.ref(recorder.result)
        if recorder.refused:
            raise Unrecordable(recorder.refused)
        if not isinstance(result, StepValue):
            raise Unrecordable("the logits are of no call")
        self._given = {name: _kind(value) for name, value in given.items()}
        self._result = result
        self._calls = {number: recorder.calls[number] for number in sorted(recorder.needed(result))}
        if problem := next((call.problem for call in self._calls.values() if call.problem), ""):
            raise Unrecordable(problem)
        for number, call in self._calls.items():
            if any(users(self._calls, one) != [behind] for one, behind in pairwise(call.chain)):
                self._calls[number] = replace(call, run_ahead=None)
        tail = find_tail(self._calls)
        alone = tail is not None and tail.is_row_by_row(self._calls, recorder.results, recorder.given[tail.rows])
        self._tail = tail if alone else None
        self._last = recorder.alone(self._calls[tail.last].function) if tail is not None and alone else None
        self._fill: dict[int, Fill] = {}
        self._hooks = hooks_of(recorder.opened)
        self._forwards = [(vars(one), vars(one).get("forward")) for one in recorder.opened]

    def choose_rows_first(self, other: RecordedForward) -> None:
        """Let rows be chosen before what is done for each alone, if that is so in another recording, too."""
        tail = self._tail = self._tail if self._tail == other._tail else None
        if tail is not None:
            self._calls[tail.last] = replace(self._calls[tail.last], chain=[tail.last], run_ahead=self._last)

    def replace_modules(self, recorder: ForwardRecorder) -> None:
        """Let what gives the same in less time take the place of modules, as ``recorder`` has seen them called."""
        values: dict[int | str, Any] = dict(enumerate(recorder.results))
        values.update(recorder.given)
        for number, call in self._calls.items():
            if not isinstance(call.function, torch.nn.Module) or call.chain:
                continue
            function: Callable[..., Any] | None = EmbeddingRows.of(call.function)
            keys = [key for key, value in (*enumerate(call.args), *call.kwargs.items()) if value == _POSITIONS]
            if function is None and len(keys) == 1:
                args, kwargs = filler((call.args, call.kwargs))(values)
                function = PositionTable.of(call.function, args, kwargs, keys[0])
            self._calls[number] = call if function is None else replace(call, function=function)

    def run(self, given: Mapping[str, Any], whole: bool = False) -> torch.Tensor | None:
        """The logits ``[1, rows, V]`` of a forward with these arguments. None, and nothing was called, if they are of
        other kinds than those recorded, or an opened module has hooks or another forward. ``whole``: every module gets
        all rows, as adapters are found by row. Raises MemoryError.
        """
        if any_hook(self._hooks):
            return None
        if any(own.get("forward") is not forward for own, forward in self._forwards):
            return None
        if {name: _kind(value) for name, value in given.items()} != self._given:
            return None
        if not self._fill:
            self._fill = {number: filler((call.args, call.kwargs)) for number, call in self._calls.items()}
        values: dict[int | str, Any] = dict(given.items())
        for number, call in self._calls.items():
            if number in values:  # computed with its chain
                continue
            tail = None if whole or self._tail is None or self._tail.last not in call.chain else self._tail
            args, kwargs = self._fill[number](values)
            wanted = None if tail is None else given[tail.rows]
            result = None if call.run_ahead is None else call.run_ahead(wanted, *args, **kwargs)
            if result is None:
                values[number] = call.function(*args, **kwargs)
                continue
            values.update(dict.fromkeys(call.chain, result))
            if tail is not None:
                for behind in tail.modules:
                    args, kwargs = self._fill[behind](values)
                    values[behind] = self._calls[behind].function(*args, **kwargs)
                values[tail.choice] = values[tail.before]
        logits: torch.Tensor = values[self._result.of]
        for key in self._result.path:
            logits = logits[key]
        return logits

    def infer_sizes(self, other: RecordedForward) -> None:
        """Let torch find the sizes of views that are others in another recording, of a step of another length."""
        for number, call in self._calls.items():
            if call.function in _RESHAPES and (theirs := other._calls.get(number)) is not None:
                args = _inferred(call.args, theirs.args)
                self._calls[number] = replace(call, args=args)

    def is_same(self, other: RecordedForward) -> bool:
        """Whether another recording has the same calls."""
        mine, theirs = ((one._given, one._calls, one._result) for one in (self, other))
        return bool(mine == theirs)


class ForwardRecorder(TorchFunctionMode):
    """Records what a forward of ``model`` calls."""

    def __init__(self, model: torch.nn.Module, chains: Sequence[Sequence[ChainedModule]]) -> None:
        super().__init__()
        self.calls: list[RecordedCall] = []
        self.results: list[Any] = []  # of these
        self.given: dict[str, Any] = {}
        self.result: Any = None
        self.refused = ""
        self._model = model
        self._firsts = {chain[0].module: chain[0] for chain in chains}
        self._behind = {one.module: (chain[0].module, one) for chain in chains for one in chain[1:]}
        chained = self._firsts.keys() | self._behind.keys()
        self.opened = [one for one in model.modules() if one not in chained and not chained.isdisjoint(one.modules())]
        self._chain_calls: dict[torch.nn.Module, list[int]] = {}  # by the first module
        self._whole: set[int] = set()  # the numbers of calls of modules
        self._known: dict[int, StepValue] = {}  # by the values' ids
        self._alive: list[Any] = []  # so that no id is used twice
        self._inside = False  # a module that is called as a whole

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Within it the next forward of the model is recorded."""
        opened, forward = set(self.opened), self._model.forward
        with ExitStack() as stack:
            for module in {child for one in opened for child in one.children()} - opened:
                before = module._compiled_call_impl
                stack.callback(_put_back, module, module.__dict__.get("_compiled_call_impl"))
                module._compiled_call_impl = partial(self._call, module, before or module._call_impl)
            stack.callback(_put_back, self._model, self._model.__dict__.get("forward"), "forward")
            self._model.forward = partial(self._forward, forward)
            yield

    def alone(self, module: Any) -> RunAhead | None:
        """How a module behind the first one of a chain computes some rows by itself."""
        return self._behind[module][1].run_some if module in self._behind else None

    def ref(self, value: Any) -> Any:
        """``value`` with ``StepValue`` for the values of the step. Raises Unrecordable for what is neither one nor
        plain.
        """
        if (known := self._known.get(id(value))) is not None:
            return known
        if type(value) in _PLAIN:
            return value
        if type(value) is slice:
            return Slice(self.ref(value.start), self.ref(value.stop), self.ref(value.step))
        if type(value) in (tuple, list):
            return type(value)(map(self.ref, value))
        if type(value) is dict:
            return {key: self.ref(one) for key, one in value.items()}
        raise Unrecordable(f"an argument is another {type(value).__name__}")

    def needed(self, result: StepValue) -> set[int]:
        """The numbers of the calls on which ``result`` depends, and of those of all modules."""
        found: set[int] = set()
        left = [result.of, *self._whole]
        while left:
            number = left.pop()
            if isinstance(number, int) and number not in found:
                found.add(number)
                left += (ref.of for ref in self.calls[number].needs)
        return found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record a call of a function of torch."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if self._inside:
            return out
        name = getattr(func, "__name__", "")
        returns = any(isinstance(one, torch.Tensor) for one in (out if isinstance(out, (tuple, list)) else [out]))
        if "out" in kwargs or _IN_PLACE.fullmatch(name) or not (returns or name in _METADATA):
            self.refused = self.refused or f"its code calls {name}"
        if returns:
            self._add(func, args, kwargs, out)
        return out

    def _forward(self, forward: Callable[..., Any], **given: Any) -> Any:
        self.given = given
        for name, value in given.items():
            if type(value) not in _PLAIN:
                self._remember(value, StepValue(name))
        with self:
            out = forward(**given)
        self.result = out.logits
        return out

    def _call(self, module: torch.nn.Module, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Replaces the call of a module that is called as a whole."""
        if self._inside or not self.given:
            return call(*args, **kwargs)
        for value in (*args, *kwargs.values()):
            if isinstance(value, MutableMapping) and not value and id(value) not in self._known:
                self._add(type(value), (), {}, value)  # modules write to it, and read what others have written
        foreseen = self._behind[module][1].ready if module in self._behind else None
        self._inside = True
        try:
            out = call(*args, **kwargs)
        finally:
            self._inside = False
        number = self._add(module, args, kwargs, out)
        self._whole.add(number)
        if (first := self._firsts.get(module)) is not None:
            self._chain_calls[module] = chain = [number]
            self.calls[number] = replace(self.calls[number], chain=chain, run_ahead=first.run_ahead)
        elif module in self._behind:
            if foreseen is None or out is not foreseen:
                self.refused = self.refused or "a chain was not computed at once"
            else:
                self._chain_calls[self._behind[module][0]].append(number)
        return out

    def _add(self, function: Callable[..., Any], args: Any, kwargs: Any, out: Any) -> int:
        """Record a call; returns its number."""
        try:
            call = RecordedCall(function, self.ref(tuple(args)), self.ref(dict(kwargs)), "")
        except Unrecordable as problem:
            call = RecordedCall(function, (), {}, str(problem))
        self.calls.append(call)
        self.results.append(out)
        self._alive.append(args)
        self._remember(out, StepValue(len(self.calls) - 1))
        return len(self.calls) - 1

    def _remember(self, value: Any, ref: StepValue) -> None:
        """Know a value, and the tensors in it, where they have no other source."""
        if type(value) in _PLAIN or id(value) in self._known:
            return
        self._alive.append(value)
        self._known[id(value)] = ref
        parts = (
            value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (tuple, list)) else ()
        )
        for key, part in parts:
            self._remember(part, StepValue(ref.of, (*ref.path, key)))


def record_forward(
    model: torch.nn.Module, chains: Sequence[Sequence[ChainedModule]], steps: Callable[[int], Iterator[None]]
) -> RecordedForward:
    """What the forward of ``model`` calls. ``steps`` runs so many steps of one session, of different lengths, one per
    iteration; chains run from the second one on, when there are pages. Raises Unrecordable.
    """
    running = steps(3)
    next(running)
    (shorter, _), (longer, recorder) = (_record_next(model, chains, running) for _ in range(2))
    longer.infer_sizes(shorter)
    shorter.infer_sizes(longer)
    if not shorter.is_same(longer):
        raise Unrecordable("two steps call different functions")
    longer.choose_rows_first(shorter)
    longer.replace_modules(recorder)
    return longer


def _record_next(
    model: torch.nn.Module, chains: Sequence[Sequence[ChainedModule]], steps: Iterator[None]
) -> tuple[RecordedForward, ForwardRecorder]:
    recorder = ForwardRecorder(model, chains)
    with recorder.recording():
        next(steps)
    return RecordedForward(recorder), recorder


def _kind(value: Any) -> tuple[Any, ...]:
    """What an argument must have in common with the recorded one."""
    if isinstance(value, torch.Tensor):
        return type(value), value.dtype, value.dim()
    return (type(value), value) if type(value) in _PLAIN else (type(value),)


def _inferred(mine: Any, theirs: Any) -> Any:
    """The arguments of a view with -1 for the one size that is another one in ``theirs``."""
    sizes, others = ((args[1] if len(args) == 2 else args[1:]) for args in (mine, theirs))
    if not isinstance(sizes, (tuple, list)) or not isinstance(others, (tuple, list)) or len(sizes) != len(others):
        return mine
    different = [place for place, size in enumerate(sizes) if size != others[place]]
    if len(different) != 1 or not all(type(size) is int and size >= 0 for size in sizes):
        return mine
    return mine[0], tuple(-1 if place in different else size for place, size in enumerate(sizes))


def _put_back(module: torch.nn.Module, before: Any, name: str = "_compiled_call_impl") -> None:
    module.__dict__.pop(name, None)
    if before is not None:
        module.__dict__[name] = before
