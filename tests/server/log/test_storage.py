"""The file under the log: its formats, damage to it, a disk that is full, what is left of what was deleted."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sql
from log_kit import as_format_4, opened, read, sqlite, text, three_turns, turn, user, with_log

from server.log.database import Durability, LogDamaged, LogFull, LogUnavailable
from server.log.session_log import SessionLog
from server.log.tables import FORMAT
from server.log.upgrade import upgrade


@pytest.fixture
def where(tmp_path: Path) -> Path:
    """SQLite only."""
    return tmp_path / "log.sqlite"


@pytest.mark.parametrize("version", [1, 3])
def test_a_log_of_a_format_that_is_too_old_is_refused(tmp_path: Path, version: int) -> None:
    path = tmp_path / "log.sqlite"
    with_log(path, three_turns)
    sqlite(path, "DROP TABLE responses", f"UPDATE log_format SET version = {version}")
    before = path.read_bytes()
    with pytest.raises(LogUnavailable, match=f"has format {version}.*reads formats 4 to {FORMAT}") as refused:
        SessionLog(path)
    assert not isinstance(refused.value, LogDamaged)
    assert [other.name for other in tmp_path.glob("*damaged*")] == []
    assert path.read_bytes()[100:] == before[100:]  # SQLite marks in its header how it was opened


def test_an_upgraded_log_has_the_tables_of_a_new_one(tmp_path: Path) -> None:
    with_log(tmp_path / "old", three_turns)
    as_format_4(tmp_path / "old")
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
    with_log(path, three_turns)
    as_format_4(path)
    before = sqlite(path, "SELECT sql FROM sqlite_master ORDER BY name")

    def failing(connection: sql.Connection) -> None:
        upgrade(connection)
        connection.exec_driver_sql("nonsense")

    with monkeypatch.context() as patch:
        patch.setattr("server.log.upgrade.upgrade", failing)
        with pytest.raises(LogUnavailable):
            SessionLog(path)
    assert sqlite(path, "SELECT sql FROM sqlite_master ORDER BY name") == before
    with_log(path, lambda log: read(log))


async def test_a_log_that_lacks_more_than_its_format_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "log.sqlite"
    async with opened(path) as log:
        await three_turns(log)
    as_format_4(path)
    sqlite(path, "DROP TABLE responses")
    async with opened(path) as log:
        assert log.salvage is not None
        assert text(await read(log)) == "abcdefghijkl"


async def test_other_troubles_than_want_of_storage_do_not_end_it(log: SessionLog) -> None:
    log._database.full = True
    with pytest.raises(LogUnavailable):  # as a heartbeat that meets another server's lock
        log._database.write(lambda connection: connection.exec_driver_sql("SELECT * FROM nothing"))
    assert log._database.full
    await log.writable()
    assert not log._database.full


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
async def test_a_row_that_is_not_what_was_written_is_noticed(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "log.sqlite"

    async def turn_of_another(log: SessionLog) -> Any:
        await turn(log, "new", "x", "y")
        return await read(log, "new")

    async with opened(path) as log:
        await three_turns(log)
        await log.create("a", "other", messages=[user("x")])
        await turn(log, "other", "y", "z")
    sqlite(path, damage)
    async with opened(path) as log:
        tenant = "b" if "tenant" in damage else "a"
        session = "t" if "session =" in damage else "s"
        for _ in range(2):  # also not the second time, from memory
            with pytest.raises(LogDamaged):
                await log.get(tenant, session)
            with pytest.raises(LogDamaged):
                await turn(log, session, "x", "y", tenant)
        assert text(await turn_of_another(log)) == "xy"


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
async def test_a_full_disk_refuses_turns_until_there_is_room(tmp_path: Path, trouble: Any) -> None:
    async with opened(tmp_path / "log.sqlite") as log:
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
    async with opened(tmp_path / "log.sqlite") as log:
        assert len((await read(log)).turns) == 4


async def test_a_log_that_can_be_written_is_not_tried(log: SessionLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log._database, "write", None)
    await log.writable()


async def test_a_commit_that_fails_at_its_end_is_not_remembered(log: SessionLog) -> None:
    await three_turns(log)
    before = await read(log)
    with writes_fail(log), pytest.raises(LogFull):
        await turn(log, "s", "m", "n")  # small: it fails when the transaction is written out
    assert await read(log) == before
    await turn(log, "s", "o", "p")
    assert text(await read(log)) == "abcdefghijklop"


async def test_a_commit_that_failed_is_not_taken_for_another_servers(tmp_path: Path) -> None:
    async with opened(tmp_path / "log.sqlite") as one, opened(tmp_path / "log.sqlite") as two:
        await three_turns(one)
        with writes_fail(one), pytest.raises(LogFull):
            await turn(one, "s", "m", "n")
        await turn(two, "s", "o", "p")  # has the number that the other one would have had
        assert text(await read(one)) == "abcdefghijklop"


async def test_a_database_that_was_set_back_is_read_anew(tmp_path: Path, log: SessionLog) -> None:
    await three_turns(log)
    sqlite(
        tmp_path / "log.sqlite",
        "DELETE FROM turns WHERE number = 3",
        "UPDATE sessions SET rows = 2, turns = 2, tokens = 8, messages = 4",
    )
    assert text(await read(log)) == "abcdefgh"


@pytest.mark.parametrize("how", ["delete", "expire"])
async def test_the_text_of_a_deleted_session_leaves_the_files(tmp_path: Path, how: str, log: SessionLog) -> None:
    secret = "the secret " * 2000

    def found() -> list[str]:
        return [path.name for path in tmp_path.iterdir() if b"the secret" in path.read_bytes()]

    await log.create("a", "s", messages=[user(secret)], ttl=10)
    await turn(log, "s", "a", secret)
    assert found() != []
    if how == "delete":
        await log.delete("a", "s")
    else:
        assert await log.expire(2**33) == [("a", "s")]
    assert found() == []


async def test_timelines_in_memory_are_bounded_by_their_size(log: SessionLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.log.timeline_cache.REMEMBERED_BYTES", 10_000)
    cached = log._timelines._timelines
    for number in range(20):
        await turn(log, f"s{number}", "a", "b" * 500)  # about 2.5 kB
        assert len(cached) <= 4
    await turn(log, "large", "a", "b" * 10_000)
    await read(log, "large")
    assert [*cached] == [("a", "large")]
    for number in range(20):
        assert text(await read(log, f"s{number}")) == "a" + "b" * 500


async def test_what_is_in_memory_is_not_read_again(tmp_path: Path, log: SessionLog) -> None:
    await three_turns(log)
    sqlite(tmp_path / "log.sqlite", "UPDATE turns SET checksum = x''")
    assert text(await read(log)) == "abcdefghijkl"
