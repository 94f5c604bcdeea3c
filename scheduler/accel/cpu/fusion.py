"""``Fusion``: finds the modules of a model that can run as programs, and replaces their forwards.

A module is recorded in two steps with different numbers of tokens, and both recordings must agree. The program's
results are compared with those of the module before it is used. If a module cannot be recorded it runs unchanged, and
its children are tried.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from cache.attention import cpu
from cache.attention.packed_attention import PackedAttention
from scheduler.accel.cpu.foresight import Call, Difference, Foresight, Origins
from scheduler.accel.cpu.interceptors import AttentionRequest
from scheduler.accel.cpu.layer_chain import ChainResult, LayerChain
from scheduler.accel.cpu.layer_program import LayerProgram
from scheduler.accel.cpu.program import Program
from scheduler.accel.cpu.program_kernel import ProgramKernel
from scheduler.accel.cpu.recorder import Unrecordable
from scheduler.accel.cpu.recording import Linear, ModuleRecording, record

log = logging.getLogger("warmturn.engine")


class FusedModule:
    """A module that runs as a program."""

    def __init__(
        self, module: torch.nn.Module, recording: ModuleRecording, kernel: ProgramKernel, attention: PackedAttention
    ) -> None:
        self.module = module
        self._original: Callable[..., Any] = module.forward
        self._recording = recording
        self._attention = attention
        self._programs = [Program(block, kernel, adapted=True) for block in recording.blocks]
        self._absorbed = [one.absorbed for one in recording.asked if one.absorbed is not None]
        self._limit = min(recording.limits, default=None)  # rows
        backend, asked = cpu.cpu_backend(), recording.asked
        self._layer: LayerProgram | None = None
        of_one_layer = len(asked) == 1 and isinstance(getattr(asked[0].module, "layer_idx", None), int)
        if backend is not None and of_one_layer:  # several layers may share a module
            self._layer = LayerProgram(recording.blocks, asked[0], attention, kernel, backend)
        self._kernel = kernel
        self._chain: LayerChain | None = None  # that it is the first of
        self._foresight: Foresight | None = None
        self._behind: list[FusedModule] = []  # those after it
        self._hooks: list[Any] = []  # the hook dictionaries of all modules of the chain
        self._computed: ChainResult | None = None  # what the first one has computed for it
        self._own = vars(module)
        self._forward = self.forward
        self.aside = False  # the module runs as it is

    def install(self) -> None:
        """Make the module run as a program."""
        self.module.forward = self._forward
        self.module._compiled_call_impl = self._call

    def remove(self) -> None:
        """Restore the module's own forward."""
        self.module.__dict__.pop("forward", None)
        self.module.__dict__.pop("_compiled_call_impl", None)
        self._computed = None

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        """Replaces the module's ``__call__``. Returns the result that a chain has computed ahead, unless the module has
        hooks, its forward was replaced, or the arguments are others.
        """
        ahead, self._computed = self._computed, None
        own = self._own
        passed_over = own.get("forward") is not self._forward or own["_forward_hooks"] or own["_forward_pre_hooks"]
        if ahead is not None and not passed_over and ahead.fits(args, kwargs):
            return ahead.result
        return self.module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The result of the module's forward; computed by that if the arguments are of other kinds than those
        recorded.
        """
        called = None if self.aside or self._expands() else self._recording.match(args, kwargs)
        if called is None:
            return self._original(*args, **kwargs)
        inputs, cache, rows = called
        if self._limit is not None and rows > self._limit:
            return self._original(*args, **kwargs)
        for fused in self._behind:  # of a step that has failed
            fused._computed = None
        if self._chain is not None and not self._hooked:
            found = self._run_chain((args, kwargs), inputs, cache, rows)
            if found is not None:
                return found
        if self._layer is not None:
            outputs = self._layer.run(cache, inputs, rows)
            if outputs is not None:
                return self._recording.assemble(outputs)
        return self.compute(inputs, partial(self._attend, cache))

    def _expands(self) -> bool:
        """Whether keys and values have to be made of latents in this step, which only the module's own code does."""
        step = self._attention.step
        if not self._absorbed or step is None:
            return False
        return step.adapted is not None or any(one.few(step) != step.numbers for one in self._absorbed)

    def _run_chain(self, call: Call, inputs: list[torch.Tensor], cache: Any, rows: int) -> torch.Tensor | None:
        """The result of this module, when those of all of its chain are computed; None if they cannot be."""
        assert self._chain is not None
        assert self._foresight is not None
        if (calls := self._foresight.calls(call)) is None:
            return None
        if (given := self._foresight.inputs(calls, inputs, cache)) is None:
            return None
        if (results := self._chain.run(cache, given, rows)) is None:
            return None
        groups = self._foresight.group_of[1:]
        for fused, group, (hidden, result) in zip(self._behind, groups, pairwise(results), strict=True):
            fused._computed = ChainResult(hidden, calls[group], result)
        return results[0]

    def compute(
        self, inputs: list[torch.Tensor], attend: Callable[[AttentionRequest, list[torch.Tensor]], torch.Tensor]
    ) -> Any:
        """Run the blocks one after the other on ``inputs``, each with its tokens in the axis that was recorded, with
        ``attend`` called between them. Returns what the module does.
        """
        rows = inputs[0].shape[self._recording.axis]
        between: dict[tuple[str, int], torch.Tensor] = {}
        outputs: list[torch.Tensor] = []
        for number, program in enumerate(self._programs):
            if number:
                attended = attend(self._recording.asked[number - 1], outputs)
                between["attention", 0] = attended.view(rows, -1)
            for external in program.externals:
                if external.kind == "carried":
                    between.setdefault(("carried", external.number), torch.empty(rows, *external.shape))
            program.place_inputs(inputs)
            program.place_between(between)
            outputs = program.place_outputs(rows)
            program.run(rows)
        return self._recording.assemble(outputs)

    @property
    def watched(self) -> set[torch.nn.Module]:
        """The modules whose results its chain has to know."""
        return self._foresight.modules if self._chain is not None and self._foresight is not None else set()

    @property
    def _hooked(self) -> bool:
        """Whether hooks run between the layers of the chain; they could change tensors in place, which is not
        detected.
        """
        return any(self._hooks) or bool(torch.nn.modules.module._has_any_global_hook())  # type: ignore[no-untyped-call]

    def can_precede(self, other: FusedModule) -> bool:
        """Whether ``other`` can directly follow this module in a chain."""
        if self._layer is None or other._layer is None or self._limit != other._limit:
            return False
        mine, theirs = (one.after.outputs[0][1] for one in (self._layer, other._layer))
        same = (mine.shape, mine.axis, mine.dtype) == (theirs.shape, theirs.axis, theirs.dtype)
        return same and self._recording.form.is_leaf() and other._recording.form.is_leaf()

    def set_chain(self, behind: list[FusedModule], differences: list[tuple[Difference, ...]], origins: Origins) -> None:
        """Make this module the first of a chain with the modules ``behind`` it, whose calls differ so from its own; of
        no chain if there are none.
        """
        layers = [one._layer for one in (self, *behind) if one._layer is not None]
        recordings = [one._recording for one in (self, *behind)]
        self._foresight = Foresight(origins, list(zip(recordings, [(), *differences], strict=True)))
        self._behind = behind
        self._chain = LayerChain(layers, self._foresight.group_of, self._kernel) if behind else None
        modules = [one.module for one in (self, *behind)]
        self._hooks = [hooks for each in modules for hooks in (each._forward_hooks, each._forward_pre_hooks)]

    def _attend(self, cache: Any, asked: AttentionRequest, outputs: list[torch.Tensor]) -> torch.Tensor:
        query, key, value = outputs
        if asked.absorbed is not None:
            step = cache.step
            step.tier.write_rows(asked.layer, step.write_positions(asked.layer), key[0, 0], value.shape[3])
            return self._attention.attend_rows(step, asked.layer, query[0], asked.scores, step.numbers)[None]
        key, value = cache.update(key, value, asked.layer)
        return self._attention.attend(asked.module, query, key, value, **asked.options)


class Fusion:
    """The fused modules of one model."""

    def __init__(self, attention: PackedAttention, linear: Linear, kernel: ProgramKernel) -> None:
        self._attention, self._linear, self._kernel = attention, linear, kernel
        self._fused: list[FusedModule] = []
        self._origins = Origins()

    def __len__(self) -> int:
        return len(self._fused)

    def install(self) -> None:
        """Make the fused modules run as programs."""
        for fused in self._fused:
            fused.install()
        self._origins.watch({module for fused in self._fused for module in fused.watched})

    def remove(self) -> None:
        """Restore the model."""
        self._origins.forget()
        for fused in self._fused:
            fused.remove()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Within it, the modules run as they are."""
        for fused in self._fused:
            fused.aside = True
        try:
            yield
        finally:
            for fused in self._fused:
                fused.aside = False

    def find(self, root: torch.nn.Module, steps: Callable[[bool], Iterator[None]]) -> None:
        """Fuse and install the modules of ``root`` that can be. ``steps`` runs two steps of different lengths, one
        per iteration; shorter ones for ``False``.
        """
        trying = list(_children(root))
        while trying:
            found = self._record(trying, steps)
            for fused in found.values():
                fused.install()
                self._fused.append(fused)
            trying = [child for module in trying if module not in found for child in _children(module)]
        parts = {part for fused in self._fused for part in fused.module.modules()}
        with self._origins.watching(module for module in root.modules() if module not in parts):
            self._link(steps)
        self._origins.watch({module for fused in self._fused for module in fused.watched})

    def unlink(self) -> None:
        """Remove all chains: every module is computed when it is called."""
        self._origins.forget()
        for fused in self._fused:
            fused.set_chain([], [], self._origins)

    def _link(self, steps: Callable[[bool], Iterator[None]]) -> None:
        """Make chains of modules that are called one after the other, each once per step, with arguments that the first
        one's call tells.
        """
        chains: list[Any] = []
        with record_calls(self._fused) as calls:
            for _ in steps(False):
                chains = list(self._chains(calls))
                calls.clear()
        for first, *behind in chains:
            differences = [more for _, more in behind]
            first[0].set_chain([fused for fused, _ in behind], differences, self._origins)

    def _chains(self, calls: list[FusedCall]) -> Iterator[list[tuple[FusedModule, tuple[Difference, ...]]]]:
        """Modules that can be a chain, with the differences of their calls from the first one's, after a step."""
        times, first, last = Counter(call.fused for call in calls), None, None
        chain: list[tuple[FusedModule, tuple[Difference, ...]]] = []
        for call in calls:
            more = None
            if first is not None and last is not None and times[call.fused] == 1 and last.can_precede(call):
                more = self._origins.differences((first.args, first.kwargs), (call.args, call.kwargs))
            if more is None:
                if len(chain) > 1:
                    yield chain
                chain, more = [], ()
                first = call if times[call.fused] == 1 else None
            last = call
            chain.append((call.fused, more))
        if len(chain) > 1:
            yield chain

    def _record(
        self, modules: list[torch.nn.Module], steps: Callable[[bool], Iterator[None]]
    ) -> dict[Any, FusedModule]:
        found: dict[Any, FusedModule] = {}
        watches = [ModuleRecorder(module, partial(record, self._attention, self._linear)) for module in modules]
        with record_modules(watches):
            for _ in steps(True):
                pass
        for watch in watches:
            try:
                found[watch.module] = watch.fuse(self._kernel, self._attention)
            except Unrecordable as error:
                log.debug("%s runs as it is: %s", type(watch.module).__name__, error)
        return found


class FusedCall(NamedTuple):
    """A recorded call of a fused module."""

    fused: FusedModule
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any

    def can_precede(self, other: FusedCall) -> bool:
        """Whether ``other`` was called with this call's result."""
        return bool(other.args) and other.args[0] is self.out and self.fused.can_precede(other.fused)


@contextmanager
def record_calls(modules: list[FusedModule]) -> Iterator[list[FusedCall]]:
    """Within it, calls of fused modules are appended to the list."""
    calls: list[FusedCall] = []

    def record_call(fused: FusedModule, *args: Any, **kwargs: Any) -> Any:
        calls.append(FusedCall(fused, args, kwargs, fused.forward(*args, **kwargs)))
        return calls[-1].out

    for fused in modules:
        fused.module.forward = partial(record_call, fused)
    try:
        yield calls
    finally:
        for fused in modules:
            fused.install()


class ModuleRecorder:
    """Records every call of one module."""

    def __init__(self, module: torch.nn.Module, record: Callable[..., tuple[Any, ModuleRecording]]) -> None:
        self.module = module
        self._record = record
        self._original: Callable[..., Any] = module.forward
        self._recordings: list[ModuleRecording] = []
        self._refused: Unrecordable | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module's forward and record it."""
        if self._refused is None:
            try:
                out, recording = self._record(self.module, self._original, args, kwargs)
                self._recordings.append(recording)
                return out
            except Unrecordable as error:
                self._refused = error
        return self._original(*args, **kwargs)

    def fuse(self, kernel: ProgramKernel, attention: PackedAttention) -> FusedModule:
        """The module as a program, compared with the recorded results. Raises ``Unrecordable`` if it cannot be one."""
        if self._refused is not None or len(self._recordings) < 2:
            raise self._refused or Unrecordable("not called")
        first = self._recordings[0]
        if any(other.signature != first.signature for other in self._recordings[1:]):
            raise Unrecordable("it does not do the same each time")
        if first.tokens == self._recordings[-1].tokens:
            raise Unrecordable("only one length was seen")
        fused = FusedModule(self.module, first, kernel, attention)
        for recording in self._recordings:
            recording.compare(fused.compute)
        return fused


@contextmanager
def record_modules(watches: list[ModuleRecorder]) -> Iterator[None]:
    """Within it, calls of the modules are recorded."""
    for watch in watches:
        watch.module.forward = watch.forward
    try:
        yield
    finally:
        for watch in watches:
            watch.module.__dict__.pop("forward", None)


def _children(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The children that are called. Containers and modules whose forward was replaced are skipped in favour of their
    children.
    """
    for child in module.children():
        if "forward" in vars(child) or isinstance(child, (torch.nn.ModuleList, torch.nn.ModuleDict)):
            yield from _children(child)
        else:
            yield child
