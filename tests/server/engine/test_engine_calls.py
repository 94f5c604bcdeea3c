"""What the engine is asked beside turns, and what it tells unasked, against a scripted engine."""

import asyncio
import os
import shutil
import signal
from pathlib import Path

import pytest
import scripted_engine
from scripted_process import engine, pid_of, until

from cache.tier import Tier, TierHolding
from scheduler.engine_config import EngineConfig
from scheduler.engine_stats import Stats
from scheduler.model_facts import ModelFacts
from scheduler.protocol import Inspect, Inspected
from server.engine import engine_link
from server.engine.engine import EngineDied, EngineUnavailable
from server.engine.engine_calls import EngineCalls
from server.engine.engine_process import EngineProcess
from server.engine.launcher import EngineLauncher


async def test_the_server_hears_of_every_ready_engine_and_of_what_is_forgotten() -> None:
    ready: list[ModelFacts] = []
    forgotten: list[tuple[str, str, int]] = []
    config = EngineConfig(address="", model="ok")

    def on_ready(facts: ModelFacts) -> None:
        assert process.state() == "ready"
        ready.append(facts)
        process.forget("a", "unheard")  # nobody asked to be told
        process.forget("a", f"s{len(ready)}", len(ready))

    process = EngineProcess(
        config,
        EngineLauncher(scripted_engine.COMMAND),
        on_ready=on_ready,
        on_forgotten=lambda *of: forgotten.append(of),
    )
    await process.start()
    await until(lambda: forgotten == [("a", "s1", 1)])
    os.kill(pid_of(process), signal.SIGKILL)
    await until(lambda: forgotten == [("a", "s1", 1), ("a", "s2", 2)])
    assert ready == [scripted_engine.FACTS] * 2
    await process.stop(grace=2.0)


async def test_inspect_pin_export_and_import(tmp_path: Path) -> None:
    folder = str(tmp_path / "out")
    async with engine() as process:
        await process.wait_ready()
        inspected = await process.inspect("a", "s")
        assert (inspected.tiers, inspected.running) == ({Tier.DISK: TierHolding(16, 128)}, False)
        process.pin("a", "s", 5e9)
        assert (await process.inspect("a", "s")).running  # the script's word for pinned
        exported = await process.export("a", "s", folder, b"")
        assert (exported.files, exported.tokens) == (2, 16)
        imported = await process.import_("a", "s", folder)
        assert (imported.tokens, imported.reason) == (16, None)
        one, two, three = await asyncio.gather(
            process.import_("a", "s", str(tmp_path)), process.inspect("a", "t"), process.inspect("a", "mute2")
        )
        assert (one.tokens, one.reason, two.running, three.running) == (0, "damaged", False, False)


async def test_calls_need_a_ready_engine() -> None:
    async with engine() as process:
        with pytest.raises(EngineUnavailable, match="loading") as refusal:
            await process.inspect("a", "s")
        assert refusal.value.retry_after >= 1
        process.pin("a", "s", 1.0)  # nothing there yet, nothing to pin
        await process.wait_ready()
        process.drain()
        assert (await process.inspect("a", "s")).tiers  # while turns are over one by one
        await process.stop(grace=2.0)
        with pytest.raises(EngineUnavailable, match="shutting down"):
            await process.export("a", "s", "/nowhere", b"")


async def test_a_call_ends_with_the_engine_that_it_was_made_to() -> None:
    async with engine() as process:
        await process.wait_ready()
        silent = asyncio.create_task(process.inspect("a", "mute"))
        await asyncio.sleep(0)
        with pytest.raises(EngineDied):
            await process.inspect("a", "crash")
        with pytest.raises(EngineDied):
            await silent
        await until(lambda: process.state() == "ready")
        last = asyncio.create_task(process.inspect("a", "mute"))
        await asyncio.sleep(0)
        await process.stop(grace=2.0)
        with pytest.raises(EngineDied, match="shutting down"):
            await last


async def test_a_call_without_an_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.engine.engine_calls.PATIENCE", 0.05)
    async with engine() as process:
        await process.wait_ready()
        with pytest.raises(EngineUnavailable, match="did not answer") as refusal:
            await process.inspect("a", "mute")
        assert refusal.value.retry_after >= 1
        assert process._calls._open == {}


async def test_a_call_waits_as_long_as_something_gets_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.engine.engine_calls.PATIENCE", 0.01)
    looks = iter([(1, 0), (2, 0), (2, 5), (2, 6), (2, 6), (2, 7)])
    late = iter(range(20))
    calls = EngineCalls()
    with pytest.raises(EngineUnavailable, match="did not answer"):
        await calls.ask(Inspect("q", "a", "s"), Inspected, lambda _: None, lambda: next(looks))
    assert list(looks) == [(2, 7)]

    def progress() -> int:
        if (number := next(late)) == 9:
            calls.answer(Inspected("q", {}))
        return number

    assert await calls.ask(Inspect("q", "a", "s"), Inspected, lambda _: None, progress) == Inspected("q", {})
    assert next(late) == 10


@pytest.mark.parametrize("sign", ["disk_written", "disk_read", "free"])
def test_an_engine_gets_on_while_it_reads_or_writes(sign: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr("server.engine.engine_process.shutil.disk_usage", lambda folder: usage)
    process = EngineProcess(EngineConfig(address="", model="ok", kv_folder=str(tmp_path)), EngineLauncher())
    before = process._progress()
    assert before is not None
    assert process._progress() == before
    if sign == "free":
        usage = usage._replace(free=usage.free - 1)
    else:
        process.stats = Stats(**{sign: 1})  # type: ignore[arg-type]
    assert process._progress() != before
    monkeypatch.setattr("server.engine.engine_process.shutil.disk_usage", failing)
    assert process._progress() is not None


def failing(folder: str) -> None:
    raise FileNotFoundError(folder)


async def test_a_call_to_an_engine_that_does_not_read_is_refused() -> None:
    async with engine() as process:
        await process.wait_ready()

        def full(message: object) -> None:
            raise engine_link.LinkFull

        assert process._link is not None
        process._link.send = full  # type: ignore[method-assign]
        with pytest.raises(EngineUnavailable, match="not taking requests"):
            await process.inspect("a", "s")
        assert process._calls._open == {}
