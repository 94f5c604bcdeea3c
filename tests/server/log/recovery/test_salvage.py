"""A log whose file is damaged: noticed, set aside, and salvaged as far as it can be."""

from __future__ import annotations

import errno
import logging
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from log_kit import opened, read, text, texts, three_turns, turn, user, with_log
from prometheus_client import generate_latest

from server.log.database import LogUnavailable, SessionDamaged
from server.log.recovery import mending, salvage, wal
from server.log.retries import Idempotency
from server.log.session_log import SessionLog
from server.log.tables import FORMAT, ballast
from server.telemetry.metrics import Metrics

PAGE = 4096


async def fill(log: SessionLog) -> None:
    """Sessions of every kind, on more pages than one, and one that was deleted."""
    await three_turns(log)
    await log.rewind("a", "s", turn=2)
    for number in range(4):
        await turn(log, f"long{number}", "a", "b" * 1500)
        await turn(log, f"long{number}", "c", "d" * 1500)
    await log.create("b", "facts", messages=[user("x")], metadata={"k": "v"}, ttl=10**6, pinned_until=2**31)
    await log.fork("a", "s", "fork", turn=1)
    await turn(log, "keyed", "a", "b", idempotency=Idempotency("key", "h"))
    await turn(log, "gone", "a", "secret")
    await log.delete("a", "gone")
    for number in range(3):  # not in the file yet
        await turn(log, f"long{number}", "e", "f" * 100)


async def folder_of(tmp_path: Path, killed: bool = False) -> Path:
    """A folder with such a log, closed or as kill -9 leaves it."""
    path = tmp_path / "pristine" / "log.sqlite"
    path.parent.mkdir()
    async with opened(path) as log:
        await fill(log)
        if killed:
            shutil.copytree(path.parent, tmp_path / "killed")
    return tmp_path / "killed" if killed else path.parent


NAMES = [("a", f"long{n}") for n in range(4)] + [("a", "s"), ("a", "fork"), ("a", "keyed"), ("b", "facts")]


async def told(log: SessionLog) -> dict[str, object]:
    """What the log tells of every session, without what other states of the log have too."""
    found: dict[str, object] = {}
    for tenant, name in NAMES:
        try:
            record = await log.get(tenant, name)
        except SessionDamaged:
            found[name] = "refused"
            continue
        if record is not None:
            found[name] = (record.tokens, record.messages, record.turns, record.metadata, record.version)
    assert await log.get("a", "gone") is None
    return found


async def reopened(path: Path) -> tuple[dict[str, object], SessionLog]:
    async with opened(path) as log:
        return await told(log), log


def pages(path: Path) -> range:
    return range(-(-path.stat().st_size // PAGE))


def zero(path: Path, page: int) -> None:
    with path.open("r+b") as file:
        file.seek(page * PAGE)
        file.write(bytes(PAGE))


EVERY = pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.slow)])  # cases, of all that there are


@EVERY
async def test_whatever_page_is_lost_no_session_is_wrong_or_shorter(tmp_path: Path, every: int) -> None:
    source = await folder_of(tmp_path)
    truth, log = await reopened(source / "log.sqlite")
    assert (log.salvage, log.older) == (None, False)
    assert len(truth) == len(NAMES)
    refused, missing = set(), set()
    for page in list(pages(source / "log.sqlite"))[::every]:
        folder = tmp_path / f"page{page}"
        shutil.copytree(source, folder)
        zero(folder / "log.sqlite", page)
        damaged = (folder / "log.sqlite").read_bytes()
        found, log = await reopened(folder / "log.sqlite")
        if log.salvage is None:  # part of a long row, which has a checksum, or of the search index, which is made anew
            assert [found[name] for name in truth if found[name] != truth[name]] in (["refused"], []), page
            continue
        assert (folder / log.salvage.aside).read_bytes() == damaged
        for name, state in found.items():
            assert state in (truth[name], "refused"), (page, name)
            refused |= {name} if state == "refused" else set()
        lost = truth.keys() - found.keys()
        missing |= lost
        assert len(lost) <= log.salvage.nameless, page
        counts = [*found.values()].count("refused"), len(found) - [*found.values()].count("refused")
        assert counts == (log.salvage.refused, log.salvage.whole)
        again, log = await reopened(folder / "log.sqlite")  # a log like any other
        assert again == found
        assert (log.salvage, log.older) == (None, False)
    assert refused
    assert not missing  # what the table has lost, its index knows


async def test_a_session_that_is_refused_can_be_listed_and_deleted_and_begins_anew(tmp_path: Path) -> None:
    path = (await folder_of(tmp_path)) / "log.sqlite"
    with closing(sqlite3.connect(path)) as connection:
        (page,) = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = 'turns'").fetchone()
    zero(path, page - 1)  # interior: still every row is found
    found, _ = await reopened(path)
    assert "refused" not in found.values()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("DELETE FROM turns WHERE number = 2 AND session_id = 2")
        connection.commit()
    async with opened(path) as log:
        (name,) = [name for name, state in (await told(log)).items() if state == "refused"]
        for verb in (
            lambda: turn(log, name, "x", "y"),
            lambda: log.rewind("a", name, turn=1),
            lambda: log.fork("a", name, "new"),
            lambda: log.rows("a", name),
        ):
            with pytest.raises(SessionDamaged):
                await verb()
        assert name in {item.id for item in (await log.page("a", limit=50)).items}
        assert await log.delete("a", name)
        await turn(log, name, "x", "y")
        assert text(await read(log, name)) == "xy"


async def test_what_else_a_session_has_is_salvaged_too(tmp_path: Path) -> None:
    path = (await folder_of(tmp_path)) / "log.sqlite"
    truth, _ = await reopened(path)
    zero(path, 0)  # the schema, and where every table begins
    async with opened(path) as log:
        assert log.salvage is not None
        assert (log.salvage.whole, log.salvage.refused) == (len(NAMES), 0)
        assert await told(log) == truth
        replayed = await log.replay("a", "keyed", "key")
        assert replayed is not None
        assert (replayed.request_hash, replayed.reply.content) == ("h", "b")
        assert [*await log.tombstones()] == [("a", "gone")]
        assert await log.find_pinned(0.0) == [("b", "facts", 2**31)]


async def test_a_deleted_session_does_not_come_back(tmp_path: Path) -> None:
    """Also where the page of the table is an old one: the tombstone is newer."""
    folder = tmp_path / "data"
    folder.mkdir()
    path = folder / "log.sqlite"
    async with opened(path) as log:
        await turn(log, "gone", "a", "secret")
        await turn(log, "kept", "a", "b")
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        log._database.wipe = lambda: None  # type: ignore[method-assign]
        await log.delete("a", "gone")
        shutil.copytree(folder, tmp_path / "killed")
    with closing(sqlite3.connect(path)) as connection:
        (stones,) = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = 'tombstones'").fetchone()
    wal = tmp_path / "killed" / "log.sqlite-wal"
    data = bytearray(wal.read_bytes())
    for at in range(32, len(data), 24 + PAGE):  # of the deletion only the tombstone is left
        if int.from_bytes(data[at : at + 4], "big") != stones:
            data[at + 100] ^= 1
    wal.write_bytes(data)
    async with opened(tmp_path / "killed" / "log.sqlite") as log:
        assert log.salvage is not None
        with pytest.raises(SessionDamaged):
            await log.get("a", "gone")
        assert text(await read(log, "kept")) == "ab"
    assert b"secret" not in (tmp_path / "killed" / "log.sqlite").read_bytes()


# --- the write-ahead log ------------------------------------------------------------------------------------


def frames_of(wal: Path) -> range:
    return range(32, wal.stat().st_size, 24 + PAGE)


def cut(folder: Path, frames: int) -> None:
    with (folder / "log.sqlite-wal").open("r+b") as file:
        file.truncate(32 + frames * (24 + PAGE))


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@EVERY
async def test_a_damaged_frame_does_not_take_along_what_follows(tmp_path: Path, every: int) -> None:
    source = await folder_of(tmp_path, killed=True)
    truth, log = await reopened(shutil.copytree(source, tmp_path / "whole") / "log.sqlite")
    assert log.salvage is None
    frames = frames_of(source / "log.sqlite-wal")
    for number, at in enumerate(frames):
        step = 1 if at == frames[-1] else every
        for offset in (3, 12, 20, 24 + 1000)[number % step :: step]:  # its page, salt, checksum, what it holds
            folder = tmp_path / f"{number}-{offset}"
            shutil.copytree(source, folder)
            flip(folder / "log.sqlite-wal", at + offset)
            if offset == 12:  # nothing beside it tells that it was committed
                (folder / "log.sqlite-shm").unlink()
            found, log = await reopened(folder / "log.sqlite")
            shutil.rmtree(folder)
            if log.salvage is None:  # as if it had not been written out
                assert (number, offset) == (len(frames) - 1, 12)
                continue
            assert {*found} == {*truth}
            for name, state in found.items():
                assert state in (truth[name], "refused"), (number, offset)


@pytest.mark.parametrize("frames", [-1, 0, 1, 3])
async def test_a_log_whose_end_is_missing_says_so(
    tmp_path: Path, frames: int, caplog: pytest.LogCaptureFixture
) -> None:
    folder = await folder_of(tmp_path, killed=True)
    if frames < 0:
        (folder / "log.sqlite-wal").unlink()
    else:
        cut(folder, frames)
    _, log = await reopened(folder / "log.sqlite")
    assert log.salvage is not None
    assert log.salvage.torn
    assert "what was written last may be missing" in caplog.text
    assert str(tmp_path) not in caplog.text


async def test_a_turn_that_was_not_written_out_is_no_damage(tmp_path: Path) -> None:
    folder = await folder_of(tmp_path, killed=True)
    truth, _ = await reopened(shutil.copytree(folder, tmp_path / "whole") / "log.sqlite")
    with (folder / "log.sqlite-wal").open("r+b") as file:
        data = file.read()
        last = data[-24 - PAGE :]
        file.write(last[:4] + bytes(4) + last[8:] + last[:100])  # a frame that is none, and part of one
    found, log = await reopened(folder / "log.sqlite")
    assert (found, log.salvage) == (truth, None)


@pytest.mark.parametrize(("one", "two"), [("", "-wal"), ("-wal", "-shm"), ("", "-shm"), ("", "-starts")])
async def test_files_that_changed_places_are_told_by_what_they_hold(tmp_path: Path, one: str, two: str) -> None:
    folder = await folder_of(tmp_path, killed=True)
    truth, _ = await reopened(shutil.copytree(folder, tmp_path / "whole") / "log.sqlite")
    path = folder / "log.sqlite"
    first, second = Path(f"{path}{one}"), Path(f"{path}{two}")
    first.rename(spare := folder / "spare")
    second.rename(first)
    spare.rename(second)
    found, log = await reopened(path)
    assert log.salvage is not None
    assert found == truth


async def test_an_older_log_is_noticed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    path = folder / "log.sqlite"
    async with opened(path) as log:
        await three_turns(log)
    older = path.read_bytes()
    async with opened(path) as log:
        await turn(log, "s", "m", "n")
    assert not caplog.records
    for content in (older, b""):
        path.write_bytes(content)
        _, log = await reopened(path)
        assert (log.older, log.salvage) == (True, None)
        _, log = await reopened(path)
        assert not log.older  # said once
        async with opened(path) as log:
            await three_turns(log)
    assert len(caplog.records) == 2
    assert b"warmturn_log_rollbacks_total 1.0" in page_of(None, True)


# --- refused --------------------------------------------------------------------------------------------------


def test_a_file_of_another_program_is_left_where_it_is(tmp_path: Path) -> None:
    path = tmp_path / "log.sqlite"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE notes (text)")
        connection.executemany("INSERT INTO notes VALUES (?)", [("note " * 500,)] * 50)
        connection.commit()
    zero(path, 3)  # damaged, too
    for content in (path.read_bytes(), b"Dear diary, " * 1000):
        path.write_bytes(content)
        with pytest.raises(LogUnavailable, match="not") as refused:
            SessionLog(path)
        assert str(tmp_path) not in refused.value.message
        assert [*tmp_path.iterdir()] == [path]
        assert path.read_bytes()[100:] == content[100:]  # SQLite marks in its header how it was opened


@pytest.mark.parametrize("version", [1, FORMAT + 1])
def test_a_damaged_log_of_another_version_is_left_where_it_is(tmp_path: Path, version: int) -> None:
    path = tmp_path / "log.sqlite"
    with_log(path, three_turns)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"UPDATE log_format SET version = {version}")
        if version == 1:
            for column in ("checksum", "receipt"):
                connection.execute(f"ALTER TABLE turns DROP COLUMN {column}")
        (page,) = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = 'labels'").fetchone()
        connection.commit()
    zero(path, page - 1)
    content = path.read_bytes()
    with pytest.raises(LogUnavailable, match=f"format {version}"):
        SessionLog(path)
    assert path.read_bytes() == content


def full_disk(patch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage("/")._replace(free=2**20)
    patch.setattr(shutil, "disk_usage", lambda _: usage)


def failing_disk(patch: pytest.MonkeyPatch) -> None:
    def insert(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    patch.setattr(salvage.RecoveredLog, "_insert", insert)


@pytest.mark.parametrize("trouble", [full_disk, failing_disk])
async def test_a_disk_without_room_for_the_copy_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trouble: Callable[[pytest.MonkeyPatch], None]
) -> None:
    path = (await folder_of(tmp_path)) / "log.sqlite"
    zero(path, 0)
    before = {one: one.read_bytes() for one in path.parent.iterdir()}
    with monkeypatch.context() as patch:
        trouble(patch)
        with pytest.raises(LogUnavailable, match=r"damaged.*(room for|No space)") as refused:
            SessionLog(path)
    assert str(tmp_path) not in refused.value.message
    assert {one: one.read_bytes() for one in path.parent.iterdir()} == before
    assert len((await reopened(path))[0]) == len(NAMES)


async def test_a_log_that_another_process_uses_is_not_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = (await folder_of(tmp_path)) / "log.sqlite"
    zero(path, 1)
    monkeypatch.setattr(mending, "is_in_use", lambda _: True)
    with pytest.raises(LogUnavailable, match="in use"):
        SessionLog(path)


async def test_a_log_that_this_process_uses_is_neither_read_beside_sqlite_nor_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "log.sqlite"
    read_content = wal.content

    def grown_since(file: Path) -> bytes:
        """The content of a file; the log grows before the next file is read."""
        content = read_content(file)
        one._database.try_to_write(ballast)
        return content

    async with opened(path) as one:
        await turn(one, "s", "a", "b")
        with monkeypatch.context() as patch:
            patch.setattr(wal, "content", grown_since)
            async with opened(path) as two:
                assert two.salvage is None
                assert text(await read(two)) == "ab"
        one._database.wipe()
        zero(path, 1)
        with pytest.raises(LogUnavailable, match="in use"):
            SessionLog(path)
    async with opened(path) as three:
        assert three.salvage is not None


async def test_a_log_that_could_not_be_opened_is_not_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def locked(*_: object) -> bool:
        raise LogUnavailable("locked")

    path = (await folder_of(tmp_path)) / "log.sqlite"
    with monkeypatch.context() as patch:
        patch.setattr(mending, "is_older", locked)
        with pytest.raises(LogUnavailable, match="locked"):
            SessionLog(path)
    zero(path, 1)
    assert len((await reopened(path))[0]) == len(NAMES)


async def test_a_log_that_is_made_anew_beside_one_in_use_is_for_this_user_only(tmp_path: Path) -> None:
    path = tmp_path / "log.sqlite"
    async with opened(path):
        for suffix in ("", "-wal", "-shm"):
            Path(f"{path}{suffix}").unlink()
        async with opened(path):
            assert path.stat().st_mode & 0o777 == 0o600


# --- the change of files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("done", range(6))
async def test_a_salvage_that_is_cut_short_is_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, done: int
) -> None:
    folder = await folder_of(tmp_path, killed=True)
    path = folder / "log.sqlite"
    truth, _ = await reopened(shutil.copytree(folder, tmp_path / "whole") / "log.sqlite")
    flip(folder / "log.sqlite-wal", 32 + 100)
    before = {one.name: one.read_bytes() for one in folder.iterdir()}
    left = [done]
    rename = Path.rename

    def dying(self: Path, target: Path | str) -> Path:
        if not left[0]:
            raise SystemExit
        left[0] -= 1
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", dying)
        with pytest.raises(SystemExit):
            SessionLog(path)
    found, _ = await reopened(path)
    assert found == truth
    names = [one.name for one in folder.iterdir()]
    stamps = {name.partition(".damaged-")[2].partition("-")[0] for name in names if ".damaged-" in name}
    assert len(stamps) == 1
    for name, content in before.items():
        assert (folder / name.replace("log.sqlite", f"log.sqlite.damaged-{min(stamps)}")).read_bytes() == content
    assert sorted(name for name in names if ".damaged-" not in name) == ["log.sqlite", "log.sqlite-starts"]


async def test_what_was_set_aside_is_never_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.log.recovery.salvage.time.strftime", lambda *_: "20260101T000000Z")
    source = await folder_of(tmp_path)
    folder = shutil.copytree(source, tmp_path / "data")
    contents = []
    for page in range(3):
        path = folder / "log.sqlite"
        path.write_bytes((source / "log.sqlite").read_bytes())
        zero(path, page)
        contents.append(path.read_bytes())
        await reopened(path)
    names = [f"log.sqlite.damaged-20260101T000000Z{suffix}" for suffix in ("", ".2", ".3")]
    assert [(folder / name).read_bytes() for name in names] == contents


async def test_a_file_of_zeros_begins_an_empty_log_loudly(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "log.sqlite"
    path.write_bytes(bytes(10 * PAGE))
    found, log = await reopened(path)
    assert (found, log.salvage and log.salvage.whole) == ({}, 0)
    assert [record.levelno for record in caplog.records] == [logging.ERROR] * 2
    assert (tmp_path / str(log.salvage and log.salvage.aside)).read_bytes() == bytes(10 * PAGE)


def page_of(found: salvage.Salvage | None, older: bool) -> bytes:
    metrics = Metrics()
    metrics.log_opened(found, older)
    return generate_latest(metrics.registry)


def test_metrics_count_it() -> None:
    page = page_of(salvage.Salvage("x", 5, 2, 1, torn=False), False)
    assert b"warmturn_log_salvages_total 1.0" in page
    assert b'warmturn_log_salvaged_sessions_total{state="refused"} 2.0' in page
    assert b"warmturn_log_salvages_total 0.0" in page_of(None, False)


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE sqlite_master SET sql = replace(sql, 'keep_turns', 'keep_turnz') WHERE name = 'turns'",
        "UPDATE log_format SET version = 1",
        "UPDATE log_format SET version = 'x'",
        "DELETE FROM log_format",
        "ALTER TABLE log_format RENAME TO log_fosmat",
    ],
)
async def test_tables_that_are_not_as_they_were_made_are_damage(tmp_path: Path, change: str) -> None:
    path = (await folder_of(tmp_path)) / "log.sqlite"
    truth, _ = await reopened(path)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA writable_schema = ON")
        connection.execute(change)
        connection.commit()
    found, log = await reopened(path)
    assert log.salvage is not None
    assert found == truth


async def test_a_schema_that_sqlite_cannot_even_quote_is_damage(tmp_path: Path) -> None:
    path = (await folder_of(tmp_path)) / "log.sqlite"
    truth, _ = await reopened(path)
    data = path.read_bytes()
    path.write_bytes(
        data.replace(b"sessions_used", b"sessions\xf3used", 1).replace(b"CREATE INDEX sess", b"CREATE INDEY sess")
    )
    found, log = await reopened(path)
    assert log.salvage is not None
    assert found == truth


async def test_text_that_is_no_utf_8_fails_its_session_only(tmp_path: Path) -> None:
    path = tmp_path / "log.sqlite"
    async with opened(path) as log:
        await three_turns(log)
        await three_turns(log, "t")
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("UPDATE turns SET messages = CAST(x'ff' AS TEXT) WHERE session_id = 1 AND number = 2")
        connection.commit()
    async with opened(path) as log:
        with pytest.raises(SessionDamaged):
            await log.get("a", "s")
        assert texts(await read(log, "t"))[-1] == "jkl"
