"""``Ranks``: commands from rank 0 to the other ranks, and ``RankedTier``: pages of which each rank holds some of the
heads.

Rank 0 makes all decisions and has every page table. The other ranks hold pages in the same slots, with their own heads
(``scheduler.parallel.rank_tiers``). Each has two links to rank 0: one for commands in order (steps, copies of pages),
and one for reading and writing files, which runs concurrently with steps.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import torch

from cache.memory.memory_tier import MemoryTier, layer_of
from scheduler.parallel.rank_commands import DEVICE, CopyPages, Gather, Ordered, Scatter
from scheduler.parallel.rank_link import RankLink


class RankLost(RuntimeError):
    """The ranks no longer run in step; the engine must be restarted."""


class Ranks:
    """The other ranks, from rank 0. Raises ``RankLost`` if one of them cannot be reached.

    ``split`` are the names of the pools of which each rank holds its own heads; other pools are the same on all ranks.
    """

    def __init__(self, ordered: Sequence[RankLink], files: Sequence[RankLink]) -> None:
        self.split: frozenset[str] = frozenset()
        self._ordered = tuple(ordered)
        self._file_links = tuple(files)
        self._sent = 0
        self._one = threading.Lock()  # an exchange on the file links
        self._since: dict[int, float] = {}  # which thread waits for the others, and since when
        self._encode = msgspec.msgpack.Encoder().encode

    def __len__(self) -> int:
        """With rank 0."""
        return 1 + len(self._ordered)

    @property
    def waited(self) -> float:
        """Seconds for which somebody has been waiting for another rank."""
        return time.monotonic() - min(self._since.copy().values(), default=time.monotonic())

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Within it the other ranks have to keep up. Raises RankLost."""
        me = threading.get_ident()
        outer = self._since.get(me)
        self._since[me] = outer or time.monotonic()
        try:
            yield
        except EOFError as error:
            raise RankLost("another rank is gone") from error
        finally:
            if outer is None:
                self._since.pop(me, None)

    def broadcast(self, command: Ordered) -> None:
        """Let all of them do it after all that they were told before."""
        data = self._encode(command)
        with self.waiting():
            self._sent += 1
            for line in self._ordered:
                line.send(data)

    def call(self, command: Ordered) -> list[Any]:
        """The answers of all of them."""
        with self.waiting():
            self.broadcast(command)
            return [msgspec.msgpack.decode(line.receive()) for line in self._ordered]

    @contextmanager
    def _exchange(self) -> Iterator[None]:
        """On the file links, one at a time. One that is broken off would leave bytes that belong to no other: it is
        the last.
        """
        with self._one, self.waiting():
            try:
                yield
            except BaseException:
                Ranks.close(self)
                raise

    def gather(
        self,
        tier: int,
        rows: torch.Tensor,
        names: Sequence[str],
        mine: Callable[[], dict[str, torch.Tensor]],
        near: torch.Tensor | None = None,
    ) -> list[dict[str, torch.Tensor]]:
        """What each rank has at ``rows [n]``, int64, and ``near`` in the pools of windowed layers: ``mine`` gives what
        rank 0 has, the others are asked for the pools ``names``, which are shaped like rank 0's.
        """
        with self._exchange():
            close = b"" if near is None else near.numpy().tobytes()
            command = self._encode(Gather(self._sent, tier, list(names), rows.numpy().tobytes(), close))
            for line in self._file_links if names else ():
                line.send(command)
            own = mine()
            theirs = (
                {name: line.receive_tensor(torch.empty_like(own[name])) for name in names} for line in self._file_links
            )
            return [own, *theirs]

    def scatter(
        self, tier: int, rows: torch.Tensor, name: str, parts: Sequence[torch.Tensor], mine: Callable[[], None]
    ) -> None:
        """Give each of them its part ``[n, heads of it, dim]`` of what belongs at ``rows [n]``, int64, while ``mine``
        puts rank 0's there; it is there when this returns.
        """
        with self._exchange():
            command = self._encode(Scatter(self._sent, tier, name, rows.numpy().tobytes()))
            for line, part in zip(self._file_links, parts, strict=True):
                line.send(command)
                line.send_tensor(part)
            mine()
            for line in self._file_links:
                line.receive()

    def compare(self, tier: MemoryTier, rows: torch.Tensor) -> None:
        """Find out from the tokens at ``rows [n]``, int64, which all ranks have fed to their device tiers, what is
        ``split``.
        """
        mine, *theirs = self.gather(DEVICE, rows, list(tier.pools), lambda: tier.gather(rows))
        self.split = frozenset(n for n, m in mine.items() if any(_differ(m, their[n]) for their in theirs))

    def close(self) -> None:
        """The others read the end of their lines, and end."""
        for line in (*self._ordered, *self._file_links):
            line.close()


class RankedTier(MemoryTier):
    """Rank 0's pages: copying a page copies it on every rank, and ``gather`` and ``scatter`` handle the heads of all
    ranks.

    ``shapes``, ``keys`` and ``values`` are those of rank 0's own heads.
    """

    def __init__(self, ranks: Ranks, number: int, slots: int, page_size: int, device: torch.device, **options: Any):
        super().__init__(slots, page_size, device, **options)
        self._ranks = ranks
        self._number = number

    @property
    def token_shapes(self) -> dict[str, tuple[tuple[int, ...], str]]:
        return {
            name: ((shape[0] * self._parts(name), *shape[1:]), dtype)
            for name, (shape, dtype) in super().token_shapes.items()
        }

    def _token_bytes(self, layers: Collection[int]) -> int:
        pools = {name: pool for name, pool in self.pools.items() if layer_of(name) in layers}
        return sum(pool[0, 0].numel() * pool.itemsize * self._parts(name) for name, pool in pools.items())

    def copy_from(self, other: MemoryTier, source: list[int], target: list[int], near: bool = False) -> None:
        assert isinstance(other, RankedTier)
        self._ranks.broadcast(CopyPages(other._number, self._number, source, target, near))
        super().copy_from(other, source, target, near)

    def gather(self, rows: torch.Tensor, near: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        """See ``MemoryTier``: ``[n, heads, dim]`` with the heads of all ranks, in their order."""
        split = [name for name in self.pools if name in self._ranks.split]
        mine, *theirs = self._ranks.gather(self._number, rows, split, lambda: MemoryTier.gather(self, rows, near), near)
        return mine | {name: torch.cat([mine[name], *(part[name] for part in theirs)], 1) for name in split}

    def scatter(self, rows: torch.Tensor, name: str, tokens: torch.Tensor) -> None:
        """See ``MemoryTier``: each rank takes its heads of ``tokens [n, heads, dim]``."""
        parts = tokens.chunk(self._parts(name), 1) if self._parts(name) > 1 else [tokens] * len(self._ranks)
        self._ranks.scatter(self._number, rows, name, parts[1:], lambda: MemoryTier.scatter(self, rows, name, parts[0]))

    def _parts(self, name: str) -> int:
        return len(self._ranks) if name in self._ranks.split else 1


def _differ(mine: torch.Tensor, theirs: torch.Tensor) -> bool:
    """By more than rounding: heads of their own have nothing in common."""
    return bool((mine.float() - theirs.float()).abs().max() > 1e-2 * mine.float().abs().max())
