"""Several servers on one database, and a database that goes away."""

import asyncio
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import psycopg
import pytest
from log_kit import Where, opened, read, text, texts, three_turns, turn, user
from postgres_server import PostgresServer
from sqlalchemy.exc import OperationalError

from server.log.database import LogFull, LogUnavailable
from server.log.session_log import SessionLog
from server.log.timeline import NewTurn, SessionExists, SessionMoved, TurnRecord


async def test_servers_see_each_others_turns(where: Where) -> None:
    async with opened(where) as one, opened(where) as two:
        await turn(one, "s", "a", "b")
        await turn(two, "s", "c", "d")
        await turn(one, "s", "e", "f")
        assert text(await read(two)) == "abcdef"
        await two.rewind("a", "s", turn=1)
        await one.update("a", "s", metadata={"k": "v"})
        assert await read(one) == await read(two)
        assert (await two.page("a", limit=2)).items == [(await read(one)).summary]


async def test_a_session_that_another_server_has_begun_anew_is_read_anew(where: Where) -> None:
    async with opened(where) as one, opened(where) as two:
        await three_turns(one)
        old = await read(one)
        await two.delete("a", "s")
        await turn(two, "s", "x", "y")
        assert text(await read(one)) == "xy"  # fewer rows
        await two.delete("a", "s")
        assert await one.get("a", "s") is None
        for ask in "123":
            await turn(two, "s", ask, "z")
        new = await read(one)
        assert text(new) == "1z2z3z"  # as many rows
        assert new.version != old.version
        with pytest.raises(SessionMoved):
            await turn(one, "s", "n", "m", expect=old.version)


async def test_of_turns_that_were_built_on_the_same_state_one_is_committed(where: Where) -> None:
    async with opened(where) as one, opened(where) as two, opened(where) as three, opened(where) as four:
        logs = (one, two, three, four)
        for count in range(1, 6):
            record = await logs[0].get("a", "s")
            version = 0 if record is None else record.version
            tries = [
                log.commit(
                    "a",
                    "s",
                    NewTurn(
                        tokens=[number] * count,
                        messages=[user(str(number))] * count,
                        fingerprint="f",
                        finish_reason="stop",
                    ),
                    expect=version,
                )
                for number, log in enumerate(logs)
            ]
            ended = await asyncio.gather(*tries, return_exceptions=True)
            won = [number for number, outcome in enumerate(ended) if isinstance(outcome, TurnRecord)]
            assert len(won) == 1
            assert all(isinstance(outcome, SessionMoved) for number, outcome in enumerate(ended) if number not in won)
            for log in logs:
                assert (await read(log)).tokens == won * count


async def test_turns_that_expect_nothing_are_all_committed(where: Where) -> None:
    async with opened(where) as one, opened(where) as two, opened(where) as three, opened(where) as four:
        logs = (one, two, three, four)
        tries = [
            log.commit(
                "a", "s", NewTurn(tokens=[number], messages=[user(str(number))], fingerprint="f", finish_reason="stop")
            )
            for number, log in enumerate(logs)
        ]
        await asyncio.gather(*tries)
        assert (await read(logs[0])).version & 0xFFFF == len(logs)  # rows


async def test_a_session_is_created_once(where: Where) -> None:
    async with opened(where) as one, opened(where) as two, opened(where) as three, opened(where) as four:
        logs = (one, two, three, four)
        for name in ("s", "t", "u"):
            tries = [log.create("a", name, messages=[user(str(number))]) for number, log in enumerate(logs)]
            ended = await asyncio.gather(*tries, return_exceptions=True)
            assert sum(isinstance(outcome, SessionExists) for outcome in ended) == 3
            (won,) = [number for number, outcome in enumerate(ended) if not isinstance(outcome, Exception)]
            assert texts(await read(logs[0], name)) == [str(won)]


async def test_a_deletion_races_with_turns(where: Where) -> None:
    async with opened(where) as one, opened(where) as two:
        for _ in range(5):
            await three_turns(one)
            version = (await read(one)).version
            late, deleted = await asyncio.gather(
                turn(one, "s", "x", "y", expect=version), two.delete("a", "s"), return_exceptions=True
            )
            assert isinstance(late, TurnRecord | SessionMoved)
            assert isinstance(deleted, int)
            assert await one.get("a", "s") is None


async def test_a_read_is_of_one_state_whatever_is_committed_meanwhile(
    where: Where, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(where) as one, opened(where) as two:
        await three_turns(one)
        read_timeline = one._timelines.read

        def meanwhile(connection: Any, row: Any) -> Any:
            monkeypatch.undo()
            asyncio.run(two.edit("a", "s", 0, "new"))  # between the session's row and those of its timeline
            return read_timeline(connection, row)

        one._timelines.forget(("a", "s"))
        monkeypatch.setattr(one._timelines, "read", meanwhile)
        record = await one.get("a", "s")
        assert record is not None
        assert text(record) == "abcdefghijkl"
        assert texts(await read(one)) == ["new"]


async def test_servers_that_start_at_once_make_the_tables_once(where: Where) -> None:
    logs = await asyncio.gather(*(asyncio.to_thread(SessionLog, where) for _ in range(4)))
    await three_turns(logs[0])
    assert text(await read(logs[3])) == "abcdefghijkl"
    for log in logs:
        await log.close()


async def test_a_database_that_was_away_is_used_again(postgres: PostgresServer) -> None:
    async with opened(postgres.new_database()) as log:
        await three_turns(log)
        before = await read(log)
        postgres.stop()
        try:
            for _ in range(3):
                with pytest.raises(LogUnavailable) as refused:
                    await turn(log, "s", "x", "y")
                assert "\n" not in refused.value.message
        finally:
            postgres.start()
        for _ in range(400):
            with suppress(LogUnavailable):
                assert await read(log) == before
                break
            await asyncio.sleep(0.05)
        await turn(log, "s", "m", "n")
        assert text(await read(log)) == "abcdefghijklmn"


async def test_a_database_that_does_not_answer_is_not_asked_by_everyone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = []

    def connect() -> None:
        tries.append(1)
        raise OperationalError("connect", {}, Exception("gone"))

    async with opened(tmp_path / "log.sqlite") as log:
        monkeypatch.setattr("server.log.database.AWAY_SECONDS", 1000.0)
        monkeypatch.setattr(log._database._engine, "connect", connect)
        for _ in range(3):
            with pytest.raises(LogUnavailable):
                await log.get("a", "s")
        assert len(tries) == 1


async def test_connections_that_were_cut_are_not_noticed(postgres: PostgresServer) -> None:
    url = postgres.new_database()
    async with opened(url) as log:
        await three_turns(log)
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(
                "select pg_terminate_backend(pid) from pg_stat_activity"
                " where datname = current_database() and pid <> pg_backend_pid()"
            )
        await turn(log, "s", "m", "n")
        assert text(await read(log)) == "abcdefghijklmn"


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("postgresql://warm:s3cret@127.0.0.1:1/log", "opened"),
        ("postgresql://warm:s3c/ret@host:port/log", "cannot be read"),
        ("postgresql://warm:s3cret@127.0.0.1:1/log?nonsense=s3cret", "opened"),
        ("postgresql://warm:s3cret@127.0.0.1:1/log?connect_timeout=s3cret", "opened"),
        ("mysql://warm:s3cret@127.0.0.1/log", "postgresql://"),
        ("s3cret", "cannot be read"),
        ("sqlite://", "path"),
        ("sqlite:///:memory:", "path"),
        ("sqlite:////no/such/folder/s3cret", "No such file"),
    ],
)
def test_a_url_that_is_none_is_refused_in_one_line_without_its_password(url: str, told: str) -> None:
    with pytest.raises(LogUnavailable, match=told) as refused:
        SessionLog(url)
    assert "s3c" not in refused.value.message
    assert "\n" not in refused.value.message


def test_a_driver_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(LogUnavailable, match=r"pip install .*\[postgres\]'"):
        SessionLog("postgresql://warm:s3cret@127.0.0.1:1/log")


def test_power_means_that_the_server_waits_for_its_disk(postgres: PostgresServer) -> None:
    url = postgres.new_database()
    name = url.partition("@/")[2].partition("?")[0]
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f"ALTER DATABASE {name} SET synchronous_commit = off".encode())
    for durability, level in (("process", "off"), ("power", "on")):
        log = SessionLog(url, durability)  # type: ignore[arg-type]
        with log._database._engine.connect() as connection:
            assert connection.exec_driver_sql("SHOW synchronous_commit").scalar() == level
        log._database.close()


async def test_a_server_whose_disk_is_full_refuses_turns_until_there_is_room(postgres: PostgresServer) -> None:
    url = postgres.new_database()

    def admin(*statements: str) -> None:
        with psycopg.connect(url, autocommit=True) as connection:
            for statement in statements:
                connection.execute(statement.encode())

    async with opened(url) as log:
        await three_turns(log)
        before = await read(log)
        admin(
            "CREATE FUNCTION full() RETURNS trigger LANGUAGE plpgsql AS"
            " $$ BEGIN RAISE EXCEPTION 'no space' USING ERRCODE = 'disk_full'; END $$",
            "CREATE TRIGGER full_turns BEFORE INSERT ON turns EXECUTE FUNCTION full()",
            "CREATE TRIGGER full_ballast BEFORE INSERT ON ballast EXECUTE FUNCTION full()",
        )
        with pytest.raises(LogFull, match="no space"):
            await turn(log, "s", "x", "y")
        assert await read(log) == before
        await log.expire(0)  # a transaction that writes nothing proves nothing
        with pytest.raises(LogFull):
            await log.writable()
        admin("DROP FUNCTION full() CASCADE")
        await log.writable()
        await turn(log, "s", "m", "n")


async def test_a_sqlite_url_names_a_file(tmp_path: Path) -> None:
    async with opened(f"sqlite:///{tmp_path}/log.sqlite") as log:
        await three_turns(log)
    async with opened(tmp_path / "log.sqlite") as log:
        assert text(await read(log)) == "abcdefghijkl"
