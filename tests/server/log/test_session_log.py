"""The durable session log: what was committed is read back exactly, whatever happens in between."""

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from log_kit import opened, read

from server.log.claims import SessionBusy
from server.log.database import LogUnavailable
from server.log.logged_message import LoggedMessage
from server.log.session_log import SessionLog
from server.log.timeline import NewTurn, common_prefix

ROOT = Path(__file__).resolve().parent.parent.parent.parent


@pytest.fixture
def where(tmp_path: Path) -> Path:
    """SQLite only."""
    return tmp_path / "log.sqlite"


async def commit(
    log: SessionLog, session: str, tokens: list[int], messages: list[LoggedMessage], tenant: str = "a"
) -> None:
    await log.commit(tenant, session, NewTurn(tokens=tokens, messages=messages, fingerprint="f1", finish_reason="stop"))


def says(*texts: str) -> list[LoggedMessage]:
    return [LoggedMessage("user", text) for text in texts]


def turns(path: Path) -> list[tuple[int, int, int]]:
    """(kept tokens, own tokens, kept messages) of every turn, straight from the file."""
    with sqlite3.connect(path) as connection:
        rows = connection.execute("select keep_tokens, length(tokens) / 4, keep_messages from turns order by number")
        found = list(rows)
    connection.close()
    return found


async def test_a_session_survives_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "log.sqlite"
    async with opened(path) as log:
        assert await log.get("a", "s") is None
        await commit(log, "s", [1, 2, 2**31 - 1], says("one\0", "żółć 🙂"))
    async with opened(path) as log:
        record = await read(log)
        assert (record.id, record.tokens, record.fingerprint) == ("s", [1, 2, 2**31 - 1], "f1")
        assert record.messages == says("one\0", "żółć 🙂")
        assert record.created > 1_600_000_000


async def test_a_turn_stores_only_the_difference(tmp_path: Path) -> None:
    path = tmp_path / "log.sqlite"
    async with opened(path) as log:
        await commit(log, "s", [1, 2, 3], says("one"))
        await commit(log, "s", [1, 2, 3, 4, 5], says("one", "two"))
        await commit(log, "s", [1, 2, 9, 9], says("edited"))  # an edit in the middle of the first turn
        await commit(log, "s", [1, 2], [])  # a rewind
        record = await read(log)
        assert (record.tokens, record.messages) == ([1, 2], [])
    assert turns(path) == [(0, 3, 0), (3, 2, 1), (2, 2, 0), (2, 0, 0)]


async def test_a_changed_record_does_not_change_the_log(log: SessionLog) -> None:
    await commit(log, "s", [1, 2], says("one"))
    record = await read(log)
    record.tokens.append(7)
    record.messages.clear()
    again = await read(log)
    assert (again.tokens, again.messages) == ([1, 2], says("one"))


async def test_another_models_record_is_returned_with_its_fingerprint(log: SessionLog) -> None:
    await commit(log, "s", [1], [])
    await log.commit("a", "s", NewTurn(tokens=[2], messages=[], fingerprint="f2", finish_reason="length"))
    record = await read(log)
    assert (record.tokens, record.fingerprint) == ([2], "f2")


async def test_tenants_do_not_see_each_other(log: SessionLog) -> None:
    await commit(log, "s", [1], says("mine"), tenant="a")
    await commit(log, "s", [2], says("yours"), tenant="b")
    mine, yours = await log.get("a", "s"), await log.get("b", "s")
    assert mine is not None
    assert yours is not None
    assert (mine.tokens, yours.tokens) == ([1], [2])
    assert await log.get("c", "s") is None
    with log.claim("a", "s"), log.claim("b", "s"):
        pass


async def test_one_claim_at_a_time(log: SessionLog) -> None:
    with log.claim("a", "s"):
        with pytest.raises(SessionBusy), log.claim("a", "s"):
            pass
        with log.claim("a", "other"):
            pass
    with log.claim("a", "s"):  # free again, also after the refusal in between
        pass


@pytest.mark.wide
async def test_thousands_of_turns_write_their_own_tokens_only(tmp_path: Path) -> None:
    path = tmp_path / "log.sqlite"
    tokens: list[int] = []
    messages: list[LoggedMessage] = []
    async with opened(path) as log:
        for turn in range(1000):
            tokens.extend(range(turn, turn + 20))
            messages.extend(says(f"turn {turn}"))
            await commit(log, "s", tokens, messages)
    async with opened(path) as log:
        record = await read(log)
        assert (record.tokens, record.messages) == (tokens, messages)
    assert {own for _, own, _ in turns(path)} == {20}
    assert path.stat().st_size < 1000 * 500  # the whole timeline per turn would be 40 MB


async def test_a_session_that_is_no_longer_remembered_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.log.timeline_cache.REMEMBERED", 2)
    async with opened(tmp_path / "log.sqlite") as log:
        for session in ("a", "b", "c", "d"):
            await commit(log, session, [1, 2, ord(session)], says(session))
            assert len(log._timelines._timelines) <= 2
        for session in ("a", "b", "c", "d"):
            await commit(log, session, [1, 2, ord(session), 4], says(session))
            record = await read(log, session)
            assert record.tokens == [1, 2, ord(session), 4]
    assert sorted(set(turns(tmp_path / "log.sqlite"))) == [(0, 3, 0), (3, 1, 1)]


WRITER = """
import asyncio, sys
from pathlib import Path
from server.log.logged_message import LoggedMessage
from server.log.session_log import SessionLog
from server.log.timeline import NewTurn

async def main():
    log = SessionLog(Path(sys.argv[1]))
    for turn in range(1, 10_000):
        tokens = list(range(turn * 3))
        messages = [LoggedMessage("user", str(n)) for n in range(turn)]
        await log.commit("a", "s", NewTurn(tokens, messages, "f", "stop"))
        print(turn, flush=True)

asyncio.run(main())
"""


async def test_kill_9_loses_nothing_that_was_committed(tmp_path: Path) -> None:
    path = tmp_path / "log.sqlite"
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, cwd=ROOT)
    assert writer.stdout is not None
    for _ in range(40):
        writer.stdout.readline()
    os.kill(writer.pid, signal.SIGKILL)
    rest = writer.stdout.read().split()
    committed = int(rest[-1]) if rest else 40
    writer.wait()
    writer.stdout.close()
    async with opened(path) as log:
        record = await read(log)
        turn = len(record.messages)
        assert turn in (committed, committed + 1)  # the last one may have been committed but not yet reported
        assert record.tokens == list(range(turn * 3))


async def test_a_client_that_leaves_does_not_cut_a_commit(log: SessionLog) -> None:
    task = asyncio.create_task(commit(log, "s", [1, 2], says("one")))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    record = await read(log)
    assert record.tokens == [1, 2]


def test_what_is_not_a_log_is_refused_in_words_without_its_path(tmp_path: Path) -> None:
    path = tmp_path / "log.sqlite"
    path.write_bytes(b"this is not a database" * 100)
    with pytest.raises(LogUnavailable, match="not a database") as refusal:
        SessionLog(path)
    assert str(tmp_path) not in refusal.value.message


def test_a_log_of_another_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "log.sqlite"
    asyncio.run(SessionLog(path).close())
    connection = sqlite3.connect(path)
    connection.execute("update log_format set version = 99")
    connection.commit()
    connection.close()
    with pytest.raises(LogUnavailable, match="format 99"):
        SessionLog(path)


def test_another_programs_database_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "log.sqlite"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("create table sessions (data text)")
    with pytest.raises(LogUnavailable, match="a table sessions of another program"):
        SessionLog(path)
    with closing(sqlite3.connect(path)) as connection:
        tables = connection.execute("select name from sqlite_master where type = 'table'").fetchall()
    assert tables == [("sessions",)]


async def test_the_log_is_readable_by_its_owner_only(tmp_path: Path, log: SessionLog) -> None:
    await commit(log, "s", [1], says("secret"))
    files = list(tmp_path.iterdir())
    assert {file.name for file in files} >= {"log.sqlite", "log.sqlite-wal"}
    assert all(file.stat().st_mode & 0o077 == 0 for file in files)


def test_common_prefix() -> None:
    assert common_prefix([], [1]) == 0
    assert common_prefix([1, 2, 3], [1, 2, 3, 4]) == 3
    for length in (1, 2, 7, 64):
        for differs_at in range(length):
            old = list(range(length))
            new = list(range(length))
            new[differs_at] = -1
            assert common_prefix(old, new) == differs_at
