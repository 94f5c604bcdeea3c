"""``Trace``: what a model keeps between forwards: its cache argument, its recurrent modules, and tensors that modules
store on themselves.

It is found by running a short forward on the loaded model and recording each access to its cache with the module that
made it. Models and modules are not looked up by name.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch.nn.modules import module as hooks
from transformers.cache_utils import Cache, DynamicCache

# What attention needs of a cache: a module that calls nothing else keeps its K/V in pages and has no state.
_ATTENTION = frozenset(
    {
        "update",
        "update_indexer",
        "get_seq_length",
        "get_mask_sizes",
        "get_max_length",
        "get_query_offset",
        "is_sliding",
        "is_linear",
        "is_dummy",
        "is_compileable",
        "is_initialized",
        "is_croppable",
        "layers",
        "batch_size",
        "max_batch_size",
        "lazy_initialization",
        "early_initialization",
    }
)
# What tells how much a cache holds; and who asks for it where there is a mask to build, which no packed step does.
_LENGTHS = frozenset({"get_seq_length", "get_query_offset", "get_mask_sizes"})
_NOT_IN_A_STEP = frozenset({"transformers.cache_utils", "transformers.masking_utils"})
_TOKENS = 6


@dataclass(frozen=True)
class Trace:
    """What a forward showed.

    ``argument`` is the name under which the model takes its cache, None where it has none; ``returned`` tells
    whether it returns it as well; ``cache`` is that object; ``first_position``
    the position of a timeline's first token. ``mixers`` are the modules that keep a state
    through their cache; ``attributes`` the (module, name) pairs of tensors that modules keep on themselves.
    ``by_row``: whoever asks a cache for its length must be told that of every row (see ``PackedCache``). False where
    only code outside of the layers was seen to ask although it had been told positions: it has no use for an answer.
    ``late`` are modules that run when all of a token's KV has been made: what they compute is in no KV.
    """

    argument: str | None
    returned: bool
    cache: Any
    first_position: int
    mixers: tuple[torch.nn.Module, ...]
    readers: tuple[torch.nn.Module, ...]
    attributes: tuple[tuple[torch.nn.Module, str], ...]
    by_row: bool = True
    late: frozenset[torch.nn.Module] = frozenset()

    @property
    def stateful(self) -> bool:
        """Whether pages alone do not hold all that the model keeps."""
        return bool(self.mixers or self.attributes)

    def fresh(self, config: Any) -> Any:
        """An empty cache of the model's own class, None where only the model can make it."""
        if not isinstance(self.cache, Cache):
            return None
        kind = type(self.cache)
        return kind(config=config) if kind is DynamicCache else kind()


class KnownTrace(msgspec.Struct, frozen=True):
    """A `Trace` of a model with transformers' own cache and without attributes, by the names of its modules."""

    argument: str | None
    returned: bool
    first_position: int
    mixers: tuple[str, ...]
    readers: tuple[str, ...]
    by_row: bool
    late: tuple[str, ...]

    @classmethod
    def of(cls, trace: Trace, model: Any) -> KnownTrace | None:
        """None where it cannot be told of a later load of the model."""
        names = {module: name for name, module in model.named_modules()}
        if type(trace.cache) is not DynamicCache or trace.attributes:
            return None
        if not {*trace.mixers, *trace.readers} <= names.keys():
            return None
        mixers, readers = (tuple(names[module] for module in some) for some in (trace.mixers, trace.readers))
        late = tuple(sorted(names[module] for module in trace.late if module in names))  # some are made in a forward
        return cls(trace.argument, trace.returned, trace.first_position, mixers, readers, trace.by_row, late)

    def restored(self, model: Any) -> Trace | None:
        """The trace of another load of the same model; None for one without modules of these names."""
        modules = dict(model.named_modules())
        if not {*self.mixers, *self.readers, *self.late} <= modules.keys():
            return None
        found = [tuple(modules[name] for name in some) for some in (self.mixers, self.readers, self.late)]
        cache = DynamicCache(config=model.config.get_text_config(decoder=True))
        about = self.argument, self.returned, cache, self.first_position
        return Trace(*about, found[0], found[1], (), self.by_row, frozenset(found[2]))


UNTRACED = Trace(None, False, None, 0, (), (), ())  # nothing is known


@torch.no_grad()
def trace(model: Any) -> Trace:
    """Watch one forward of a few tokens, and one more that is told their positions."""
    padding = getattr(model.config.get_text_config(decoder=True), "pad_token_id", None)
    tokens = [i for i in range(1, _TOKENS + 2) if i != padding][:_TOKENS]
    ids = torch.tensor([tokens], device=model.device)
    text = model.config.get_text_config(decoder=True)
    before = _attributes(model)
    with _watched() as (mixers, readers, late):
        out = model(input_ids=ids, use_cache=True, return_dict=True)
    name = next((n for n in _arguments(model) if out.get(n) is not None), None)
    cache = out.get(name) if name is not None else None
    if name is None and "past_key_values" in _arguments(model):
        name, cache = "past_key_values", DynamicCache(config=text)  # kept up to date in place, though not returned
    after = _attributes(model)
    changed = tuple(key for key, value in after.items() if before.get(key) is not value)
    returned = name is not None and out.get(name) is not None
    first, by_row = _told_positions(model, ids, out.logits)
    known = isinstance(cache, Cache) and readers and not changed
    return Trace(
        argument=name,
        returned=returned,
        cache=cache,
        first_position=first,
        mixers=tuple(mixers),
        readers=tuple(readers),
        attributes=changed,
        by_row=by_row,
        late=frozenset(late) if known else frozenset(),
    )


def _told_positions(model: Any, ids: torch.Tensor, want: torch.Tensor) -> tuple[int, bool]:
    """The position that the model itself gives to the first token: 0, or the one after that of padding (RoBERTa); and
    whether caches are asked for lengths by row, see ``Trace``: nobody who is told positions needs a length to know
    them. ``want``: the logits of a forward that was told none.
    """
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return 0, True
    padding = getattr(model.config.get_text_config(decoder=True), "pad_token_id", None)
    holders = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList | torch.nn.ModuleDict)]
    inside = {module for holder in holders for module in holder.modules()}
    found: dict[int, tuple[float, bool]] = {}
    for first in (0,) if padding is None else (0, padding + 1):
        steps = torch.arange(first, first + ids.shape[1], device=ids.device)[None]
        with _asked() as asking:
            got = model(input_ids=ids, position_ids=steps, use_cache=True, return_dict=True).logits
        found[first] = float((got - want).abs().max()), not asking or not inside.isdisjoint(asking)
        if found[first][0] == 0:  # there is no need to ask for positions that some models do not have
            break
    first = min(found, key=lambda first: found[first][0])
    return first, found[first][1]


@contextmanager
def _asked() -> Iterator[list[torch.nn.Module]]:
    """Within it, modules are noted that ask for the length of a cache, in code that a packed step runs as well."""
    asking: list[torch.nn.Module] = []

    def hear(module: torch.nn.Module, name: str, caller: str) -> None:
        if name in _LENGTHS and caller not in _NOT_IN_A_STEP:
            asking.append(module)

    with _listen(hear):
        yield asking


def _arguments(model: Any) -> list[str]:
    """Names that are both an argument of the forward and may be a field of its output."""
    skipped = {"input_ids", "labels", "logits", "loss", "attention_mask", "position_ids", "inputs_embeds"}
    return [n for n in inspect.signature(model.forward).parameters if n not in skipped]


def _attributes(model: Any) -> dict[tuple[torch.nn.Module, str], Any]:
    """Tensors that modules hold as plain attributes, neither parameters nor buffers."""
    found = {}
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor) or (value is None and not name.startswith("_")):
                found[module, name] = value
    return {key: value for key, value in found.items() if isinstance(value, torch.Tensor)}


Modules = dict[torch.nn.Module, None]


@contextmanager
def _watched() -> Iterator[tuple[Modules, Modules, Modules]]:
    """Within it, modules whose own code asks a cache for more than attention does are noted, those that write to one,
    and those that began when none was asked any more and are in no module that did.
    """
    mixers: Modules = {}
    readers: Modules = {}
    early: Modules = {}
    late: Modules = {}

    def on_heard(module: torch.nn.Module, name: str, caller: str) -> None:
        early.update(late)
        late.clear()
        if caller != type(module).__module__:  # the cache class itself, or a helper
            return
        if name not in _LENGTHS:
            early.update(dict.fromkeys(module.modules()))
        if name not in _ATTENTION:
            mixers[module] = None
        if name.startswith("update") or name not in _ATTENTION:
            readers[module] = None

    def on_begun(module: torch.nn.Module) -> None:
        if module not in early:
            late[module] = None

    with _listen(on_heard, on_begun):
        yield mixers, readers, late


@contextmanager
def _listen(
    heard: Callable[[torch.nn.Module, str, str], None], begun: Callable[[torch.nn.Module], None] = lambda module: None
) -> Iterator[None]:
    """Within it, ``heard`` is told what is read of any cache: the module that runs, the name, and the file that reads,
    as the name of a Python module. ``begun`` is told each module that begins.
    """
    stack: list[torch.nn.Module] = []

    def begin(module: torch.nn.Module, _: Any) -> None:
        stack.append(module)
        begun(module)

    before = hooks.register_module_forward_pre_hook(begin)
    after = hooks.register_module_forward_hook(lambda *_: _drop(stack), always_call=True)
    original = Cache.__getattribute__

    def watch(cache: Any, name: str) -> Any:
        if stack and not name.startswith("_"):
            heard(stack[-1], name, sys._getframe(1).f_globals.get("__name__", ""))
        return original(cache, name)

    Cache.__getattribute__ = watch
    try:
        yield
    finally:
        del Cache.__getattribute__
        before.remove()
        after.remove()


def _drop(stack: list[torch.nn.Module]) -> None:
    stack.pop()
