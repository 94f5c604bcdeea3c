"""Responses that other servers run, or have run: who may end them, and when they are lost."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import pytest
import sqlalchemy as sql
from cluster.lease_kit import S, dies, done, living, rows, settled
from fake_engine import FakeEngine
from http_context import demo_tokens
from log_kit import read, text, three_turns, turn

from server.api.responses.routes import end_chain
from server.log import leases
from server.log.response_rows import StoredResponse, TurnExtras
from server.log.session_log import SessionLog
from server.log.tables import responses, sessions
from server.log.timeline import SessionMoved
from server.turns.context import ServerContext

T = TypeVar("T")
K1, K2 = (StoredResponse(key, "queued", 1, "{}", "[]") for key in ("k1", "k2"))


async def status(log: SessionLog, key: str, *, unwanted: bool = False) -> str:
    stored = await log.responses.settle(*S, key, unwanted=unwanted)
    assert stored is not None
    return stored.status


async def lost(log: SessionLog, stored: StoredResponse = K1) -> None:
    """A response whose end could not be written: its server lives, and holds its session no more."""
    async with log.holding(*S):
        await log.responses.put(*S, stored)
    await settled(log)


async def test_one_that_nobody_runs_has_failed_though_its_server_lives(one: SessionLog, two: SessionLog) -> None:
    async with living(one, two):
        await three_turns(one)
        async with one.holding(*S):
            await one.responses.put(*S, K1)
            assert await status(two, "k1") == "queued"
        await settled(one)
        assert await status(two, "k1") == "failed"
        await lost(one, K2)
        assert await status(one, "k2", unwanted=True) == "failed"  # cancelled where it ran


@pytest.mark.parametrize("sweeper", [0, 1])
async def test_the_sweep_of_any_server_finds_it(one: SessionLog, two: SessionLog, sweeper: int) -> None:
    async with living(one, two):
        await three_turns(one)
        await lost(one)
        async with one.holding("a", "other"):
            await one.create("a", "other")
            await one.responses.put("a", "other", K1)
            await (one, two)[sweeper].responses.fail_lost()
            kept = await one.responses.get("a", "other", "k1")
            assert kept is not None
            assert kept.status == "queued"  # it runs
        stored = await one.responses.get(*S, "k1")
        assert stored is not None
        assert stored.status == "failed"


async def test_its_server_tells_so_while_it_runs_another_one_on_the_session(one: SessionLog, two: SessionLog) -> None:
    """And from elsewhere, where that cannot be known, it can be asked to."""
    await three_turns(one)
    await lost(one)
    async with one.holding(*S):
        await one.responses.put(*S, K2)
        assert await status(two, "k1", unwanted=True) == "queued"
        assert await one.beat() == leases.LeaseChanges(unwanted=frozenset({(*S, "k1")}))
        assert await status(one, "k1") == "failed"
        await turn(one, "s", "x", "y", extras=TurnExtras(StoredResponse("k2", "completed", 1, "{}", "[]")))
    assert await status(two, "k2") == "completed"


async def test_a_cancel_ends_no_other_response(one: SessionLog, two: SessionLog) -> None:
    """It was looked at, is over then, and the next one has begun when the mark is made."""
    await three_turns(one)
    loop, reading = asyncio.get_running_loop(), two._database.read

    async def meanwhile() -> None:
        await turn(one, "s", "x", "y", extras=TurnExtras(StoredResponse("k1", "completed", 1, "{}", "[]")))

    def look(work: Callable[[sql.Connection], T]) -> T:
        found = reading(work)
        two._database.read = reading  # type: ignore[method-assign]
        asyncio.run_coroutine_threadsafe(meanwhile(), loop).result()
        return found

    async with one.holding(*S):
        await one.responses.put(*S, K1)
        two._database.read = look  # type: ignore[method-assign]
        assert await status(two, "k1", unwanted=True) == "completed"
    async with one.holding(*S):
        await one.responses.put(*S, K2)
        assert await status(two, "k1", unwanted=True) == "completed"
        assert await one.beat() == leases.LeaseChanges()


async def test_a_dead_server_that_comes_back_completes_nothing(one: SessionLog, two: SessionLog) -> None:
    await three_turns(one)
    async with one.holding(*S):
        await one.responses.put(*S, K1)
        dies(two, "one")
        assert await status(two, "k1") == "failed"
        with pytest.raises(SessionMoved):
            await turn(one, "s", "x", "y", extras=TurnExtras(StoredResponse("k1", "completed", 1, "{}", "[]")))
    assert text(await read(two)) == "abcdefghijkl"
    assert await status(one, "k1") == "failed"


async def test_a_chain_without_responses_stays_while_another_server_follows_it(
    one: SessionLog, two: SessionLog
) -> None:
    engine = FakeEngine(demo_tokens())
    context = cast(ServerContext, SimpleNamespace(log=two, engine=engine))
    await three_turns(one, "chain-1")
    async with living(one, two):
        async with one.holding("a", "chain-1"):
            await end_chain(context, "a", "chain-1")
            await turn(one, "chain-1", "x", "y")
        assert engine.forgotten == []
        await end_chain(context, "a", "chain-1")
    assert engine.forgotten == [("a", "chain-1")]
    assert await one.get("a", "chain-1") is None


@contextmanager
def statements(log: SessionLog) -> Iterator[list[tuple[str, Any]]]:
    """What the log asks of its database, with parameters."""
    asked: list[tuple[str, Any]] = []

    def before(_connection: Any, _cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        asked.append((statement, parameters))

    engine = log._database._engine
    sql.event.listen(engine, "before_cursor_execute", before)
    try:
        yield asked
    finally:
        sql.event.remove(engine, "before_cursor_execute", before)


def plan(log: SessionLog, statement: str, parameters: Any) -> str:
    """How the database runs it."""

    def work(connection: sql.Connection) -> str:
        how = "EXPLAIN " if connection.dialect.name == "postgresql" else "EXPLAIN QUERY PLAN "
        return "\n".join(str(row[-1]) for row in connection.exec_driver_sql(how + statement, parameters))

    return log._database.read(work)


async def test_no_look_reads_all_responses(one: SessionLog, two: SessionLog) -> None:
    """A poll of one that runs elsewhere, a cancel of it, and the sweep."""
    await three_turns(one)
    row = one._database.read(lambda connection: connection.execute(sql.select(sessions.c.id)).scalar_one())
    facts = {"session_id": row, "status": "completed", "server": "one", "created": 1, "body": "", "inputs": ""}
    many = [{**facts, "key": f"m{number}", "checksum": b""} for number in range(5000)]
    one._database.write(lambda connection: connection.execute(sql.insert(responses), many))
    done(one, sql.text("ANALYZE"))
    async with one.holding(*S):
        await one.responses.put(*S, K1)
        with statements(two) as asked:
            assert await status(two, "k1") == "queued"
            assert await status(two, "k1", unwanted=True) == "queued"
            await two.responses.fail_lost()
        plans = [plan(two, *one) for one in asked if "responses" in one[0]]
        assert len(plans) >= 5
        for told in plans:
            assert not re.search(r"Seq Scan on responses|SCAN responses(?! USING INDEX responses_running)", told)


async def test_whatever_is_written_locks_the_session_before_its_lease(one: SessionLog) -> None:
    """Or two servers can wait for each other: PostgreSQL ends one of them then."""
    await three_turns(one, "source")
    log = await one.rows("a", "source")
    verbs: list[Callable[[], Any]] = [
        lambda: one.create(*S),
        lambda: one.responses.put(*S, K1),
        lambda: one.rewind(*S, turn=0),
        lambda: one.delete(*S),
        lambda: one.fork("a", "source", "s"),
        lambda: one.delete(*S),
        lambda: one.restore(*S, log),
        lambda: turn(one, "s", "x", "y"),
    ]
    async with one.holding(*S):
        for verb in verbs:
            with statements(one) as asked:
                await verb()
            order = [table for text, _ in asked for table in ("sessions", "leases") if f"FROM {table}" in text]
            assert "leases" in order
            assert order[0] == "sessions"
        assert rows(one) == []
