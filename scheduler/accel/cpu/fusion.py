"""``Fusion``: finds the modules of a model that can run as programs, and replaces their forwards.

A module is recorded in two steps with different numbers of tokens, and both recordings must agree. The program's
results are compared with those of the module before it is used. If a module cannot be recorded it runs unchanged, and
its children are tried. Of an earlier load it is known which modules can; they are recorded once, and the results of the
whole model are compared afterwards.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import msgspec
import torch

from cache.attention.packed_attention import PackedAttention
from scheduler.accel.cpu.foresight import Difference, Origins
from scheduler.accel.cpu.fused_module import FusedModule
from scheduler.accel.cpu.program_kernel import ProgramKernel
from scheduler.accel.cpu.recorded_forward import RecordedForward, record_forward
from scheduler.accel.cpu.recorder import Unrecordable
from scheduler.accel.cpu.recording import Linear, ModuleRecording, record
from scheduler.accel.cpu.state_recording import moved_only_if_recorded

log = logging.getLogger("warmturn.engine")

Steps = Callable[[bool, int], Iterator[None]]
_LENGTHS = 2  # of steps that are recorded: programs must be the same


class KnownPrograms(msgspec.Struct, frozen=True):
    """The programs of an earlier load: the names of the modules that are fused, in order, how many of these are in
    chains, and whether what the model's forward calls is recorded.
    """

    modules: tuple[str, ...] = ()
    chained: int = 0
    recorded: bool = False


class Fusion:
    """The fused modules of ``root``, the decoder of one model."""

    def __init__(
        self, root: torch.nn.Module, attention: PackedAttention, linear: Linear, kernel: ProgramKernel
    ) -> None:
        self._root, self._attention, self._linear, self._kernel = root, attention, linear, kernel
        self._fused: list[FusedModule] = []
        self._origins = Origins()
        self._recorded: RecordedForward | None = None

    def __len__(self) -> int:
        return len(self._fused)

    @property
    def programs(self) -> KnownPrograms:
        """What the next load needs of them."""
        names = {module: name for name, module in self._root.named_modules()}
        chained = sum(len(fused.chain) for fused in self._fused if len(fused.chain) > 1)
        return KnownPrograms(tuple(names[fused.module] for fused in self._fused), chained, self._recorded is not None)

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
        """Within it, the model and the modules run as they are."""
        recorded, self._recorded = self._recorded, None
        for fused in self._fused:
            fused.aside = True
        try:
            yield
        finally:
            self._recorded = recorded
            for fused in self._fused:
                fused.aside = False

    def find(self, steps: Steps, known: KnownPrograms | None = None) -> None:
        """Fuse and install the modules that can be. ``steps`` runs so many steps of different lengths, one per
        iteration; with ``True`` of lengths that are no size of the model. ``known``: those that an earlier load has
        compared with their modules; they are recorded once. Raises ``Unrecordable`` if one of them cannot be.
        """
        trying = list(_children(self._root)) if known is None else list(map(self._root.get_submodule, known.modules))
        while trying:
            found, trying = self._record(trying, steps, known is not None)
            for fused in found:
                fused.install()
            self._fused += found
        parts = {part for fused in self._fused for part in fused.module.modules()}
        if known is None or known.chained:  # else chains were wrong
            with self._origins.watching(module for module in self._root.modules() if module not in parts):
                self._link(steps)
        self._origins.watch({module for fused in self._fused for module in fused.watched})

    def record(self, model: torch.nn.Module, steps: Steps) -> None:
        """Let ``run`` call what the forward of ``model`` calls, where it has chains and that can be recorded."""
        chains = [chain for fused in self._fused if len(chain := fused.chain) > 1]
        try:
            self._recorded = record_forward(model, chains, partial(steps, False)) if chains else None
        except Unrecordable as error:
            log.debug("%s runs its own forward: %s", type(model).__name__, error)

    def run(self, given: dict[str, Any], whole: bool = False) -> torch.Tensor | None:
        """The logits of a forward of the model with these arguments; None if only the model's own code can compute
        them. ``whole``: every module gets all rows. Raises MemoryError.
        """
        return None if self._recorded is None else self._recorded.run(given, whole)

    def unrecord(self) -> None:
        """Let the model's own forward run."""
        self._recorded = None

    def unlink(self) -> None:
        """Remove all chains: every module is computed when it is called."""
        self.unrecord()
        self._origins.forget()
        for fused in self._fused:
            fused.set_chain([], [], self._origins)

    def _link(self, steps: Steps) -> None:
        """Make chains of modules that are called one after the other, each once per step, with arguments that the first
        one's call tells.
        """
        chains: list[Any] = []
        with record_calls(self._fused) as calls:
            for _ in steps(False, 2):
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
        self, modules: list[torch.nn.Module], steps: Steps, known: bool
    ) -> tuple[list[FusedModule], list[torch.nn.Module]]:
        """The programs among ``modules`` and those within them, and the modules that are to be tried next. ``known``:
        all of them are, and nothing is compared. Raises ``Unrecordable`` if that is not so.
        """
        found: list[FusedModule] = []
        behind: list[torch.nn.Module] = []
        with record_modules(modules, partial(record, self._attention, self._linear)) as watches:
            for _ in steps(True, 1 if known else _LENGTHS):
                pass
        for watch in watches:
            try:
                found.append(watch.fuse(self._kernel, self._attention, known))
            except Unrecordable as error:
                if known:
                    raise
                log.debug("%s runs as it is: %s", type(watch.module).__name__, error)
                behind += [] if watch.passed_on else _children(watch.module)
        return found, list(dict.fromkeys(behind))


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


Record = Callable[..., tuple[Any, ModuleRecording]]


class ModuleRecorder:
    """Records every call of one module; of its children where the first call of it cannot be recorded."""

    def __init__(self, module: torch.nn.Module, record: Record, pass_on: Callable[[torch.nn.Module], bool]) -> None:
        """``pass_on`` lets the children of a module be recorded, and returns whether it could."""
        self.module = module
        self.passed_on = False
        self._record, self._pass_on = record, pass_on
        self._original: Callable[..., Any] = module.forward
        self._recordings: list[ModuleRecording] = []
        self._refused: Unrecordable | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module's forward and record it."""
        if self._refused is None:
            try:
                with moved_only_if_recorded(self.module, args, kwargs):
                    out, recording = self._record(self.module, self._original, args, kwargs)
                self._recordings.append(recording)
                return out
            except Unrecordable as error:
                self._refused = error
                if not self._recordings:
                    self.passed_on = self._pass_on(self.module)
        return self._original(*args, **kwargs)

    def fuse(self, kernel: ProgramKernel, attention: PackedAttention, known: bool) -> FusedModule:
        """The module as a program, compared with the recorded results if that is not ``known``. Raises ``Unrecordable``
        if it cannot be one.
        """
        if self._refused is not None or not self._recordings:
            raise self._refused or Unrecordable("not called")
        first = self._recordings[0]
        if any(other.signature != first.signature for other in self._recordings[1:]):
            raise Unrecordable("it does not do the same each time")
        if first.tokens == self._recordings[-1].tokens and not known:
            raise Unrecordable("only one length was seen")
        fused = FusedModule(self.module, first, kernel, attention)
        for recording in self._recordings:
            if not known:
                recording.compare(fused.compute)
            recording.release()
        return fused


@contextmanager
def record_modules(modules: list[torch.nn.Module], record: Record) -> Iterator[list[ModuleRecorder]]:
    """Within it, calls of the modules are recorded, in the list."""
    watches: list[ModuleRecorder] = []

    def watch_all(modules: Iterable[torch.nn.Module]) -> None:
        together = list(dict.fromkeys(modules))
        owners = Counter(part for module in together for part in module.modules())

        def pass_on(module: torch.nn.Module) -> bool:
            if any(owners[part] > 1 for part in module.modules()):  # tried when all that have it are known
                return False
            watch_all(_children(module))
            return True

        for module in together:
            watches.append(ModuleRecorder(module, record, pass_on))
            module.forward = watches[-1].forward

    watch_all(modules)
    try:
        yield watches
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
