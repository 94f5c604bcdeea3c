"""``RankTiers``: the pages of a rank other than rank 0."""

from __future__ import annotations

import threading

import msgspec
import numpy as np
import torch

from cache.memory.frames import UNDIVIDED
from cache.memory.memory_tier import MemoryTier, PageShape, divide
from scheduler.parallel.rank_commands import DEVICE, CopyPages, CreateTiers, FileCommand, Gather
from scheduler.parallel.rank_link import RankLink


class RankTiers:
    """The tiers of this rank, used by two threads: the one that does what comes in order, and ``serve``.

    ``tiers`` change only where nobody reads or writes files. ``done`` is called after each command in order; a command
    for files waits for those that came before it.
    """

    def __init__(self) -> None:
        self.tiers: list[MemoryTier] = []
        self._done = 0
        self._changed = threading.Condition()

    def build(self, room: CreateTiers, device: torch.device) -> None:
        """See ``CreateTiers``. Raises what the allocator raises, and RuntimeError if pages cannot be divided as rank 0
        divides them.
        """
        shapes: dict[int, PageShape] | None = dict(self.tiers[DEVICE].shapes) if room.known else None
        division = UNDIVIDED
        if room.division.near:
            division = divide(shapes or {}, room.division.near, room.page_size)
            if division != room.division:
                raise RuntimeError("this rank stores other heads than rank 0")
        self.tiers = []  # before there are others: both may not fit
        cuda = device.type == "cuda"
        tier = MemoryTier(room.slots, room.page_size, device, shapes, division=division)
        below = shapes if room.host_slots else None
        host = MemoryTier(room.host_slots, room.page_size, torch.device("cpu"), below, cuda, division=division)
        self.tiers = [tier, host]

    def copy(self, command: CopyPages) -> None:
        self.tiers[command.target].copy_from(self.tiers[command.source], command.there, command.here, command.near)

    def done(self) -> None:
        """One more command has been done."""
        with self._changed:
            self._done += 1
            self._changed.notify_all()

    def _wait(self, commands: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._done >= commands)

    def serve(self, line: RankLink) -> None:
        """Execute the commands for files, which run concurrently with steps, until the line ends."""
        decode = msgspec.msgpack.Decoder(FileCommand).decode
        while True:
            command = decode(line.receive())
            self._wait(command.after)
            tier = self.tiers[command.tier]
            rows = torch.from_numpy(np.frombuffer(command.rows, np.int64).copy())
            if isinstance(command, Gather):
                near = torch.from_numpy(np.frombuffer(command.near, np.int64).copy()) if command.near else None
                found = tier.gather(rows, near)
                for name in command.names:
                    line.send_tensor(found[name])
            else:
                pool = tier.pools[command.name]
                tokens = torch.empty((len(rows), *pool.shape[2:]), dtype=pool.dtype)
                tier.scatter(rows, command.name, line.receive_tensor(tokens))
                line.send(b"")
