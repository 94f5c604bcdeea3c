"""Leaves out parts of torch and transformers that an engine on a CPU does not need, which would take half of its start
time.

transformers imports torch's packages for distributed models and for compiling, which one rank on a CPU does not use.
Packages are imported after all if something asks for them; distributed tensors do not work then.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from scheduler import meta_kernels, model_names
from scheduler.engine_config import EngineConfig


def import_torch() -> None:
    """Import torch as every engine needs it."""
    model_names.read_quickly()
    with callers_found_quickly():
        meta_kernels.import_torch()


def leave_out_unused(config: EngineConfig) -> None:
    """Import the rest of torch, and transformers, without what this engine has no use for; all of them where it has."""
    import_torch()
    import torch

    cuda = config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available())
    if cuda or config.tensor_parallel > 1:
        meta_kernels.complete()
        return
    torch.distributed.is_available = lambda: False  # asked before torch.distributed.tensor and .fsdp are imported
    _tell_of_no_distributed_tensor(torch)
    _Dynamo(torch).enter()
    with callers_found_quickly(), suppress(ImportError):
        importlib.import_module(_Dynamo.apart)  # the probe would have it imported


def _tell_of_no_distributed_tensor(torch: Any) -> None:
    """Let torch ask for the class of distributed tensors, once for all, as it does at the first operator on a tensor of
    another class than its own; one rank has none, and the package, which imports sympy, may stay where it is. Whoever
    imports the package gets it, but in this process no operator works on a distributed tensor any more. Where a torch
    asks for more, nothing is saved.
    """
    name = "torch.distributed.tensor"
    if name in sys.modules:
        return

    class Other(torch.Tensor):  # type: ignore[misc]
        __torch_dispatch__ = classmethod(lambda cls, *called: torch.empty(0))

    sys.modules[name] = stand_in = ModuleType(name)
    stand_in.DTensor = type("DTensor", (), {})  # type: ignore[attr-defined]
    with suppress(Exception):
        torch.Tensor._make_wrapper_subclass(Other, (0,)).neg()
    del sys.modules[name]


@contextmanager
def callers_found_quickly() -> Iterator[None]:
    """What registers an operator of torch while it is imported notes the file, line and module of its caller.
    ``inspect`` looks for them through the files of all modules, and for lines of the source that nobody wants.
    """
    place, module = inspect.getframeinfo, inspect.getmodule

    def place_of(frame: FrameType, context: int = 1) -> inspect.Traceback:
        return inspect.Traceback(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name, None, None)

    def module_of(object: Any, _filename: str | None = None) -> ModuleType | None:
        named = object.f_globals.get("__name__") if isinstance(object, FrameType) else None
        return sys.modules.get(named) if named is not None else module(object, _filename)

    inspect.getframeinfo, inspect.getmodule = place_of, module_of  # type: ignore[assignment]
    try:
        yield
    finally:
        inspect.getframeinfo, inspect.getmodule = place, module


class _Dynamo(ModuleType):
    """In place of torch._dynamo until somebody compiles: functions that are marked for the compiler are what they were.
    For anything else it makes room for the package itself."""

    name = "torch._dynamo"
    apart = "torch._dynamo._trace_wrapped_higher_order_op"  # masks are made with it; it needs no other of the package

    def __init__(self, torch: Any) -> None:
        super().__init__(self.name)
        self.torch = torch
        self.finder = _PackageFinder(self)
        self.__path__ = [str(Path(torch.__file__).parent / "_dynamo")]

    def enter(self) -> None:
        """Be there, unless the package is already."""
        if self.name not in sys.modules:
            sys.modules[self.name] = self.torch._dynamo = self
            sys.meta_path.insert(0, self.finder)

    def real(self) -> ModuleType:
        """The package itself, from now on for everybody."""
        if self.finder in sys.meta_path:
            sys.meta_path.remove(self.finder)
            del sys.modules[self.name], self.torch._dynamo
            meta_kernels.complete()
        real = importlib.import_module(self.name)
        if self.apart in sys.modules:
            vars(real).setdefault(self.apart.rpartition(".")[2], sys.modules[self.apart])
        return real

    def __getattr__(self, wanted: str) -> Any:
        if wanted.startswith("__"):
            raise AttributeError(wanted)
        return getattr(self.real(), wanted)

    def disable(self, fn: Any = None, recursive: bool = True, **options: Any) -> Any:
        return fn if fn is not None else lambda function: function

    def allow_in_graph(self, fn: Any) -> Any:
        return fn

    def assume_constant_result(self, fn: Any) -> Any:
        fn._dynamo_marked_constant = True
        return fn


class _PackageFinder(MetaPathFinder):
    """A module of the package is about to be imported: that needs the package, which may have brought it."""

    def __init__(self, dynamo: _Dynamo) -> None:
        self._dynamo = dynamo

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name.rpartition(".")[0] != self._dynamo.name or name == self._dynamo.apart:
            return None
        self._dynamo.real()
        return ModuleSpec(name, _There(sys.modules[name])) if name in sys.modules else None


class _There(Loader):
    """Loads a module that is there already."""

    def __init__(self, module: ModuleType) -> None:
        self._module, self._spec = module, module.__spec__
        module.__spec__ = None  # else the import goes on with that, and runs the module once more

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec
