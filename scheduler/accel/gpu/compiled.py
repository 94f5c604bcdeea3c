"""``CompiledLayers``: the repeated layers of a model, compiled by ``torch.compile`` for GPUs, where otherwise each
small function is a kernel launch.

All modules of one class share the compiled code, in which attention over pages is one opaque operator
(``cache.attention.packed_attention``). If a class cannot be compiled in one piece its modules run uncompiled and their
children are tried. Code is compiled only during the load-time probe; if a later call would need compilation it runs
uncompiled.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from types import FunctionType
from typing import Any, NamedTuple

import torch

from cache.compiler import NotBuilt, private_folder
from cache.error_line import first_line
from cache.whole_files import make_folder
from scheduler.accel.gpu.joined_products import JoinedProducts, adjacent_parameters, lay_together, noted_groups

_MOST_GRAPHS = 16  # of one class: two for each kind of its modules, since a single token is a kind of its own
# Integer attributes of a module are constants of its code, except the layer index: else each layer is compiled.
_INDICES = r".*\.layer_idx"
_KEPT = "TORCHINDUCTOR_CACHE_DIR"


class CompileOptions(NamedTuple):
    """Options for compiling layers: the backend of ``torch.compile``, and ``tell``, which is called before.

    Compiled layers are used only if a step then takes at most ``most`` times as long as without them.
    """

    backend: Any = "inductor"
    tell: Callable[[], None] = lambda: None
    most: float = 1.05


class CompiledClass:
    """The compiled forward of one class of modules, those ``known`` now and others whose parameters lie in the same
    way. ``refused``: why it could not be compiled, once that has failed.
    """

    def __init__(self, kind: type[torch.nn.Module], known: Iterable[torch.nn.Module], backend: Any) -> None:
        # Compiled code is cached per code object: one of its own has its own limit of graphs, and is freed with it.
        code = _forward.__code__.replace(co_name=kind.__name__)
        function = FunctionType(code, globals(), kind.__name__)
        layouts = {adjacent_parameters(module) for module in known}
        self._layout = layouts.pop() if len(layouts) == 1 else None
        backend = backend if self._layout is None else JoinedProducts(backend)
        self._compiled: Any = torch.compile(function, dynamic=True, fullgraph=True, backend=backend)
        self.refused: str | None = None

    def learn(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The module's result; its code is compiled now if necessary."""
        if self._layout is not None and adjacent_parameters(module) != self._layout:
            self.refused = self.refused or "not all of its modules have their weights together"
        if self.refused is None:
            try:
                return self._compiled(module, args, kwargs)
            except Exception as error:  # compilers raise what they like; a module that fails does so below as well
                self.refused = first_line(getattr(error, "inner_exception", error), 160)
        return _forward(module, args, kwargs)

    def run(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The module's result, from code that is compiled already or else uncompiled: see ``CompiledLayers.within``."""
        return self._compiled(module, args, kwargs)


class CompiledLayers:
    """The modules of one model that run compiled."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._codes: dict[type[torch.nn.Module], CompiledClass] = {}
        self._modules: list[torch.nn.Module] = []
        self._learning = self._aside = False

    def __len__(self) -> int:
        return len(self._modules)

    @property
    def refused(self) -> str:
        """Why the first class that could not be compiled was refused; empty if there is none."""
        return next((code.refused for code in self._codes.values() if code.refused is not None), "")

    def install(self) -> None:
        for module in self._modules:
            module.forward = partial(self._run, module)

    def remove(self) -> None:
        """The modules run as they did."""
        for module in self._modules:
            module.__dict__.pop("forward", None)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Within it, the modules run uncompiled."""
        before, self._aside = self._aside, True
        try:
            yield
        finally:
            self._aside = before

    @contextmanager
    def within(self, running: AbstractContextManager[Any]) -> Iterator[None]:
        """The context of a step, which includes ``running``: except during the probe, a call that would need
        compilation runs uncompiled.
        """
        with running, nullcontext() if self._learning else torch.compiler.set_stance("eager_on_recompile"):
            yield

    def find(self, root: torch.nn.Module, steps: Callable[[], Any]) -> None:
        """Compile and install the layers of ``root`` that can be. ``steps()`` runs steps of all kinds."""
        trying = list(_find_repeated(root))
        with noted_groups(trying) as groups:
            steps()
        lay_together(trying, groups)
        while trying:
            tried = {module: None for one in trying for module in _whole(one)}
            self._modules += [module for module in tried if module not in self._modules]
            self.install()
            with self._taught():
                steps()
            self.remove()
            known = [(module, code) for module in self._modules if (code := self._codes.get(type(module))) is not None]
            trying = [child for module, code in known if code.refused is not None for child in module.children()]
            self._modules = [module for module, code in known if code.refused is None]
        self.install()

    def _run(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        kind = type(module)
        if self._learning and kind not in self._codes:
            known = (one for one in self._modules if type(one) is kind)
            self._codes[kind] = CompiledClass(kind, known, self._backend)
        if self._aside:
            return _forward(module, args, kwargs)
        code = self._codes[kind]
        return code.learn(module, args, kwargs) if self._learning else code.run(module, args, kwargs)

    @contextmanager
    def _taught(self) -> Iterator[None]:
        """Within it code is compiled: in this process, and once for all layers."""
        _keep()
        with ExitStack() as stack:
            for config, options in _settings():
                known = {name: value for name, value in options.items() if hasattr(config, name)}
                stack.enter_context(config.patch(known))
            self._learning = True
            try:
                yield
            finally:
                self._learning = False


def _forward(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What the class of a module says, whoever stands in for it."""
    return type(module).forward(module, *args, **kwargs)


def _settings() -> Iterator[tuple[Any, dict[str, Any]]]:
    """Configurations of torch, and what they are while something is compiled."""
    from torch._dynamo import config as dynamo
    from torch._inductor import config as inductor

    yield dynamo, {"recompile_limit": _MOST_GRAPHS}
    yield inductor, {"compile_threads": 1}  # no processes that could stay behind
    known = hasattr(torch.compiler.config, "dynamic_sources")
    yield torch.compiler.config, {"dynamic_sources": _INDICES}
    yield dynamo, {"allow_unspec_int_on_nn_module": not known}


def _keep() -> None:
    """Let what is compiled be kept beside what we compile, unless the user has said where: nobody else may write there,
    and what is kept is code. Where there is no such folder it lies where torch puts it.
    """
    with suppress(ImportError, KeyError, OSError, RuntimeError, NotBuilt):
        from torch._inductor.runtime.cache_dir_utils import default_cache_dir  # torch says it as if the user had

        if os.environ.get(_KEPT, default_cache_dir()) == default_cache_dir():
            folder = private_folder() / "layers"
            make_folder(folder)
            os.environ[_KEPT] = str(folder)


def _find_repeated(root: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The members of the outermost lists of modules."""
    for child in root.children():
        if isinstance(child, torch.nn.ModuleList):
            yield from child
        else:
            yield from _find_repeated(child)


def _whole(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The module itself, if nobody stands in for, or listens to, what is in it; else its children likewise. What is
    torch's own is one function already, and what somebody stands in for is his.
    """
    if "forward" in vars(module) or type(module).__module__.startswith("torch.nn.modules."):
        inside = module.children() if isinstance(module, (torch.nn.ModuleList, torch.nn.ModuleDict)) else ()
    elif any(_is_watched(one) for one in module.modules() if one is not module):
        inside = module.children()
    else:
        yield from [module] * any(True for _ in module.parameters())  # others are as small as one function
        return
    for child in inside:
        yield from _whole(child)


def _is_watched(module: torch.nn.Module) -> bool:
    return "forward" in vars(module) or bool(module._forward_hooks or module._forward_pre_hooks)
