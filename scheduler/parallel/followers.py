"""``Followers``: starts, monitors and ends the processes of the other ranks, and sends them each forward of rank 0."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import torch

from cache.memory.frames import UNDIVIDED, Division
from cache.pages.packed import PackedCache
from cache.pages.session import SessionCache
from scheduler.engine_config import EngineConfig
from scheduler.forward.mode import Mode
from scheduler.parallel.division import RankAddress, join, open_store
from scheduler.parallel.rank_commands import CreateTiers, FreeMemory, PlainForward, SetMode
from scheduler.parallel.rank_link import RankLink, line_pair
from scheduler.parallel.ranks import RankLost, Ranks
from scheduler.parallel.session_view import SessionViewSender

log = logging.getLogger("warmturn.engine")

_POLL_SECONDS = 0.1  # seconds between two looks at the processes
_GRACE = 2.0  # seconds in which rank 0 may end by itself when another rank is gone, as it says more about why
_LOADING_GRACE = 30.0
_EXCHANGE_TIMEOUT = 120.0  # seconds that one exchange or one step may take while serving
_EXIT_TIMEOUT = 2.0  # seconds to end once the lines are closed


class Followers(Ranks):
    """The processes ``python -m scheduler.follower``, one for each rank except 0.

    They end with rank 0, however it ends. If one of them ends on its own, or keeps rank 0 waiting for too long,
    ``lost`` is set to the reason and rank 0 ends too, since the KV of a lost rank cannot be restored from the others.
    """

    def __init__(self, config: EngineConfig, device: torch.device) -> None:
        """Start them and meet them."""
        self.lost: str | None = None
        self._device = device
        self._view_sender = SessionViewSender()
        self._sent_mode: SetMode | None = None
        self._loading = True
        self._closed = threading.Event()
        store, port = open_store(config.tensor_parallel)
        told = msgspec.json.encode(msgspec.structs.replace(config, device=device.type))
        addresses = [RankAddress(rank, config.tensor_parallel, port) for rank in range(config.tensor_parallel)]
        started = [_start(address) for address in addresses[1:]]
        self._processes = [process for process, _, _ in started]
        super().__init__([ordered for _, ordered, _ in started], [files for _, _, files in started])
        threading.Thread(target=self._watch, daemon=True).start()
        try:
            for _, ordered, _ in started:
                ordered.send(told)
            join(addresses[0], device, store)
        except BaseException:
            self.close()
            raise

    # -- what the model is called with ------------------------------------------------------------------------------

    def mirror(self, model: Any) -> None:
        """Run every later call of ``model`` on all ranks."""
        model.register_forward_pre_hook(self._plain, with_kwargs=True)

    def _plain(self, model: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if any(isinstance(value, PackedCache) for value in kwargs.values()):
            return  # ``step`` has told it
        positions = kwargs.get("position_ids")
        ids = kwargs["input_ids"][0].tolist()
        listed = None if positions is None else positions[0].tolist()
        self.broadcast(PlainForward(ids, listed, bool(kwargs["use_cache"])))

    @contextmanager
    def step(self, mode: Mode, work: Sequence[tuple[SessionCache, int]], keep: Sequence[int]) -> Iterator[None]:
        """Within it, the other ranks run the step that rank 0 runs. Raises ``RankLost`` for any failure: some ranks may
        have done more of the step than others.
        """
        assert mode.trace.argument is not None
        mode_command = SetMode(mode.trace.argument, mode.trace.first_position, mode.trace.by_row, sorted(mode.in_place))
        try:
            with self.waiting():
                if mode_command != self._sent_mode:
                    self.broadcast(mode_command)
                    self._sent_mode = mode_command
                self.broadcast(self._view_sender.step(work, keep))
                yield
                if self._device.type == "cuda":  # what is waited for here is watched
                    torch.cuda.current_stream(self._device).synchronize()
        except RankLost:
            raise
        except Exception as error:
            raise RankLost(f"a step failed on rank 0: {error}") from error

    # -- memory -----------------------------------------------------------------------------------------------------

    def free_memory(self) -> int:
        """Bytes for KV that each of them has at least."""
        return min(int(answer) for answer in self.call(FreeMemory()))

    def create_tiers(
        self, slots: int, host_slots: int, page_size: int, *, known: bool, division: Division = UNDIVIDED
    ) -> None:
        """Let them make tiers of that many pages, or frames. Raises ``MemoryError`` where one of them cannot."""
        wrong = [answer for answer in self.call(CreateTiers(slots, host_slots, page_size, known, division)) if answer]
        if wrong:
            raise MemoryError(wrong[0])
        self._view_sender.divided = bool(division.near)

    # -- life -------------------------------------------------------------------------------------------------------

    def serving(self) -> None:
        """From now on nobody may keep the others waiting."""
        self._loading = False

    def close(self) -> None:
        """End them. Idempotent."""
        self._closed.set()
        super().close()
        deadline = time.monotonic() + _EXIT_TIMEOUT
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _watch(self) -> None:
        """On a thread of its own, as rank 0 may be waiting for who is gone."""
        while self.lost is None:
            if self._closed.wait(_POLL_SECONDS):
                return
            ended = {rank: status for rank, p in enumerate(self._processes, 1) if (status := p.poll()) is not None}
            for rank, status in ended.items():
                self.lost = f"rank {rank} ended ({status})"
            if not ended and not self._loading and self.waited > _EXCHANGE_TIMEOUT:
                self.lost = f"the other ranks have kept rank 0 waiting for {_EXCHANGE_TIMEOUT:.0f} seconds"
        log.error("%s", self.lost)
        if not self._closed.wait(_LOADING_GRACE if self._loading else _GRACE):
            for process in self._processes:
                process.kill()
            _end()


def _start(address: RankAddress) -> tuple[subprocess.Popen[bytes], RankLink, RankLink]:
    """The process of one rank, and the lines to it: for what comes in order, and for files."""
    (ordered, there), (files, far) = line_pair(), line_pair()
    ends = (there.fileno(), far.fileno())
    command = [sys.executable, "-P", "-m", "scheduler.follower", str(os.getpid()), *map(str, ends)]
    with there, far:  # the process has its own
        process = subprocess.Popen(
            command, pass_fds=ends, env=os.environ | address.environment, stdin=subprocess.DEVNULL, stdout=2
        )
    return process, ordered, files


def _end() -> None:
    """End this process, as an error of the device does: it cannot end by itself while it waits for another rank."""
    os._exit(1)
