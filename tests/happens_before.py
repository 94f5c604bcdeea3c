"""``Machine``: torch's streams and events as they are documented, on a CPU, and who has accessed which memory when.

Each actor (a stream, a thread) has a clock for every actor: how much of its work is known to be done. Two accesses to
the same bytes, one of them a write, must be ordered by what actors have waited for. If not, that is a ``Race``, whether
or not a GPU would have been quick enough to show it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten


class Race(AssertionError):
    """Two accesses that nothing orders."""


class Actor:
    """``known``: for each actor the number of its accesses that are done before the next of this one."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.known: dict[str, int] = {}

    def learn(self, known: dict[str, int]) -> None:
        for name, count in known.items():
            self.known[name] = max(count, self.known.get(name, 0))


class Access(NamedTuple):
    memory: int
    begin: int
    end: int
    writes: bool
    actor: str
    number: int
    what: str


class Machine(TorchDispatchMode):
    """While it is active operations are done by the current stream. Threads are played one after the other."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.thread = Actor("steps' thread")
        self.steps = Stream(self, "steps")
        self.current = self.steps
        self.streams = 0
        self.accesses: list[Access] = []
        self._alive: list[Any] = []  # so that no memory is used twice

    def patch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let torch.cuda be this machine."""
        monkeypatch.setattr(torch.cuda, "Stream", self.make_stream)
        monkeypatch.setattr(torch.cuda, "Event", lambda: Event(self))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: self.current)
        monkeypatch.setattr(torch.cuda, "default_stream", lambda device=None: self.steps)
        monkeypatch.setattr(torch.cuda, "stream", self.on)

    def make_stream(self, device: Any = None) -> Stream:
        self.streams += 1
        return Stream(self, f"stream {self.streams}")

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def beside(self, name: str) -> Iterator[None]:
        """Within it another thread runs, which was told to after all that the present one knows. What it has done is
        known to the present one only if that waits for the stream too.
        """
        before, self.thread = self.thread, Actor(name)
        self.thread.learn(before.known)
        try:
            yield
        finally:
            self.thread = before

    def host(self, tensor: torch.Tensor, writes: bool = False) -> None:
        """The present thread itself reads or writes ``tensor``."""
        self._access(self.thread, tensor, [_whole(tensor)], writes, "the host")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        out = func(*args, **given)
        schema = func._schema
        changes = any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments)
        if not changes and any(r.alias_info is not None for r in schema.returns):
            return out  # a view
        self.current.learn(self.thread.known)
        touched: list[tuple[torch.Tensor, bool, list[tuple[int, int]]]] = []
        for number, argument in enumerate(schema.arguments):
            value = args[number] if number < len(args) else given.get(argument.name)
            writes = argument.alias_info is not None and argument.alias_info.is_write
            for tensor in _tensors(value):
                rows = _rows(tensor, args) if number == 0 and func.overloadpacket.__name__ in _BY_ROW else None
                touched.append((tensor, writes, rows or [_whole(tensor)]))
        if not changes:
            touched += [(tensor, True, [_whole(tensor)]) for tensor in _tensors(out)]
        for tensor, writes, regions in touched:
            self._access(self.current, tensor, regions, writes, func.overloadpacket.__name__)
        return out

    def _access(
        self, actor: Actor, tensor: torch.Tensor, regions: list[tuple[int, int]], writes: bool, what: str
    ) -> None:
        self._alive.append(tensor)
        memory = tensor.untyped_storage().data_ptr()
        number = actor.known[actor.name] = actor.known.get(actor.name, 0) + 1
        for begin, end in regions:
            for one in self.accesses:
                same = one.memory == memory and one.begin < end and begin < one.end
                if same and (writes or one.writes) and actor.known.get(one.actor, 0) < one.number:
                    raise Race(f"{what} on {actor.name} after {one.what} on {one.actor}")
            self.accesses.append(Access(memory, begin, end, writes, actor.name, number, what))


_BY_ROW = ("index_select", "index_copy_")  # (tensor, 0, rows, ...)


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, torch.Tensor)]


def _whole(tensor: torch.Tensor) -> tuple[int, int]:
    """The bytes of its memory between its first and its last number."""
    begin = tensor.storage_offset() * tensor.element_size()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int(begin), int(begin + (last + 1) * tensor.element_size())


def _rows(tensor: torch.Tensor, args: Any) -> list[tuple[int, int]]:
    begin, size = tensor.storage_offset() * tensor.element_size(), tensor.stride(0) * tensor.element_size()
    return [(begin + row * size, begin + (row + 1) * size) for row in args[2].tolist()]


class Event:
    """torch.cuda.Event: one that was never recorded orders nothing."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.known: dict[str, int] = {}

    def record(self, stream: Stream) -> None:
        stream.learn(self._machine.thread.known)
        self.known = dict(stream.known)

    def synchronize(self) -> None:
        self._machine.thread.learn(self.known)


class Stream(Actor):
    """torch.cuda.Stream."""

    def __init__(self, machine: Machine, name: str) -> None:
        super().__init__(name)
        self._machine = machine

    def wait_stream(self, other: Stream) -> None:
        self.learn(other.known)

    def wait_event(self, event: Event) -> None:
        self.learn(event.known)

    def synchronize(self) -> None:
        self._machine.thread.learn(self.known)
