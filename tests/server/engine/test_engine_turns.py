"""The turns that were sent to the engine: their count and their ends, and when another one would be refused."""

import asyncio
import contextlib

import pytest
from scripted_process import admitted, engine, read, submit, until

from scheduler.engine_stats import Stats
from scheduler.protocol import Delta, FinishReason, Refused
from server.engine.engine import EngineDied, TurnRefused
from server.engine.engine_turns import EngineTurns


async def test_a_full_queue_turns_away_until_a_turn_leaves_it() -> None:
    async with engine(max_queued=2) as process:
        await process.wait_ready()
        running = process.submit(submit(tenant="endless", name="r"))
        await admitted(running)
        waiting = [process.submit(submit(tenant="queued", name=name)) for name in "ab"]
        await until(lambda: process.stats.waiting == 2)
        refusal = process.turns_away("queued")
        assert refusal is not None
        assert (refusal.code, refusal.retry_after) == ("queue_full", 1)
        assert process.turns_away("other") is None  # its line is shorter by more than one
        with pytest.raises(TurnRefused):
            await read(process.submit(submit(tenant="queue_full", name="refused")))
        waiting[0].cancel()
        await read(waiting[0])
        process.stats = Stats(waiting=2)  # what the engine said of the step before
        assert process.turns_away("queued") is None


async def test_requests_that_are_read_have_their_places() -> None:
    async with engine(max_queued=2) as process:
        await process.wait_ready()
        running = process.submit(submit(tenant="endless", name="r"))
        await admitted(running)
        process.submit(submit(tenant="queued", name="a"))
        await until(lambda: process.stats.waiting == 1)
        with process.reading("queued"):
            assert process.turns_away("queued") is not None
            with pytest.raises(RuntimeError), process.reading("endless"):  # comes to no turn
                raise RuntimeError
            assert process.turns_away("other") is None  # its line is shorter by more than one
            process.submit(submit(tenant="queued", name="b"))
            await until(lambda: process.stats.waiting == 2)
            assert process.turns_away("queued") is not None
        assert process.turns_away("queued") is not None


async def test_an_idle_engine_is_read_for_by_any_number() -> None:
    async with engine(max_queued=2) as process:
        await process.wait_ready()
        with contextlib.ExitStack() as stack:
            for _ in range(9):
                stack.enter_context(process.reading("a"))
            assert process.turns_away("a") is None


async def test_a_turn_is_in_hand_until_its_reader_lets_it_go() -> None:
    async with engine() as process:
        await process.wait_ready()
        one, two = process.submit(submit(tokens=1)), process.submit(submit("endless", "t2"))
        assert process.in_hand == 2
        await until(lambda: process.running == 1)
        await read(one)
        assert process.in_hand == 2  # its answer is being written
        one.cancel()
        assert process.in_hand == 1
        two.cancel()
        assert process.in_hand == 0


def test_a_turn_takes_the_place_of_the_request_that_was_read_for_it() -> None:
    turns = EngineTurns(2, cancel=lambda name: None)
    turns.add(submit(tenant="a", name="t1"))
    with turns.reading("a"):
        assert turns.turns_away("a", queued=1) is not None
        turns.add(submit(tenant="a", name="t2"))
        assert turns.turns_away("a", queued=1) is None
        assert turns.turns_away("a", queued=2) is not None


async def test_every_turn_leaves_once_and_the_last_one_is_waited_for() -> None:
    cancelled: list[str] = []
    turns = EngineTurns(9, cancelled.append)
    await turns.wait_empty()
    turns.add(submit(name="only"))
    turns.push([Delta("only", finish_reason=FinishReason.STOP)])
    await asyncio.wait_for(turns.wait_empty(), 5)
    ended, refused, shut_down, died = [turns.add(submit(name=name)) for name in ("t1", "t2", "t3", "t4")]
    empty = asyncio.create_task(turns.wait_empty())
    turns.push([Delta("t1", finish_reason=FinishReason.STOP), Delta("t1", (1,)), Delta("unknown", (1,))])
    turns.refuse(Refused("t2", "context_length_exceeded", "too long"))
    turns.refuse(Refused("unknown", "queue_full", "full"))
    turns.push([Delta("t3", finish_reason=FinishReason.CANCELLED)], "shutting down")
    ended.cancel()
    assert len(turns) == 1
    assert "t4" in turns
    await asyncio.sleep(0)
    assert not empty.done()
    died.cancel()
    turns.fail("gone")
    await empty
    assert cancelled == ["t4"]
    assert len(turns) == 0
    assert [delta.finish_reason for delta in await read(ended)] == [FinishReason.STOP]
    for turn, failure, message in (
        (refused, TurnRefused, "too long"),
        (shut_down, EngineDied, "shutting down"),
        (died, EngineDied, "gone"),
    ):
        with pytest.raises(failure, match=message):
            await read(turn)
