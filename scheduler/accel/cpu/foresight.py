"""``Foresight``: what the layers of a chain will be called with, known when the first one is called.

An argument of a later layer is the first layer's own, or what a module has returned earlier in the step (the positions
of another kind of layer), or it lies behind the first layer's in the same memory (a slice for each layer). Which it is
was seen in a step before. A layer's real arguments are compared with these, so a wrong guess costs time only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from scheduler.accel.cpu.recording import ModuleRecording

Call = tuple[tuple[Any, ...], dict[str, Any]]  # args and kwargs
Key = int | str  # of an argument: its place or its name
_PLAIN = (type(None), bool, str, int, float)


class Origin(NamedTuple):
    """A module that is called with these arguments, besides tensors and the like, and returns an argument."""

    module: torch.nn.Module
    said: tuple[Any, ...]


Difference = tuple[Key, Origin | int]  # an argument that is another one than the first layer's; int: elements behind it


class Origins:
    """What modules have returned last, as far as they are watched."""

    def __init__(self) -> None:
        self._latest: dict[Origin, Any] = {}
        self._hooks: list[Any] = []

    def watch(self, modules: Iterable[torch.nn.Module]) -> None:
        """Remember what these modules return, until ``forget``."""
        self._hooks += [one.register_forward_hook(self._remember, with_kwargs=True) for one in modules]

    def forget(self) -> None:
        """Watch nothing any longer."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._latest.clear()

    @contextmanager
    def watching(self, modules: Iterable[torch.nn.Module]) -> Iterator[None]:
        """Within it these modules are watched."""
        self.watch(modules)
        try:
            yield
        finally:
            self.forget()

    def differences(self, first: Call, other: Call) -> tuple[Difference, ...] | None:
        """Where another call's arguments, the first one aside, come from that are not those of ``first``; None if that
        is not known of all.
        """
        if len(first[0]) != len(other[0]) or [*first[1]] != [*other[1]]:
            return None
        found: list[Difference] = []
        for key, mine, theirs in _pairs(first, other):
            if is_same(mine, theirs):
                continue
            where: Origin | int | None = _behind(mine, theirs)
            if where is None:
                where = next((origin for origin, out in self._latest.items() if out is theirs), None)
            if where is None:
                return None
            found.append((key, where))
        return tuple(found)

    def expect(self, first: Call, differences: tuple[Difference, ...]) -> Call | None:
        """The call that differs from ``first`` so; None if a module was not called yet."""
        args, kwargs = list(first[0]), dict(first[1])
        for key, where in differences:
            held: Any = args if isinstance(key, int) else kwargs
            if isinstance(where, Origin):
                if where not in self._latest:
                    return None
                held[key] = self._latest[where]
            else:
                given = held[key]
                if not isinstance(given, torch.Tensor):
                    return None
                held[key] = given.as_strided(given.shape, given.stride(), given.storage_offset() + where)
        return tuple(args), kwargs

    def _remember(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        said = tuple(value for value in (*args, *kwargs.values()) if isinstance(value, _PLAIN))
        self._latest[Origin(module, said)] = out


class Foresight:
    """The calls of all layers of a chain, of the first one's own kind (group 0) or of others."""

    def __init__(self, origins: Origins, layers: Sequence[tuple[ModuleRecording, tuple[Difference, ...]]]) -> None:
        """``layers``: their recordings, and how their calls differ from the first one's."""
        self._origins = origins
        self._groups: list[tuple[ModuleRecording, tuple[Difference, ...]]] = []
        self.group_of = [self._group(*layer) for layer in layers]

    @property
    def modules(self) -> set[torch.nn.Module]:
        """The modules that have to be watched."""
        return {where.module for _, more in self._groups for _, where in more if isinstance(where, Origin)}

    def calls(self, first: Call) -> list[Call] | None:
        """The call of each group, from that of the first layer; None where it is not known."""
        calls = [first]
        for _, differences in self._groups[1:]:
            if (call := self._origins.expect(first, differences)) is None:
                return None
            calls.append(call)
        return calls

    def inputs(self, calls: list[Call], given: list[torch.Tensor], cache: Any) -> list[list[torch.Tensor]] | None:
        """The inputs of each group, of which the first one's are ``given``; None if a call is not as it was
        recorded.
        """
        inputs = [given]
        for (recording, _), call in zip(self._groups[1:], calls[1:], strict=True):
            matched = recording.match(*call)
            if matched is None or matched[1] is not cache or matched[2] != given[0].shape[recording.axis]:
                return None
            inputs.append(matched[0])
        return inputs

    def _group(self, recording: ModuleRecording, differences: tuple[Difference, ...]) -> int:
        for number, (like, same) in enumerate(self._groups):
            if same == differences and recording.is_like(like):
                return number
        self._groups.append((recording, differences))
        return len(self._groups) - 1


def same_arguments(one: Call, other: Call) -> bool:
    """Whether two calls have the same arguments except the first."""
    if len(one[0]) != len(other[0]) or [*one[1]] != [*other[1]]:
        return False
    return all(is_same(mine, theirs) for _, mine, theirs in _pairs(one, other))


def is_same(one: Any, other: Any) -> bool:
    """Whether two arguments are one object, or tensors that are there at once and lie in the same memory."""
    if one is other:
        return True
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return False
    return one.data_ptr() == other.data_ptr() and _form(one) == _form(other)


def _pairs(one: Call, other: Call) -> Iterator[tuple[Key, Any, Any]]:
    """The arguments of two calls that have as many, except the first."""
    yield from ((place, one[0][place], other[0][place]) for place in range(1, len(one[0])))
    yield from ((name, one[1][name], other[1][name]) for name in one[1])


def _behind(one: Any, other: Any) -> int | None:
    """By how many elements one tensor lies behind another in the same memory; None if it does not."""
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor) or _form(one) != _form(other):
        return None
    if one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr():
        return None
    return int(other.storage_offset()) - int(one.storage_offset())


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype
