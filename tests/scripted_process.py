"""An ``EngineProcess`` over the engine of ``scripted_engine``, for one test."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import scripted_engine

from scheduler.engine_config import EngineConfig
from scheduler.protocol import Delta, Submit, pack_ids
from scheduler.sampling_params import Stopping
from scheduler.turn_receipt import Receipt
from server.engine.engine import TurnStream
from server.engine.engine_process import EngineProcess
from server.engine.launcher import EngineLauncher


@asynccontextmanager
async def engine(model: str = "ok", max_queued: int = 1024) -> AsyncIterator[EngineProcess]:
    """A started engine process, stopped afterwards."""
    process = EngineProcess(
        EngineConfig(address="", model=model, max_queued=max_queued), EngineLauncher(scripted_engine.COMMAND)
    )
    await process.start()
    try:
        yield process
    finally:
        await process.stop(grace=2.0)


def submit(
    tenant: str = "count", name: str = "t1", tokens: int = 5, prompt: int = 7, session: str | None = None
) -> Submit:
    return Submit(name, tenant, pack_ids(list(range(prompt))), session, stopping=Stopping(max_tokens=tokens))


async def admitted(turn: TurnStream) -> Receipt:
    """What its prompt cost. Raises what it was refused for."""
    while turn.receipt is None:
        assert turn.take() is None
        await news(turn)
    return turn.receipt


async def piece(turn: TurnStream) -> Delta:
    while (delta := turn.take()) is None:
        await news(turn)
    return delta


async def read(turn: TurnStream) -> list[Delta]:
    deltas = [await piece(turn)]
    while deltas[-1].finish_reason is None:
        deltas.append(await piece(turn))
    return deltas


async def news(turn: TurnStream) -> None:
    turn.news.clear()
    await turn.news.wait()


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


def pid_of(process: EngineProcess) -> int:
    assert process._link is not None
    return process._link.pid
