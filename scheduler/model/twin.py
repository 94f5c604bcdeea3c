"""A model's twin: a copy with the same weights and code in which thresholds on positions (windows, chunk sizes,
original contexts) are small.

A timeline of a few tokens cannot show what a model does past a window of 4,096 tokens. The twin is built by the model's
own class from a config in which such numbers are small, and shares the model's weights. The numbers are found by
trying: the weights must still fit, the result of a forward must change, and that of a timeline that is shorter than a
number must not depend on it. (On factors of scores and bases of rotary positions it does, and small ones make results
so sensitive that rounding looks like an error.)
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.initialization import no_init_weights

_SEEN = 16  # tokens: a threshold up to here is crossed by the probe's own timelines
_FIRST, _STEP, _LAST = 8, 4, 36  # what the smallest thresholds become, one after the other; no timeline crosses more
_LARGER, _SAME = 16, 0.05  # a larger number, and the part of the largest logit that another order of sums may change

Path = tuple[str | int, ...]  # how to come from the text config to a number
Says = Callable[[Any, int | None], torch.Tensor]  # a model's logits for the first tokens of a timeline or all of them


class _Misfit(Exception):
    """The weights do not fit a model of that config."""


@dataclass(frozen=True)
class Twin:
    """``model`` is None where no number matters, or where ``obstacle`` says why there is none.

    ``thresholds`` has what each number is in the model, by its name, and what it is in the twin.
    """

    model: Any = None
    thresholds: dict[str, tuple[int, int]] = field(default_factory=dict)
    obstacle: str = ""


@torch.no_grad()
def make_twin(model: Any, says: Says, context: int | None) -> Twin:
    """The twin of ``model``, whose timelines have up to ``context`` tokens: numbers from there on are not looked at.

    ``says`` is asked about both: the logits ``[tokens, V]`` of so many tokens, None for the whole timeline.
    """
    numbers = dict(_numbers(model.config.get_text_config(decoder=True), context))
    fitting = _small({path: n for path, n in numbers.items() if _build(model, {path: _FIRST}) is not None})
    fitting = _small({path: numbers[path] for path in _late(model, fitting, says)})
    if not fitting:
        return Twin()
    said = says(model, None)
    found = _run_twin(model, fitting, says)
    if found is None:  # together they are too much for the model's code
        fitting = {path: value for path, value in fitting.items() if _matters(model, {path: value}, says, said)}
        if not fitting:
            return Twin()
        found = _run_twin(model, fitting, says)
    if found is None:
        return Twin(obstacle=f"no forward with a small {', '.join(map(_name, fitting))}")
    twin, other = found
    if torch.equal(other, said):
        return Twin()
    return Twin(twin, {_name(path): (numbers[path], value) for path, value in fitting.items()})


def _late(model: Any, values: dict[Path, int], says: Says) -> list[Path]:
    """Those of ``values`` that say nothing about a timeline that is shorter than all of them: there larger ones change
    nothing.
    """

    def is_late(some: dict[Path, int]) -> bool:
        larger = {path: _LARGER * value for path, value in some.items()}
        twin, other = (_run_twin(model, tried, says, _FIRST - 1) for tried in (some, larger))
        if twin is None or other is None:
            return True
        if other[1].shape != twin[1].shape:  # it is a size of the logits
            return False
        return bool((other[1] - twin[1]).abs().max() <= _SAME * twin[1].abs().max())

    return (
        list(values)
        if not values or is_late(values)
        else [path for path, value in values.items() if is_late({path: value})]
    )


def _matters(model: Any, values: dict[Path, int], says: Says, said: torch.Tensor) -> bool:
    found = _run_twin(model, values, says)
    return found is not None and not torch.equal(found[1], said)


def _run_twin(
    model: Any, values: dict[Path, int], says: Says, count: int | None = None
) -> tuple[Any, torch.Tensor] | None:
    """The twin with those ``values``, and what it says; None where its code fails."""
    twin = _build(model, values)
    try:
        return None if twin is None else (twin, says(twin, count))
    except Exception:  # any error of modeling code with unusual thresholds
        return None


# -- numbers ----------------------------------------------------------------------------------------------------------


def _numbers(config: Any, context: int | None) -> Iterator[tuple[Path, int]]:
    """The integers of a config, and of what is within it, that timelines may grow past; of a list, its largest."""
    pending: list[tuple[Path, Any]] = [((name,), value) for name, value in _settings(config)]
    while pending:
        path, value = pending.pop()
        if isinstance(value, PreTrainedConfig):
            pending += [((*path, name), inner) for name, inner in _settings(value)]
        elif isinstance(value, dict):
            pending += [((*path, key), inner) for key, inner in value.items()]
        elif isinstance(value, list | tuple) and value and all(type(one) is int for one in value):
            if list(value) != sorted(set(value)):  # else these are the numbers of layers
                pending.append((path, max(value)))
        elif type(value) is int and value > _SEEN and (context is None or value < context):
            yield path, value


def _settings(config: Any) -> list[tuple[str, Any]]:
    """Those of a config that are no ids of tokens, and no private parts."""
    return [(n, v) for n, v in vars(config).items() if not n.startswith("_") and not n.endswith("_token_id")]


def _small(numbers: dict[Path, int]) -> dict[Path, int]:
    """A small number for each, in the same order; what was equal is equal."""
    order = {value: at for at, value in enumerate(sorted(set(numbers.values())))}
    return {path: min(_FIRST + _STEP * order[value], _LAST) for path, value in numbers.items()}


def _change(config: Any, values: dict[Path, int]) -> Any:
    """A copy of a model's config with those ``values``."""
    config = copy.deepcopy(config)
    for path, value in values.items():
        holder = config.get_text_config(decoder=True)
        for key in path[:-1]:
            holder = getattr(holder, str(key)) if isinstance(holder, PreTrainedConfig) else holder[key]
        last = path[-1]
        before = getattr(holder, str(last)) if isinstance(holder, PreTrainedConfig) else holder[last]
        if isinstance(before, list | tuple):
            after: Any = type(before)(min(one, value) for one in before)
        else:
            after = value
        if isinstance(holder, PreTrainedConfig):
            setattr(holder, str(last), after)
        else:
            holder[last] = after
    return config


def _name(path: Path) -> str:
    return ".".join(map(str, path))


# -- models -----------------------------------------------------------------------------------------------------------


def _build(model: Any, values: dict[Path, int]) -> Any:
    """A model of the same class with those ``values``, on the same weights; None where these do not fit."""
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(model.dtype)
        with _weightless(), no_init_weights():
            twin = type(model)(_change(model.config, values))
        _adopt(twin, model, model.device)
    except Exception:  # any error of a constructor with unusual thresholds
        return None
    finally:
        torch.set_default_dtype(before)
    return twin.train(model.training) if twin.training != model.training else twin


@contextmanager
def _weightless() -> Iterator[None]:
    """Within it, parameters are made without memory; buffers are made as they are."""
    register = torch.nn.Module.register_parameter

    def without(module: torch.nn.Module, name: str, param: torch.nn.Parameter | None) -> None:
        if param is not None:
            param = torch.nn.Parameter(param.to("meta"), param.requires_grad)
        register(module, name, param)

    torch.nn.Module.register_parameter = without  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.nn.Module.register_parameter = register  # type: ignore[method-assign]


def _adopt(mine: torch.nn.Module, theirs: torch.nn.Module, device: torch.device) -> None:
    """Let ``mine`` have the weights of ``theirs``, and all that is within. Raises ``_Misfit``."""
    if mine._modules.keys() != theirs._modules.keys() or mine._parameters.keys() != theirs._parameters.keys():
        raise _Misfit
    for name, child in theirs._modules.items():
        own = mine._modules[name]
        if child is None or own is None:
            if child is not own:
                raise _Misfit
        elif _is_whole(child, own):
            mine._modules[name] = child
        else:
            _adopt(own, child, device)
    for name, weight in theirs._parameters.items():
        _same_shape(mine._parameters[name], weight)
        mine._parameters[name] = weight
    for name, buffer in mine._buffers.items():
        if buffer is None:
            continue
        if name in mine._non_persistent_buffers_set:
            mine._buffers[name] = buffer.to(device)
        else:
            _same_shape(buffer, theirs._buffers.get(name))
            mine._buffers[name] = theirs._buffers[name]
    mine.training = theirs.training


def _is_whole(child: torch.nn.Module, own: torch.nn.Module) -> bool:
    """Whether ``child`` is shared as it is: a part of torch, or what somebody has put in the place of such. Raises
    ``_Misfit`` where its weights are of another shape.
    """
    replaced = type(child) is not type(own)
    if child._modules or not (replaced or type(child).__module__.startswith("torch.nn.")):
        return False
    if replaced:
        sizes = [(getattr(one, "in_features", None), getattr(one, "out_features", None)) for one in (child, own)]
        if sizes[0] != sizes[1]:
            raise _Misfit
    elif child._parameters.keys() != own._parameters.keys():
        raise _Misfit
    else:
        for name, weight in child._parameters.items():
            _same_shape(own._parameters[name], weight)
    return True


def _same_shape(one: torch.Tensor | None, other: torch.Tensor | None) -> None:
    if (one is None) is not (other is None) or (one is not None and other is not None and one.shape != other.shape):
        raise _Misfit
