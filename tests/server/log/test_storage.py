"""The file under the log: its formats, damage to it, a disk that is full, what is left of what was deleted."""

from __future__ import annotations

import json
import resource
import sqlite3
from array import array
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from log_kit import assistant, read, text, texts, three_turns, turn, user, with_log, with_logs

from server.log.database import Durability, LogDamaged, LogFull, LogUnavailable
from server.log.session_log import SessionLog
from server.log.tables import FORMAT
from server.log.timeline import drop_reply

FORMAT_1 = """
CREATE TABLE log_format (version INTEGER NOT NULL);
INSERT INTO log_format VALUES (1);
CREATE TABLE sessions (
    id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, tenant VARCHAR(128) NOT NULL, session VARCHAR(128) NOT NULL,
    created BIGINT NOT NULL, UNIQUE (tenant, session)
);
CREATE TABLE turns (
    session_id INTEGER NOT NULL, number INTEGER NOT NULL, keep_tokens INTEGER NOT NULL, tokens BLOB NOT NULL,
    keep_messages INTEGER NOT NULL, messages TEXT NOT NULL, fingerprint VARCHAR(128) NOT NULL,
    finish_reason VARCHAR(32) NOT NULL, created BIGINT NOT NULL, PRIMARY KEY (session_id, number),
    FOREIGN KEY(session_id) REFERENCES sessions (id)
);
"""


def sqlite(path: Path, *statements: str) -> list[Any]:
    """Run statements on a log from outside; the rows of the last one."""
    rows: list[Any] = []
    with closing(sqlite3.connect(path)) as connection:
        for statement in statements:
            rows = connection.execute(statement).fetchall()
        connection.commit()
    return rows


def old_row(number: int, keep: int, ids: str, keep_messages: int, *messages: Any) -> tuple[Any, ...]:
    """A row of format 1."""
    own = array("i", map(ord, ids)).tobytes()
    return (1, number, keep, own, keep_messages, json.dumps(messages), "f1", "stop", 1_700_000_000 + number)


def make_format_1(path: Path) -> None:
    """A session of two turns, the first one edited afterwards, and one without any."""
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(FORMAT_1)
        connection.execute("INSERT INTO sessions VALUES (1, 'a', 's', 1700000000), (2, 'a', 'empty', 1700000000)")
        rows = [
            old_row(1, 0, "abcd", 0, user("a"), assistant("bcd")),
            old_row(2, 4, "efgh", 2, user("e"), assistant("fgh")),
            old_row(3, 1, "XY", 1, assistant("X"), user("Y"), assistant("")),
            old_row(4, 3, "ij", 4, user("i"), assistant("j")),
        ]
        connection.executemany("INSERT INTO turns VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", rows)
        connection.commit()


def test_a_log_of_format_1_is_brought_up_to_date(tmp_path: Path) -> None:
    path = tmp_path / "log.sqlite"
    make_format_1(path)

    async def scenario(log: SessionLog) -> None:
        record = await read(log)
        assert text(record) == "aXYij"
        assert texts(record) == ["a", "X", "Y", "", "i", "j"]
        assert [(t.tokens, t.messages, t.created) for t in record.turns] == [
            (3, 4, 1_700_000_003),
            (5, 6, 1_700_000_004),
        ]
        assert (record.created, record.used, record.fingerprint) == (1_700_000_000, 1_700_000_004, "f1")
        again = drop_reply(record)  # where the reply begins is not known: its question is rendered again
        assert (text(again), texts(again)[again.rendered :]) == ("aXY", ["i"])
        assert (await log.list("a", limit=1)).items == [record.summary]
        assert (await read(log, "empty")).turns == ()
        await turn(log, "s", "m", "n")
        await turn(log, "empty", "m", "n")
        await log.rewind("a", "s", turn=1)
        assert text(await read(log)) == "aXY"

    with_log(path, scenario)
    assert sqlite(path, "SELECT version FROM log_format") == [(FORMAT,)]

    async def again(log: SessionLog) -> None:
        assert text(await read(log)) == "aXY"

    with_log(path, again)


def test_a_log_of_format_2_gives_its_tombstones_to_the_server_that_opens_it(tmp_path: Path) -> None:
    path = tmp_path / "log.sqlite"
    with_log(path, three_turns)
    sqlite(
        path,
        "DROP TABLE tombstones",
        "DROP TABLE servers",
        "CREATE TABLE tombstones (tenant VARCHAR(128), session VARCHAR(128), PRIMARY KEY (tenant, session))",
        "INSERT INTO tombstones VALUES ('a', 'gone')",
        "UPDATE log_format SET version = 2",
    )
    strangers: list[int] = []
    for server, there in (("one", [("a", "gone")]), ("two", [])):
        log = SessionLog(path, server=server, stranger=lambda: strangers.append(1))
        assert [*log._servers.tombstones()] == there
        assert len(strangers) == (server == "two")
        log._database.close()


def test_an_upgraded_log_has_the_tables_of_a_new_one(tmp_path: Path) -> None:
    make_format_1(tmp_path / "old")
    shapes = []
    for name in ("old", "new"):
        with_log(tmp_path / name, three_turns)
        shapes.append(
            {
                (table, *column[1:])
                for (table,) in sqlite(tmp_path / name, "SELECT name FROM sqlite_master WHERE type = 'table'")
                for column in sqlite(tmp_path / name, f"PRAGMA table_info({table})")
            }
            | {*sqlite(tmp_path / name, "SELECT name FROM sqlite_master WHERE type = 'index'")}
        )
    assert shapes[0] == shapes[1]


def test_an_upgrade_that_fails_leaves_the_old_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "log.sqlite"
    make_format_1(path)
    before = sqlite(path, "SELECT sql FROM sqlite_master ORDER BY name")
    with monkeypatch.context() as patch:
        patch.setattr("server.log.upgrade.columns_of", lambda *_: {"nonsense": 1})
        with pytest.raises(LogUnavailable):
            SessionLog(path)
    assert sqlite(path, "SELECT sql FROM sqlite_master ORDER BY name") == before
    with_log(path, lambda log: read(log))


def test_other_troubles_than_want_of_storage_do_not_end_it(tmp_path: Path) -> None:
    async def scenario(log: SessionLog) -> None:
        log._database.full = True
        with pytest.raises(LogUnavailable):  # as a heartbeat that meets another server's lock
            log._database.write(lambda connection: connection.exec_driver_sql("SELECT * FROM nothing"))
        assert log._database.full
        await log.writable()
        assert not log._database.full

    with_log(tmp_path / "log.sqlite", scenario)


def test_a_log_of_a_later_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "log.sqlite"
    with_log(path, three_turns)
    sqlite(path, f"UPDATE log_format SET version = {FORMAT + 1}")
    with pytest.raises(LogUnavailable, match=f"format {FORMAT + 1}"):
        SessionLog(path)
    sqlite(path, "UPDATE log_format SET version = 3")
    with_log(path, lambda log: read(log))


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE turns SET tokens = x'00000000' || substr(tokens, 5) WHERE number = 2",
        "UPDATE turns SET tokens = substr(tokens, 5) WHERE number = 3",
        "UPDATE turns SET messages = replace(messages, 'fgh', 'fgx')",
        "UPDATE turns SET keep_tokens = 3 WHERE number = 2",
        "UPDATE turns SET prompt_tokens = 6 WHERE number = 2",
        "UPDATE turns SET number = 4 WHERE number = 3",
        "UPDATE turns SET checksum = x'' WHERE number = 1",
        "UPDATE turns SET session_id = 2 WHERE number = 3",
        "UPDATE turns SET tokens = CAST(substr(tokens, 5) AS BLOB), keep_tokens = 5 WHERE number = 2",
        "DELETE FROM turns WHERE number = 3",
        "DELETE FROM turns WHERE number = 1",
        "UPDATE sessions SET rows = 2",
        "UPDATE sessions SET session = 't' WHERE session = 's'",
        "UPDATE sessions SET tenant = 'b'",
    ],
)
def test_a_row_that_is_not_what_was_written_is_noticed(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "log.sqlite"

    async def write(log: SessionLog) -> None:
        await three_turns(log)
        await log.create("a", "other", messages=[user("x")])
        await turn(log, "other", "y", "z")

    async def look(log: SessionLog) -> None:
        tenant = "b" if "tenant" in damage else "a"
        session = "t" if "session =" in damage else "s"
        for _ in range(2):  # also not the second time, from memory
            with pytest.raises(LogDamaged):
                await log.get(tenant, session)
            with pytest.raises(LogDamaged):
                await turn(log, session, "x", "y", tenant)
        assert text(await turn_of_another(log)) == "xy"

    async def turn_of_another(log: SessionLog) -> Any:
        await turn(log, "new", "x", "y")
        return await read(log, "new")

    with_log(path, write)
    sqlite(path, damage)
    with_log(path, look)


@pytest.mark.parametrize(("durability", "level"), [("process", 1), ("power", 2)])
def test_power_means_that_a_commit_is_on_the_disk(tmp_path: Path, durability: Durability, level: int) -> None:
    log = SessionLog(tmp_path / "log.sqlite", durability)
    with log._database._engine.connect() as connection:
        assert connection.exec_driver_sql("PRAGMA synchronous").scalar() == level
        assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"
    log._database.close()


@contextmanager
def pages_run_out(log: SessionLog) -> Iterator[None]:
    """SQLite may not make its file larger: what it tells of a full disk."""
    with closing(log._database._engine.raw_connection()) as connection:
        cursor = connection.cursor()
        pages = cursor.execute("PRAGMA page_count").fetchone()[0]
        cursor.execute(f"PRAGMA max_page_count = {pages}")
    yield
    with closing(log._database._engine.raw_connection()) as connection:
        connection.cursor().execute("PRAGMA max_page_count = 1000000")


@contextmanager
def writes_fail(log: SessionLog) -> Iterator[None]:
    """The kernel refuses to make any file longer than the write-ahead log is."""
    (wal,) = Path(log._database._engine.url.database or "").parent.glob("*-wal")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (wal.stat().st_size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("trouble", [pages_run_out, writes_fail])
def test_a_full_disk_refuses_turns_until_there_is_room(tmp_path: Path, trouble: Any) -> None:
    async def scenario(log: SessionLog) -> None:
        await three_turns(log)
        before = await read(log)
        await log.writable()
        with trouble(log):
            for verb in (
                lambda: turn(log, "s", "m", "n" * 50_000),
                lambda: turn(log, "new", "m", "n" * 50_000),
                lambda: log.create("a", "new", messages=[user("x" * 200_000)]),
                lambda: log.edit("a", "s", 5, "x" * 200_000),
            ):
                with pytest.raises(LogFull) as refused:
                    await verb()
                assert str(tmp_path) not in refused.value.message
                assert await read(log) == before
                assert await log.get("a", "new") is None
            with pytest.raises(LogFull):
                await log.writable()
        await log.writable()
        assert not log._database.full  # from here on nothing is tried
        await turn(log, "s", "m", "n" * 50_000)
        assert text(await read(log)) == "abcdefghijklm" + "n" * 50_000
        assert sqlite(tmp_path / "log.sqlite", "SELECT * FROM ballast") == []

    with_log(tmp_path / "log.sqlite", scenario)

    async def again(log: SessionLog) -> None:
        assert len((await read(log)).turns) == 4

    with_log(tmp_path / "log.sqlite", again)


def test_a_log_that_can_be_written_is_not_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(log: SessionLog) -> None:
        monkeypatch.setattr(log._database, "write", None)
        await log.writable()

    with_log(tmp_path / "log.sqlite", scenario)


def test_a_commit_that_fails_at_its_end_is_not_remembered(tmp_path: Path) -> None:
    async def scenario(log: SessionLog) -> None:
        await three_turns(log)
        before = await read(log)
        with writes_fail(log), pytest.raises(LogFull):
            await turn(log, "s", "m", "n")  # small: it fails when the transaction is written out
        assert await read(log) == before
        await turn(log, "s", "o", "p")
        assert text(await read(log)) == "abcdefghijklop"

    with_log(tmp_path / "log.sqlite", scenario)


def test_a_commit_that_failed_is_not_taken_for_another_servers(tmp_path: Path) -> None:
    async def scenario(one: SessionLog, two: SessionLog) -> None:
        await three_turns(one)
        with writes_fail(one), pytest.raises(LogFull):
            await turn(one, "s", "m", "n")
        await turn(two, "s", "o", "p")  # has the number that the other one would have had
        assert text(await read(one)) == "abcdefghijklop"

    with_logs(tmp_path / "log.sqlite", 2, scenario)


def test_a_database_that_was_set_back_is_read_anew(tmp_path: Path) -> None:
    async def scenario(log: SessionLog) -> None:
        await three_turns(log)
        sqlite(
            tmp_path / "log.sqlite",
            "DELETE FROM turns WHERE number = 3",
            "UPDATE sessions SET rows = 2, turns = 2, tokens = 8, messages = 4",
        )
        assert text(await read(log)) == "abcdefgh"

    with_log(tmp_path / "log.sqlite", scenario)


@pytest.mark.parametrize("how", ["delete", "expire"])
def test_the_text_of_a_deleted_session_leaves_the_files(tmp_path: Path, how: str) -> None:
    secret = "the secret " * 2000

    async def scenario(log: SessionLog) -> None:
        await log.create("a", "s", messages=[user(secret)], ttl=10)
        await turn(log, "s", "a", secret)
        assert found() != []
        if how == "delete":
            await log.delete("a", "s")
        else:
            assert await log.expire(2**33) == [("a", "s")]
        assert found() == []

    def found() -> list[str]:
        return [path.name for path in tmp_path.iterdir() if b"the secret" in path.read_bytes()]

    with_log(tmp_path / "log.sqlite", scenario)


def test_timelines_in_memory_are_bounded_by_their_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.log.timeline_cache.REMEMBERED_BYTES", 10_000)

    async def scenario(log: SessionLog) -> None:
        folds = log._ledger._folds._folds
        for number in range(20):
            await turn(log, f"s{number}", "a", "b" * 500)  # about 2.5 kB
            assert len(folds) <= 4
        await turn(log, "large", "a", "b" * 10_000)
        await read(log, "large")
        assert [*folds] == [("a", "large")]
        for number in range(20):
            assert text(await read(log, f"s{number}")) == "a" + "b" * 500

    with_log(tmp_path / "log.sqlite", scenario)


def test_what_is_in_memory_is_not_read_again(tmp_path: Path) -> None:
    async def scenario(log: SessionLog) -> None:
        await three_turns(log)
        sqlite(tmp_path / "log.sqlite", "UPDATE turns SET checksum = x''")
        assert text(await read(log)) == "abcdefghijkl"

    with_log(tmp_path / "log.sqlite", scenario)
