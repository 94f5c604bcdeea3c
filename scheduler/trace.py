"""What a model keeps between forwards, seen by watching one: its cache argument, its recurrent modules, its
own attributes.

A short plain forward is run on the loaded model and every call of its cache is noted with the module that made it.
Nothing is looked up by name.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

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
_TOKENS = 6


@dataclass(frozen=True)
class Trace:
    """What a forward showed.

    ``argument`` is the name under which the model takes its cache, None where it has none; ``returned`` tells
    whether it returns it as well; ``cache`` is that object; ``first_position``
    the position of a timeline's first token. ``mixers`` are the modules that keep a state
    through their cache; ``attributes`` the (module, name) pairs of tensors that modules keep on themselves.
    """

    argument: str | None
    returned: bool
    cache: Any
    first_position: int
    mixers: tuple[torch.nn.Module, ...]
    readers: tuple[torch.nn.Module, ...]
    attributes: tuple[tuple[torch.nn.Module, str], ...]

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


UNTRACED = Trace(None, False, None, 0, (), (), ())  # nothing is known


@torch.no_grad()
def trace(model: Any) -> Trace:
    """Watch one forward of a few tokens, then one of a single token on the cache that the first one returned."""
    padding = getattr(model.config.get_text_config(decoder=True), "pad_token_id", None)
    tokens = [i for i in range(1, _TOKENS + 2) if i != padding][:_TOKENS]
    ids = torch.tensor([tokens], device=model.device)
    text = model.config.get_text_config(decoder=True)
    before = _attributes(model)
    with _watched(model) as (mixers, readers):
        out = model(input_ids=ids, use_cache=True, return_dict=True)
    name = next((n for n in _arguments(model) if out.get(n) is not None), None)
    cache = out.get(name) if name is not None else None
    if name is None and "past_key_values" in _arguments(model):
        name, cache = "past_key_values", DynamicCache(config=text)  # kept up to date in place, though not returned
    after = _attributes(model)
    changed = tuple(key for key, value in after.items() if before.get(key) is not value)
    returned = name is not None and out.get(name) is not None
    return Trace(name, returned, cache, _first_position(model, ids, out.logits), tuple(mixers), tuple(readers), changed)


def _first_position(model: Any, ids: torch.Tensor, want: torch.Tensor) -> int:
    """The position that the model itself gives to the first token: 0, or the one after that of padding (RoBERTa)."""
    padding = getattr(model.config.get_text_config(decoder=True), "pad_token_id", None)
    if padding is None or "position_ids" not in inspect.signature(model.forward).parameters:
        return 0
    steps = torch.arange(ids.shape[1], device=ids.device)[None]
    errors = {}
    for first in (0, padding + 1):
        got = model(input_ids=ids, position_ids=steps + first, use_cache=False, return_dict=True).logits
        errors[first] = float((got - want).abs().max())
    return min(errors, key=lambda first: errors[first])


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


@contextmanager
def _watched(model: Any) -> Iterator[tuple[dict[torch.nn.Module, None], dict[torch.nn.Module, None]]]:
    """Within it, modules whose own code asks a cache for more than attention does are noted, and those that
    write to one.
    """
    stack: list[torch.nn.Module] = []
    mixers: dict[torch.nn.Module, None] = {}
    readers: dict[torch.nn.Module, None] = {}
    before = hooks.register_module_forward_pre_hook(lambda module, _: stack.append(module))
    after = hooks.register_module_forward_hook(lambda *_: _drop(stack), always_call=True)
    original = Cache.__getattribute__

    def watch(cache: Any, name: str) -> Any:
        if stack and not name.startswith("_") and _called_by(stack[-1]):
            if name not in _ATTENTION:
                mixers[stack[-1]] = None
            if name.startswith("update") or name not in _ATTENTION:
                readers[stack[-1]] = None
        return original(cache, name)

    Cache.__getattribute__ = watch
    try:
        yield mixers, readers
    finally:
        del Cache.__getattribute__
        before.remove()
        after.remove()


def _drop(stack: list[torch.nn.Module]) -> None:
    stack.pop()


def _called_by(module: torch.nn.Module) -> bool:
    """Whether the attribute is read by the module's own file rather than by the cache class itself."""
    frame = inspect.currentframe()
    caller = frame.f_back.f_back if frame is not None and frame.f_back is not None else None
    return caller is not None and caller.f_globals.get("__name__") == type(module).__module__
