"""The process of a rank other than rank 0: ``python -m scheduler.follower PID LINE LINE``, started by rank 0, whose
process id is PID. Each LINE is a file descriptor of a socket to rank 0.

It holds its part of the model and of every page, and executes rank 0's commands in order. It ends with status 0 when
rank 0 closes the sockets, and is killed with rank 0 where the system supports that.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import socket
import sys
import threading
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np
import torch
import transformers
from transformers.cache_utils import DynamicCache

from cache.memory.stream import put
from cache.pages.layers import read_layers
from cache.pages.packed import PackedStep
from scheduler import cores
from scheduler.engine_config import EngineConfig
from scheduler.forward.modes import PackedMode
from scheduler.forward.rope import LongRope
from scheduler.forward.trace import Trace
from scheduler.logs import configure
from scheduler.model.checkpoint import read_config, read_model
from scheduler.model.memory import spare
from scheduler.parallel.division import RankAddress, join
from scheduler.parallel.rank_commands import (
    CopyPages,
    CreateTiers,
    FreeMemory,
    Ordered,
    PackedForward,
    PlainForward,
    SetMode,
)
from scheduler.parallel.rank_link import RankLink
from scheduler.parallel.rank_tiers import RankTiers
from scheduler.parallel.session_view import SessionViews

_DEATHSIG = 1  # PR_SET_PDEATHSIG of prctl


class Follower:
    """This rank's part of the model, run with rank 0's commands."""

    def __init__(self, model: Any, share: RankTiers) -> None:
        self._model = model
        self._share = share
        self._layers = read_layers(model.config.get_text_config(decoder=True))
        self._rope = LongRope(model)
        self._views = SessionViews()
        self._mode: PackedMode | None = None
        self._installed = False

    def execute(self, command: Ordered) -> Any:
        """Execute a command; returns its answer, None if it has none."""
        match command:
            case PackedForward():
                self._step(command)
            case CopyPages():
                self._share.copy(command)
            case PlainForward():
                self._plain(command)
            case SetMode():
                self._set_mode(command)
            case CreateTiers():
                try:
                    self._share.build(command, self._model.device)
                except (RuntimeError, MemoryError) as error:
                    return str(error) or type(error).__name__
                return ""
            case FreeMemory():
                return spare(self._model.device, torch.distributed.get_world_size())
        return None

    def _set_mode(self, command: SetMode) -> None:
        trace = Trace(command.argument, True, DynamicCache(), command.first_position, (), (), (), command.by_row)
        if self._mode is None:
            self._mode = PackedMode(self._model, self._layers, trace)
        self._mode.trace = trace
        self._mode.in_place = frozenset(command.in_place)

    def _install(self, wanted: bool) -> None:
        """Our attention for steps, the model's own for plain forwards."""
        if self._mode is not None and wanted is not self._installed:
            self._mode.install() if wanted else self._mode.remove()
            self._installed = wanted

    def _plain(self, command: PlainForward) -> None:
        self._install(False)
        inputs: dict[str, Any] = {"input_ids": torch.tensor([command.ids], device=self._model.device)}
        if command.positions is not None:
            inputs["position_ids"] = torch.tensor([command.positions], device=self._model.device)
        self._model(**inputs, use_cache=command.use_cache, return_dict=True)

    def _step(self, command: PackedForward) -> None:
        assert self._mode is not None
        self._install(True)
        tier = self._share.tiers[0]
        step = PackedStep(self._views.work(command), tier)
        keep = put(np.frombuffer(command.keep, np.int64).copy(), tier.device)
        with self._rope.side(command.long):
            self._mode.forward(step, keep)


def run_follower(ordered: RankLink, files: RankLink) -> None:
    """Load the model, then execute commands until rank 0 closes the socket, which raises EOFError."""
    config = msgspec.json.decode(ordered.receive(), type=EngineConfig)
    rank = int(os.environ["RANK"])
    configure(config.log_format, "warning", f"%(name)s: rank {rank}: %(message)s")
    address = RankAddress(rank, config.tensor_parallel, int(os.environ["MASTER_PORT"]))
    device = torch.device(config.device, rank) if config.device == "cuda" else torch.device(config.device)
    join(address, device)
    model, _ = read_model(config, read_config(config), device)
    if device.type == "cpu":
        cores.fit(model)
    share = RankTiers()
    follower = Follower(model, share)
    threading.Thread(target=_serve, args=(share, files, device), daemon=True).start()
    decode = msgspec.msgpack.Decoder(Ordered).decode
    while True:
        command = decode(ordered.receive())
        with torch.inference_mode():
            answer = follower.execute(command)
        if answer is not None:
            ordered.send(msgspec.msgpack.encode(answer))
        share.done()


def _serve(share: RankTiers, files: RankLink, device: torch.device) -> None:
    """Files are read and written beside the steps; a failure ends the process as one of a step does."""
    torch.set_num_threads(1)  # of this thread
    torch.set_grad_enabled(False)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # of this thread too
    try:
        share.serve(files)
    except EOFError:
        os._exit(0)
    except BaseException:
        logging.getLogger("warmturn.engine").exception("reading or writing pages failed")
        os._exit(1)


def _die_with(parent: int) -> None:
    """Where rank 0 is killed, so is this process: it may be in the middle of a step, waiting for it."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_DEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


def main() -> int:
    """Follow rank 0; the exit status."""
    parent, *lines = map(int, sys.argv[1:])
    _die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    ordered, files = (RankLink(socket.socket(fileno=fd)) for fd in lines)
    try:
        run_follower(ordered, files)
    except EOFError:
        return 0
    except Exception:
        logging.getLogger("warmturn.engine").exception("this rank cannot go on")
        return 1
    return 0


if __name__ == "__main__":
    status = main()
    sys.stderr.flush()
    os._exit(status)
