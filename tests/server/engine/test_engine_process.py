"""The engine process kept alive: turns, refusals, death and restart, against a scripted engine without a model."""

import asyncio
import os
import signal
import stat
from pathlib import Path

import pytest
import scripted_engine
from scripted_process import admitted, engine, pid_of, piece, read, submit, until

from cache.tier import Tier
from scheduler.engine_config import EngineConfig
from scheduler.protocol import FinishReason
from server.engine.engine import EngineDied, EngineFailed, EngineUnavailable, TurnRefused
from server.engine.engine_process import EngineProcess
from server.engine.launcher import EngineLauncher, backoff


async def test_a_turn_is_admitted_and_streamed_to_its_end() -> None:
    async with engine() as process:
        assert process.state() == "loading"
        facts = await process.wait_ready()
        assert facts == scripted_engine.FACTS == process.facts
        assert process.state() == "ready"
        assert process.healthy
        turn = process.submit(submit())
        receipt = await admitted(turn)
        assert receipt is not None
        assert (receipt.prompt, receipt.cached) == (7, 6)
        deltas = await read(turn)
        assert [token for delta in deltas for token in delta.tokens] == [1, 2, 3, 4, 5]
        assert "".join(delta.text for delta in deltas) == "1 2 3 4 5 "
        assert [delta.finish_reason for delta in deltas[-2:]] == [None, FinishReason.LENGTH]
        assert all(delta.receipt is None for delta in deltas)
        assert process.running == 0


async def test_turns_run_side_by_side() -> None:
    async with engine() as process:
        await process.wait_ready()
        turns = [process.submit(submit(name=f"t{n}", tokens=n, prompt=n)) for n in range(1, 20)]
        assert process.running == 19
        for n, deltas in enumerate(await asyncio.gather(*map(read, turns)), start=1):
            assert [token for delta in deltas for token in delta.tokens] == list(range(1, n + 1))


async def test_a_slow_reader_gets_one_merged_delta() -> None:
    async with engine() as process:
        await process.wait_ready()
        turn = process.submit(submit(tokens=6))
        await until(lambda: process.running == 0)
        (delta,) = await read(turn)
        assert (delta.tokens, delta.text, delta.finish_reason) == ((1, 2, 3, 4, 5, 6), "1 2 3 4 5 6 ", "length")
        turn.cancel()  # after the end: nothing happens
        assert turn.take() is None


async def test_no_turn_before_the_model_is_loaded() -> None:
    async with engine() as process:
        with pytest.raises(EngineUnavailable, match="loading") as refusal:
            process.submit(submit())
        assert refusal.value.retry_after >= 1
        assert not process.healthy
        process.forget("a", "s")  # nothing there yet, nothing to drop


@pytest.mark.parametrize(("code", "retry_after"), [("queue_full", 1), ("context_length_exceeded", None)])
async def test_a_refused_turn_says_why(code: str, retry_after: int | None) -> None:
    async with engine() as process:
        await process.wait_ready()
        turn = process.submit(submit(tenant=code))
        with pytest.raises(TurnRefused, match=f"{code} of 7 tokens") as refusal:
            await admitted(turn)
        assert (refusal.value.code, refusal.value.retry_after) == (code, retry_after)
        with pytest.raises(TurnRefused):
            await read(turn)
        assert process.running == 0


async def test_a_cancelled_turn_leaves_the_batch() -> None:
    async with engine() as process:
        await process.wait_ready()
        turn = process.submit(submit(tenant="endless"))
        await admitted(turn)
        assert (await piece(turn)).tokens[0] == 1
        turn.cancel()
        turn.cancel()
        assert (await read(turn))[-1].finish_reason == FinishReason.CANCELLED
        assert process.running == 0
        await until(lambda: process.stats.running == 0)


async def test_the_turn_of_a_session_is_ended_for_a_reason_of_the_server_s() -> None:
    async with engine() as process:
        await process.wait_ready()
        turns = [process.submit(submit(tenant="endless", name=name, session=name)) for name in "st"]
        for turn in turns:
            await admitted(turn)
        process.end("count", "s", EngineDied("another tenant's"))
        process.end("endless", "s", EngineDied("taken"))
        with pytest.raises(EngineDied, match="taken"):
            await read(turns[0])
        await until(lambda: process.running == process.stats.running == 1)  # in the engine too
        assert (await piece(turns[1])).tokens


async def test_forget_reaches_the_engine() -> None:
    async with engine() as process:
        await process.wait_ready()
        process.forget("a", "s")
        await until(lambda: process.stats.tier(Tier.DEVICE).evictions == 1)


async def test_kill_9_ends_running_turns_and_a_fresh_engine_takes_over() -> None:
    async with engine() as process:
        await process.wait_ready()
        turn = process.submit(submit(tenant="endless"))
        silent = process.submit(submit(tenant="mute", name="t2"))
        await admitted(turn)
        await admitted(silent)
        killed = pid_of(process)
        os.kill(killed, signal.SIGKILL)
        with pytest.raises(EngineDied):
            await read(turn)
        with pytest.raises(EngineDied):
            await read(silent)
        with pytest.raises(EngineUnavailable, match="restarting") as refusal:
            process.submit(submit())
        assert refusal.value.retry_after >= 1
        assert (process.state(), process.facts, process.healthy) == ("restarting", None, False)
        turn.cancel()  # too late, and harmless
        await until(lambda: process.state() == "ready")
        assert pid_of(process) != killed
        assert process.facts == scripted_engine.FACTS
        assert len(await read(process.submit(submit(tokens=2)))) >= 1


async def test_an_engine_that_dies_before_admission_is_told_as_such() -> None:
    async with engine() as process:
        await process.wait_ready()
        turn = process.submit(submit(tenant="crash"))
        with pytest.raises(EngineDied):
            await read(turn)
        await until(lambda: process.state() == "ready")


@pytest.mark.parametrize(("model", "message"), [("fail", "no such model: fail"), ("die", "killed by SIGKILL")])
async def test_a_first_load_that_fails_is_final(model: str, message: str) -> None:
    async with engine(model) as process:
        with pytest.raises(EngineFailed, match=message):
            await process.wait_ready()
        with pytest.raises(EngineUnavailable):
            process.submit(submit())


async def test_a_command_that_does_not_exist_is_a_failed_load() -> None:
    process = EngineProcess(EngineConfig(address="", model="ok"), EngineLauncher(("/no/such/program",)))
    await process.start()
    with pytest.raises(EngineFailed, match="could not be started"):
        await process.wait_ready()
    await process.stop()


async def test_a_restart_that_fails_is_tried_again(tmp_path: Path) -> None:
    loads = tmp_path / "loads"
    async with engine(f"once:{loads}") as process:
        await process.wait_ready()
        os.kill(pid_of(process), signal.SIGKILL)
        await until(lambda: len(loads.read_text().splitlines()) == 2)  # this load fails
        await until(lambda: process._link is None)
        loads.write_text("")  # the next one does not
        await until(lambda: process.state() == "ready")


def test_backoff_starts_at_once_and_is_bounded() -> None:
    assert [backoff(deaths) for deaths in range(5)] == [0, 0, 1, 2, 4]
    assert backoff(1000) == 30


async def test_the_socket_is_private_and_gone_once_the_engine_is_connected() -> None:
    async with engine() as process:
        await until(lambda: process._folder is not None)
        folder = process._folder
        assert folder is not None
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        await process.wait_ready()
        assert not folder.exists()
        assert await read(process.submit(submit()))


async def test_stop_ends_turns_and_process() -> None:
    async with engine() as process:
        await process.wait_ready()
        turn = process.submit(submit(tenant="endless"))
        await admitted(turn)
        pid = pid_of(process)
        process.drain()
        with pytest.raises(EngineUnavailable, match="shutting down"):
            process.submit(submit(name="t2"))
        assert (await piece(turn)).tokens  # a running turn goes on while draining
        await process.stop(grace=5.0)
        with pytest.raises(EngineDied, match="shutting down"):
            await read(turn)
        assert process.state() == "stopping"
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
        await process.stop()


async def test_a_refusal_that_was_pending_is_told_at_the_end() -> None:
    async with engine() as process:
        await process.wait_ready()
        refused, ended = (
            process.submit(submit(tenant="late", name="t1")),
            process.submit(submit(tenant="queued", name="t2")),
        )
        await process.stop(grace=5.0)
        with pytest.raises(TurnRefused, match="cannot be compiled"):
            await read(refused)
        with pytest.raises(EngineDied, match="shutting down"):
            await read(ended)


async def test_an_engine_that_does_not_stop_is_killed() -> None:
    async with engine("stubborn") as process:
        await process.wait_ready()
        pid = pid_of(process)
        turn = process.submit(submit(tenant="mute"))
        await process.stop(grace=0.1)
        with pytest.raises(EngineDied, match="shutting down"):
            await read(turn)
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


async def test_the_engine_is_told_how_long_it_may_flush(tmp_path: Path) -> None:
    process = EngineProcess(
        EngineConfig(address="", model="ok", kv_folder=str(tmp_path / "kv")),
        EngineLauncher(scripted_engine.COMMAND),
    )
    await process.start()
    await process.wait_ready()
    (tmp_path / "slow").touch()
    pid = pid_of(process)
    turn = process.submit(submit(tenant="endless"))
    stopping = asyncio.create_task(process.stop(flush=0.5, grace=5.0))
    with pytest.raises(EngineDied, match="shutting down"):  # while the engine still writes
        await read(turn)
    with pytest.raises(EngineUnavailable, match="shutting down"):
        await process.inspect("a", "s")
    assert not stopping.done()
    await stopping
    assert (tmp_path / "flushed").read_text() == "0.5"
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_a_prepared_process_loads_once_it_is_started() -> None:
    process = EngineProcess(EngineConfig(address="", model="ok"), EngineLauncher(scripted_engine.COMMAND))
    process.prepare()
    try:
        await until(lambda: process._link is not None)
        pid = pid_of(process)
        with pytest.raises(TimeoutError):  # ready long before that, had it a configuration
            await asyncio.wait_for(process.wait_ready(), 1.5)
        await process.start()
        await process.wait_ready()
        assert pid_of(process) == pid
    finally:
        await process.stop()


async def test_a_prepared_process_that_is_not_wanted_any_more_ends() -> None:
    process = EngineProcess(EngineConfig(address="", model="ok"), EngineLauncher(scripted_engine.COMMAND))
    process.prepare()
    await until(lambda: process._link is not None)
    pid = pid_of(process)
    await process.stop()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_stop_while_loading() -> None:
    async with engine() as process:
        await process.stop()
        with pytest.raises(EngineFailed):
            await process.wait_ready()


async def test_a_hung_engine_is_not_healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    async with engine() as process:
        await process.wait_ready()
        monkeypatch.setattr("server.engine.engine_process.SILENCE_LIMIT", 0.0)
        assert process.state() == "ready"
        assert not process.healthy
        os.kill(pid_of(process), signal.SIGSTOP)
        process.submit(submit())  # does not wait for it
        await process.stop(grace=0.1)
