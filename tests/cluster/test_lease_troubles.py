"""Leases where something is amiss: clocks, locks that are kept, a full disk, connections that are dead, old rows."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import psycopg
import pytest
import sqlalchemy as sql
from cluster.lease_kit import S, dies, done, elsewhere, hold_once, living, rows, settled
from log_kit import opened, turn
from postgres_server import PostgresServer

from server.log import leases
from server.log.claims import SessionBusy
from server.log.database import CONNECTION, Database, LogFull, LogLocked
from server.log.session_log import SessionLog
from server.log.tables import heartbeats
from server.log.tables import leases as lease_rows


def set_back(log: SessionLog, server: str) -> None:
    """The clock of the database is an hour behind the last heartbeat of a server."""
    done(log, sql.update(heartbeats).where(heartbeats.c.server == server).values(beat=heartbeats.c.beat + 3600.0))


async def test_a_clock_that_was_set_back_keeps_no_dead_server_alive(
    one: SessionLog, two: SessionLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "DEAD_SECONDS", 0.3)
    async with one.holding(*S):
        set_back(two, "one")
        taking = asyncio.create_task(hold_once(two))
        await asyncio.wait([taking], timeout=60)
        assert taking.done()
        taking.result()
        assert elsewhere(two) == frozenset()


async def test_a_living_server_keeps_its_sessions_when_the_clock_is_set_back(one: SessionLog, two: SessionLog) -> None:
    async with one.holding(*S):
        set_back(two, "one")
        taking = asyncio.create_task(hold_once(two))
        await settled(two)
        async with living(one, two):
            await asyncio.wait([taking])
        assert isinstance(taking.exception(), SessionBusy)
        await turn(one, "s", "a", "b")


async def test_sessions_of_a_dead_server_expire_though_the_clock_was_set_back(one: SessionLog, two: SessionLog) -> None:
    await one.create("a", "s", ttl=1)
    async with one.holding(*S):
        set_back(two, "one")
        assert await two.expire(time.time() + 100) == [S]


@contextmanager
def paused(url: str, *statements: str) -> Iterator[psycopg.Connection]:
    """A server that is paused in the middle of a transaction."""
    with closing(psycopg.connect(url)) as connection:
        for statement in statements:
            connection.execute(statement.encode())
        yield connection


@pytest.mark.parametrize(
    "statement",
    [
        "SELECT * FROM leases WHERE name = 'a/s' FOR UPDATE",
        "DELETE FROM leases WHERE name = 'a/s'",
        "INSERT INTO leases (name, server) VALUES ('a/new', 'one')",
    ],
)
async def test_a_server_that_is_paused_in_a_transaction_holds_up_nobody_else(
    postgres: PostgresServer, statement: str
) -> None:
    url = postgres.new_database()
    session = "new" if "new" in statement else "s"
    async with opened(url, "one") as one, opened(url, "two") as two:
        await turn(one, "other", "a", "b")
        done(two, sql.text("SET statement_timeout = '1s'"))  # an end to waiting that is another error
        async with one.holding(*S):
            with paused(url, statement) as transaction:
                dies(two, "one")
                taking = asyncio.create_task(hold_once(two, session))
                await asyncio.sleep(0)  # it is asked for first
                assert await two.get("a", "other") is not None
                assert not taking.done()
                transaction.rollback()
            await taking


async def test_a_session_whose_lease_is_locked_is_not_busy_for_that(
    postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its holder was seen before, and nothing is heard of it."""
    url = postgres.new_database()
    monkeypatch.setattr(leases, "PATIENCE_SECONDS", 0.0)
    real, looks = leases.Leases._take, []

    def take(*given: Any) -> Any:
        looks.append(real(*given))
        return looks[-1]

    async with opened(url, "one") as one, opened(url, "two") as two, one.holding(*S):
        monkeypatch.setattr(leases.Leases, "_take", take)
        taking = asyncio.create_task(hold_once(two))
        await settled(two)
        with paused(url, "DELETE FROM leases WHERE name = 'a/s'") as transaction:
            while looks.count(None) < 2 and not taking.done():
                await settled(two)
            assert not taking.done()
            transaction.commit()
        await taking


async def test_strays_that_are_locked_do_not_stop_the_heart(postgres: PostgresServer) -> None:
    url = postgres.new_database()
    async with opened(url, "one") as one:
        done(one, sql.insert(lease_rows).values(name="a/stray", server="one"))
        await one.beat()
        done(one, sql.text("SET statement_timeout = '1s'"))  # an end to waiting that is another error
        lock = "SELECT * FROM leases WHERE name = 'a/stray' FOR UPDATE"
        with paused(url, lock), pytest.raises(LogLocked):
            await one.beat()
        await one.beat()
        assert rows(one) == []


def test_a_connection_ends_where_nobody_is_behind_it(postgres: PostgresServer) -> None:
    """Such an end cannot be made here without a network: what libpq and PostgreSQL are told."""
    url = postgres.new_database()

    def told(url: str) -> tuple[dict[str, str], str]:
        def work(connection: sql.Connection) -> tuple[dict[str, str], str]:
            driver = connection.connection.driver_connection
            assert isinstance(driver, psycopg.Connection)
            idle = connection.exec_driver_sql("SHOW idle_in_transaction_session_timeout").scalar_one()
            return driver.info.get_parameters(), idle

        with closing(Database(url, "process")) as database:
            return database.read(work)

    parameters, idle = told(url)
    assert CONNECTION.items() <= {name: int(value) for name, value in parameters.items() if value.isdigit()}.items()
    assert idle == "10s"
    assert told(f"{url}&tcp_user_timeout=7000")[0]["tcp_user_timeout"] == "7000"


async def test_numbers_do_not_run_out(postgres: PostgresServer) -> None:
    url = postgres.new_database()
    async with opened(url, "one") as one:
        done(one, sql.select(sql.func.setval("leases_id_seq", 2**31 - 1)))
        async with one.holding(*S):
            assert [row.id for row in rows(one)] == [2**31]
            await turn(one, "s", "a", "b")


async def test_a_server_starts_while_the_disk_is_full(
    shared: str, monkeypatch: pytest.MonkeyPatch, one: SessionLog, two: SessionLog
) -> None:
    """What its earlier life held is freed by its heartbeats, once there is room."""
    async with one.holding(*S):
        with monkeypatch.context() as patch:
            patch.setattr(leases.Leases, "_forget", no_room)
            again = SessionLog(shared, server="one")
        assert [row.name for row in rows(two)] == ["a/s"]
        for _ in range(2):
            await again.beat()
        assert rows(two) == []
        await again.close()


def no_room(*_: object, **__: object) -> None:
    raise LogFull("the session log cannot be written: database or disk is full")


async def test_what_is_left_of_servers_that_do_not_come_back_is_removed(
    shared: str, one: SessionLog, two: SessionLog
) -> None:
    async with one.holding("a", "one"), two.holding("a", "two"):
        gone = sql.insert(heartbeats).values(server="gone", beat=time.time() - 2 * leases.OLD_SECONDS)
        done(one, gone)
        for server in ("gone", "older"):
            done(one, sql.insert(lease_rows).values(name=f"a/{server}", server=server))
        dies(one, "two")
        third = SessionLog(shared, server="three")
        assert [row.name for row in rows(one)] == ["a/one", "a/two"]
        query = sql.select(heartbeats.c.server).order_by(heartbeats.c.server)
        beating = one._database.read(lambda connection: connection.execute(query).scalars().all())
        assert beating == ["one", "three", "two"]
        await third.close()
