"""Keys and values that layers hand on to later layers in a mapping, which is an argument of all of them.

A layer that attends to what another layer has stored reads that layer's pages. So a program needs to know only whose
keys it gets, and what it hands on itself are stand-ins, which tell just that.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping
from typing import Any, NamedTuple, Protocol

import torch

from cache.attention.backend import once
from cache.pages.packed import PackedStep
from scheduler.accel.cpu.recorder import Unrecordable

_KEYS = (str, int)  # what a mapping may be asked for
Pair = tuple[torch.Tensor, torch.Tensor]


class HandedKeys(NamedTuple):
    """That a layer ``stores`` its keys and values in a mapping, or else takes those of ``layer`` from it.
    ``argument``: the mapping's number, as ``recording.spread_arguments`` returns it.
    """

    argument: int
    key: str | int
    layer: int  # whose pages hold them
    stores: bool


class KnowsKeys(Protocol):
    """What knows the keys and values of the module that is recorded."""

    def layer_of(self, pair: Any) -> int:
        """The layer whose pages hold what the module has stored last, which ``pair`` is. Raises Unrecordable."""

    def take(self, pair: Any) -> int:
        """Let the module attend to ``pair``; returns the layer whose pages hold it. Raises Unrecordable."""


class MappingWatch(MutableMapping[Any, Any]):
    """Stands for a mapping while a module is recorded. Anything but storing its keys and values, or taking those of
    another layer, raises Unrecordable.
    """

    def __init__(self, mapping: MutableMapping[Any, Any], number: int, known: KnowsKeys) -> None:
        self._mapping, self._number, self._known = mapping, number, known
        self.seen: list[HandedKeys] = []

    def __getitem__(self, key: Any) -> Any:
        if type(key) not in _KEYS or key not in self._mapping:
            raise Unrecordable("it asks for what is not in a mapping")
        pair = self._mapping[key]
        self.seen.append(HandedKeys(self._number, key, self._known.take(pair), stores=False))
        return pair

    def __setitem__(self, key: Any, pair: Any) -> None:
        if type(key) not in _KEYS:
            raise Unrecordable("it hands on something by another name")
        self.seen.append(HandedKeys(self._number, key, self._known.layer_of(pair), stores=True))
        self._mapping[key] = pair

    def __delitem__(self, key: Any) -> None:
        raise Unrecordable("it deletes something in a mapping")

    def __iter__(self) -> Iterator[Any]:
        raise Unrecordable("it looks through a mapping")

    def __len__(self) -> int:
        raise Unrecordable("it asks how much is in a mapping")


def stand_ins(step: PackedStep, layer: int) -> Pair:
    """Tensors that stand for the keys and values of a layer in a step, ``[1, heads, T, D]`` each: attention reads
    pages for them. They are NaN, so that the probe notices it when other code computes with them.
    """
    return once(step, (stand_ins, layer), lambda: _stand_ins(step, layer))


def _stand_ins(step: PackedStep, layer: int) -> Pair:
    shape = step.tier.shapes[layer]
    sizes = ((shape.key_heads, shape.key_dim), (shape.value_heads, shape.value_dim))
    nothing = torch.full((1, 1, 1, 1), torch.nan, dtype=shape.dtype, device=step.tier.device)
    key, value = (nothing.expand(1, heads, step.tokens, dim) for heads, dim in sizes)
    step.origins[id(key)] = (layer, key, value)
    return key, value


def hand_on(handed: Iterable[HandedKeys], given: list[Any], step: PackedStep) -> None:
    """Store in the mappings among the arguments ``given`` what a module stores there that ran as a program."""
    for one in handed:
        if one.stores:
            given[one.argument][one.key] = stand_ins(step, one.layer)


def are_there(handed: Iterable[HandedKeys], given: list[Any], step: PackedStep) -> bool:
    """Whether the mappings among the arguments ``given`` have what a module takes from them."""
    return all(one.stores or source_of(given[one.argument].get(one.key), step) == one.layer for one in handed)


def source_of(pair: Any, step: PackedStep) -> int | None:
    """The layer whose pages hold just what a pair of keys and values holds; None if that is not known."""
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        return None
    origin = step.origins.get(id(pair[0]))
    return origin[0] if origin is not None and origin[1] is pair[0] and origin[2] is pair[1] else None


def missing(layers: Iterable[Iterable[HandedKeys]]) -> list[tuple[int, HandedKeys]]:
    """Of layers that run one after the other: what none of them has stored before another takes it, with the number of
    the latter.
    """
    stored: dict[tuple[int, str | int], int] = {}
    found: list[tuple[int, HandedKeys]] = []
    for number, handed in enumerate(layers):
        for one in handed:
            if one.stores:
                stored[one.argument, one.key] = one.layer
            elif stored.get((one.argument, one.key)) != one.layer:
                found.append((number, one))
    return found
