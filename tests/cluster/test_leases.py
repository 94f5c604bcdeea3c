"""Which server writes a session, where several share the log: on both databases."""

from __future__ import annotations

import asyncio
import random
import sqlite3
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import pytest
import sqlalchemy as sql
from cluster.lease_kit import NAMES, S, dies, done, elsewhere, hold_once, living, rows, say, settled
from log_kit import opened, read, text, three_turns, turn, user

from server.log import leases
from server.log.claims import SessionBusy
from server.log.response_rows import StoredResponse, TurnExtras
from server.log.session_log import SessionLog
from server.log.tables import heartbeats
from server.log.tables import leases as lease_rows
from server.log.timeline import SessionMoved, TurnRecord


async def test_what_a_living_server_holds_is_busy(one: SessionLog, two: SessionLog) -> None:
    async with living(one, two), one.holding(*S):
        with pytest.raises(SessionBusy):
            async with two.holding(*S):
                pass
        async with two.holding("b", "s"), two.holding("a", "other"):
            pass
        assert elsewhere(two) == {S}
        assert not two.is_held(*S)
    async with two.holding(*S):
        assert elsewhere(two) == frozenset()


async def test_a_commit_frees_the_session_with_its_own_transaction(one: SessionLog, two: SessionLog) -> None:
    async with one.holding(*S):
        await turn(one, "s", "a", "b")
        assert rows(two) == []
        async with two.holding(*S):  # while the first one still writes its answer
            await turn(two, "s", "c", "d")
        with pytest.raises(SessionMoved):
            await one.edit("a", "s", 0, "x")  # the commit was the last verb of its claim
    assert text(await read(one)) == "abcd"


async def test_numbers_are_never_used_twice(one: SessionLog, two: SessionLog) -> None:
    numbers = []
    for log in (one, two, one, two):
        async with log.holding(*S):
            numbers += [row.id for row in rows(one)]
        await settled(log)
        assert rows(one) == []
    assert numbers == sorted(set(numbers))
    assert len(numbers) == 4


VERBS: dict[str, Callable[[SessionLog], Awaitable[object]]] = {
    "commit": lambda log: turn(log, "s", "x", "y"),
    "rewind": lambda log: log.rewind("a", "s", turn=1),
    "edit": lambda log: log.edit("a", "s", 0, "new"),
    "revise": lambda log: log.revise("a", "s", 0, [user("new")]),
    "delete": lambda log: log.delete("a", "s"),
    "create": lambda log: log.create("a", "s"),
    "fork": lambda log: log.fork("a", "source", "s"),
    "response": lambda log: log.responses.put("a", "s", StoredResponse("k", "queued", 1, "{}", "[]")),
}


@pytest.mark.parametrize("verb", VERBS)
async def test_a_server_that_was_paused_writes_nothing_after_a_takeover(
    one: SessionLog, two: SessionLog, verb: str
) -> None:
    """It holds the session, is not heard of for too long, comes back and goes on as if nothing had been."""
    await three_turns(one)
    await turn(one, "source", "u", "v")
    before = await read(one)
    async with one.holding(*S):
        dies(two, "one")
        async with two.holding(*S):
            with pytest.raises(SessionMoved):
                await VERBS[verb](one)
            assert await read(two) == before
            await turn(two, "s", "m", "n")
        with pytest.raises(SessionMoved):
            await VERBS[verb](one)  # nor when the other one is done
        assert await one.responses.get("a", "s", "k") is None
    assert text(await read(one)) == "abcdefghijklmn"
    assert text(await read(one, "source")) == "uv"


async def test_restored_sessions_are_fenced_too(one: SessionLog, two: SessionLog) -> None:
    await three_turns(one, "source")
    log = await one.rows("a", "source")
    async with one.holding(*S):
        dies(two, "one")
        async with two.holding(*S):
            with pytest.raises(SessionMoved):
                await one.restore("a", "s", log)
            await two.restore("a", "s", log)


async def test_a_server_that_nobody_missed_goes_on(one: SessionLog, two: SessionLog) -> None:
    async with one.holding(*S):
        dies(two, "one")
        await turn(one, "s", "a", "b")
    assert text(await read(two)) == "ab"


async def test_a_server_that_starts_again_frees_what_it_held(shared: str, one: SessionLog, two: SessionLog) -> None:
    await three_turns(one)
    async with one.holding(*S):
        again = SessionLog(shared, server="one")
        assert rows(two) == []
        async with two.holding(*S):
            await turn(two, "s", "m", "n")
        with pytest.raises(SessionMoved):
            await turn(one, "s", "x", "y")  # the life before, if it still has one
        await again.close()


async def test_whoever_ends_in_order_frees_what_it_held(shared: str, one: SessionLog) -> None:
    two = SessionLog(shared, server="two")
    with ExitStack() as never_closed:
        await two.hold(*S, never_closed)
        await two.close()
        async with one.holding(*S):
            assert [row.server for row in rows(one)] == ["one"]
        query = sql.select(heartbeats.c.server)
        assert one._database.read(lambda connection: connection.execute(query).scalars().all()) == ["one"]


async def test_it_is_waited_for_until_it_is_known_whether_the_holder_lives(one: SessionLog, two: SessionLog) -> None:
    async with one.holding(*S):
        taking = asyncio.create_task(hold_once(two))
        await asyncio.sleep(2 * leases.PATIENCE_SECONDS)
        assert not taking.done()  # no heartbeat either way: it may be dead
        dies(two, "one")
        await taking


async def test_a_session_that_comes_free_meanwhile_is_not_busy(one: SessionLog, two: SessionLog) -> None:
    async with living(one, two):
        async with one.holding(*S):
            taking = asyncio.create_task(hold_once(two))
            await asyncio.sleep(0.1)
        await taking


async def test_a_wait_that_is_cut_off_leaves_nothing(one: SessionLog, two: SessionLog) -> None:
    for looks in range(8):
        async with one.holding(*S):
            taking = asyncio.create_task(hold_once(two))
            for _ in range(looks * 20):
                await asyncio.sleep(0)
        taking.cancel()  # perhaps it has just taken it
        await asyncio.wait([taking])
        await settled(two)
        assert not two.is_held(*S)
        await settled(one)
        assert rows(one) == []


async def test_what_could_not_be_freed_goes_with_a_heartbeat(one: SessionLog) -> None:
    async with one.holding(*S):
        done(one, sql.insert(lease_rows).values(name="a/stray", server="one"))
        for _ in range(2):
            await one.beat()
        assert [row.name for row in rows(one)] == ["a/s"]


async def test_a_deletion_takes_the_session_from_whoever_holds_it(one: SessionLog, two: SessionLog) -> None:
    async with living(one, two):
        await three_turns(one)
        record = await read(one)
        async with one.holding(*S):
            async with two.claim_when_free(*S, seconds=10.0) as taken:
                assert taken
                assert await two.delete(*S)
            with pytest.raises(SessionMoved):
                await say(one, record, "x", "y")
        assert await one.get(*S) is None
        async with two.claim_when_free(*S, seconds=10.0) as taken:
            assert not taken


async def test_a_server_hears_what_the_others_did_and_wish(one: SessionLog, two: SessionLog) -> None:
    await three_turns(one)
    async with one.holding(*S), one.holding("a", "t"):
        assert await one.beat() == leases.LeaseChanges()
        await one.create("a", "t")
        await one.responses.put("a", "t", StoredResponse("k", "queued", 1, "{}", "[]"))
        for unwanted in (False, True):
            await two.responses.settle("a", "t", "k", unwanted=unwanted)
            assert await one.beat() == leases.LeaseChanges(unwanted=frozenset({("a", "t", "k")} if unwanted else ()))
        async with two.claim_when_free(*S, seconds=10.0):
            await two.delete(*S)
        assert (await one.beat()).lost == {S}
    await settled(one)
    assert await one.beat() == leases.LeaseChanges()


async def test_sessions_that_others_hold_do_not_expire(one: SessionLog, two: SessionLog) -> None:
    await one.create("a", "s", ttl=1)
    await one.create("a", "t", ttl=1)
    late = time.time() + 100
    async with one.holding(*S):
        assert await two.expire(late) == [("a", "t")]
        dies(two, "one")
        assert await two.expire(late) == [S]  # it will not be missed


async def test_servers_expire_together(one: SessionLog, two: SessionLog, three: SessionLog, four: SessionLog) -> None:
    logs = (one, two, three, four)
    for number in range(120):
        await logs[0].create("a", f"s{number}", ttl=1)
    told = await asyncio.gather(*(log.expire(time.time() + 100) for log in logs))
    assert sorted(key for some in told for key in some) == sorted(("a", f"s{n}") for n in range(120))
    for log in logs:
        assert len(await log.tombstones()) == 120


async def test_responses_of_a_dead_server_have_failed_and_stay_so(one: SessionLog, two: SessionLog) -> None:
    await three_turns(one)
    async with one.holding(*S):
        queued = StoredResponse("k", "queued", 1, "{}", "[]")
        await one.responses.put("a", "s", queued)
        await two.responses.fail_lost()
        assert await two.responses.get("a", "s", "k") == queued  # it lives
        dies(two, "one")
        await two.responses.fail_lost()
        stored = await two.responses.get("a", "s", "k")
        assert stored is not None
        assert stored.status == "failed"
        with pytest.raises(SessionMoved):
            await turn(one, "s", "x", "y", extras=TurnExtras(replace(queued, status="completed")))
        assert await two.responses.get("a", "s", "k") == stored


@pytest.mark.parametrize("seed", range(3))
async def test_turns_of_several_servers_are_turns_in_a_row(
    one: SessionLog, two: SessionLog, three: SessionLog, four: SessionLog, seed: int
) -> None:
    """Each server holds the session, reads it, waits, and commits; some of them die for a while in between."""
    logs = (one, two, three, four)
    rng = random.Random(seed)
    committed: list[str] = []

    async def client(number: int, log: SessionLog) -> None:
        for count in range(6):
            mark = f"{number}{count}"
            try:
                async with log.holding(*S):
                    record = await log.get(*S)
                    await asyncio.sleep(rng.uniform(0, 0.05))
                    if rng.random() < 0.3:
                        dies(log, NAMES[number])
                        await asyncio.sleep(0.05)
                    done_turn = await say(log, record, mark, "r")
                    assert isinstance(done_turn, TurnRecord)
                    committed.append(mark)
            except (SessionBusy, SessionMoved):
                await asyncio.sleep(rng.uniform(0, 0.02))

    async with living(*logs, pause=0.1):
        await asyncio.gather(*(client(number, log) for number, log in enumerate(logs)))
    record = await read(logs[0])
    said = text(record).split("r")[:-1]
    assert sorted(said) == sorted(committed)
    assert len(said) == len(record.turns)
    assert said


async def test_a_log_of_one_servers_own_knows_no_leases(tmp_path: Path) -> None:
    async with opened(tmp_path / "log.sqlite") as log:
        assert not log.shared
        async with log.holding(*S):
            await turn(log, "s", "a", "b")
            assert rows(log) == []
            await turn(log, "s", "c", "d")
        query = sql.select(sql.func.count()).select_from(heartbeats)
        assert log._database.read(lambda connection: connection.execute(query).scalar_one()) == 0


async def test_leases_in_a_damaged_log_are_no_sessions(tmp_path: Path) -> None:
    """They are there after a kill -9, and what can be read of a damaged file is told by its shape."""
    async with opened(f"sqlite:///{tmp_path}/shared.sqlite", "one") as one:
        await three_turns(one)
        async with one.holding(*S), one.holding("a", "phantom"):
            one._database.wipe()
            (tmp_path / "log.sqlite").write_bytes((tmp_path / "shared.sqlite").read_bytes())
    path = tmp_path / "log.sqlite"
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT count(*) FROM leases").fetchone() == (2,)
        (page,) = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = 'labels'").fetchone()
    with path.open("r+b") as file:
        file.seek((page - 1) * 4096)
        file.write(bytes(4096))
    async with opened(path) as log:
        assert log.salvage is not None
        assert (log.salvage.whole, log.salvage.refused, log.salvage.nameless) == (1, 0, 0)
        assert text(await read(log)) == "abcdefghijkl"
        assert await log.get("a", "phantom") is None
