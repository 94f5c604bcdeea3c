"""Functions on states that are not paged (of recurrent, convolutional and unknown layers): clone, move, stack, save and
restore.

Such a state has a fixed size or a private format, so it cannot be shared by page or cut to a length. It can be cloned:
checkpoints are clones, and a rewind restores one. The functions depend on no class: they visit the tensors in any dict,
list, tuple or object.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedConfig


def clone(state: Any) -> Any:
    """A copy that shares no tensor with ``state``."""
    return combine(lambda tensors: tensors[0].clone(), [state])


def copy_to_host(state: Any) -> Any:
    """A copy in host memory, as checkpoints are kept."""
    return combine(lambda tensors: tensors[0].to("cpu", copy=True), [state])


def move(state: Any, device: torch.device) -> Any:
    """``state`` with its tensors on ``device``; tensors that are there already are not copied."""
    return combine(lambda tensors: tensors[0].to(device), [state])


def stack(states: Sequence[Any]) -> Any:
    """States of several sessions as one batch: tensors are concatenated along their first dimension."""
    return concatenate(states, 0)


def unstack(state: Any, count: int) -> list[Any]:
    """The reverse of ``stack``: one state per session."""
    return [part_of(state, i) for i in range(count)]


def part_of(state: Any, i: int) -> Any:
    """Row ``i`` of a stacked state, as a batch of one."""
    return combine(lambda tensors: tensors[0][i : i + 1].clone() if tensors[0].dim() else tensors[0], [state])


def concatenate(states: Sequence[Any], dim: int) -> Any:
    """The states with the tensors at each path concatenated along ``dim``; tensors without dimensions are those of the
    first.
    """
    return combine(lambda tensors: torch.cat(list(tensors), dim) if tensors[0].dim() else tensors[0], states)


def nbytes(state: Any) -> int:
    """Bytes of all tensors of a state."""
    sizes: list[int] = []

    def count(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        sizes.append(tensors[0].numel() * tensors[0].itemsize)
        return tensors[0]

    combine(count, [state])
    return sum(sizes)


def tensors_of(state: Any, path: str = "") -> dict[str, torch.Tensor]:
    """All tensors of a state, of any shape, by their dotted paths, as segment files store them."""
    if isinstance(state, torch.Tensor):
        return {path: state}
    found: dict[str, torch.Tensor] = {}
    for name, child in _children(state):
        found |= tensors_of(child, f"{path}.{name}" if path else str(name))
    return found


class TensorPlace(NamedTuple):
    """Where a state holds a tensor: under ``key`` of a dict, list or tuple."""

    container: Any
    key: Any
    tensor: torch.Tensor

    @property
    def unchanged(self) -> bool:
        """Whether the tensor is still there."""
        return self.container[self.key] is self.tensor

    @property
    def fits(self) -> bool:
        """Whether what is there now is a tensor of the same shape, dtype and device."""
        found = self.container[self.key]
        kept = self.tensor
        return isinstance(found, torch.Tensor) and (found.shape, found.dtype, found.device) == (
            kept.shape,
            kept.dtype,
            kept.device,
        )


def places_of(state: Any) -> list[TensorPlace]:
    """All places of a state that hold a tensor."""
    container = vars(state) if _is_holder(state) else state
    found: list[TensorPlace] = []
    for key, child in _children(state):
        found += [TensorPlace(container, key, child)] if isinstance(child, torch.Tensor) else places_of(child)
    return found


def take_back(places: Sequence[TensorPlace]) -> bool:
    """Copy what has come in place of tensors into these, and put them back. Returns False, and copies nothing, where
    something of another shape, dtype or device has come.
    """
    moved = [place for place in places if not place.unchanged]
    if not all(place.fits for place in moved):
        return False
    results = [place.container[place.key].clone() for place in moved]  # it may be a view of any of them
    for place, result in zip(moved, results, strict=True):
        place.tensor.copy_(result)
        place.container[place.key] = place.tensor
    return True


def facts_of(state: Any, path: str = "") -> dict[str, Any]:
    """All numbers, flags, strings and None values of a state by their dotted paths, as segment files store them. What
    torch notes on tensors is not part of a state.
    """
    if isinstance(state, torch.Tensor):
        return {}
    if state is None or isinstance(state, (bool, int, float, str)):
        return {path: state}
    found: dict[str, Any] = {}
    for name, child in _children(state):
        found |= facts_of(child, f"{path}.{name}" if path else str(name))
    return found


def restore(skeleton: Any, tensors: dict[str, torch.Tensor], facts: dict[str, Any], path: str = "") -> Any:
    """A state with the structure of ``skeleton`` (any state of the same model) and the tensors, of any shapes, and the
    facts of a saved one, by dotted path from ``path`` on.
    """
    if path in tensors:
        return tensors[path].clone()
    if path in facts:
        return facts[path]
    return _rebuilt(
        skeleton, lambda name, child: restore(child, tensors, facts, f"{path}.{name}" if path else str(name))
    )


def combine(join: Callable[[Sequence[torch.Tensor]], torch.Tensor], states: Sequence[Any]) -> Any:
    """A state with the structure of the first of ``states``, in which each tensor is ``join`` of the tensors at that
    path, of any shape.
    """
    first = states[0]
    if isinstance(first, torch.Tensor):
        return join(states)
    others = [dict(_children(state)) for state in states[1:]]
    return _rebuilt(first, lambda name, child: combine(join, [child, *(other[name] for other in others)]))


def _children(state: Any) -> list[tuple[Any, Any]]:
    """The named parts of a container; none for a plain value, a config or a module."""
    if isinstance(state, dict):
        return list(state.items())
    if isinstance(state, (list, tuple)):
        return list(enumerate(state))
    if _is_holder(state):
        return list(vars(state).items())
    return []


def _rebuilt(state: Any, make: Callable[[Any, Any], Any]) -> Any:
    """A shallow copy of a container with ``make`` applied to its parts; a plain value as it is."""
    if isinstance(state, dict):
        return type(state)((key, make(key, child)) for key, child in state.items())
    if isinstance(state, (list, tuple)):
        return type(state)(make(i, child) for i, child in enumerate(state))
    if not _is_holder(state):
        return state
    twin = copy.copy(state)
    for name, child in vars(state).items():
        setattr(twin, name, make(name, child))
    return twin


def _is_holder(state: Any) -> bool:
    opaque = isinstance(state, (type, torch.nn.Module, PreTrainedConfig, torch.dtype, torch.device))
    return hasattr(state, "__dict__") and not opaque and not callable(state)
