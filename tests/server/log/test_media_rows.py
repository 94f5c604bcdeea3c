"""Media in the log: stored once per tenant with messages that name them, gone with the last session that does."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sql
from log_kit import Where, assistant, opened, read, sqlite, turn, user, with_log
from msgspec import structs

from server.log.database import LogDamaged
from server.log.logged_message import LoggedMessage
from server.log.response_rows import TurnExtras
from server.log.session_log import SessionLog
from server.log.tables import FORMAT, media, media_refs
from server.log.timeline import NewTurn, SessionMoved
from server.media.media import Media, place

CAT, DOG, BIRD = b"a cat", b"a dog" * 50_000, b"a bird"


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def showing(*pictures: bytes, text: str = "See: ") -> LoggedMessage:
    made = [place(Media("image", digest(data), "png", 1, 1), len(text)) for data in pictures]
    return structs.replace(user(text), media=(*made,))


def bytes_of(*pictures: bytes) -> dict[str, bytes]:
    return {digest(data): data for data in pictures}


async def show(log: SessionLog, session: str, *pictures: bytes, tenant: str = "a", have: Any = None) -> None:
    """A turn that asks about pictures; ``have``: whose bytes come with it, if not all."""
    record = await log.get(tenant, session)
    said, before = ([], []) if record is None else (record.messages, record.tokens)
    new = NewTurn([*before, 1, 2, 3], [*said, showing(*pictures), assistant("ok")], "f1", "stop", len(before) + 2)
    extras = TurnExtras(media=bytes_of(*(pictures if have is None else have)))
    await log.commit(tenant, session, new, extras=extras)


def stored(log: SessionLog) -> tuple[list[str], int]:
    """The media that are stored, and how many sessions have one."""
    count = sql.select(sql.func.count()).select_from(media_refs)
    return log._database.read(
        lambda connection: (
            sorted(connection.execute(sql.select(media.c.name)).scalars()),
            connection.execute(count).scalar_one(),
        )
    )


async def test_a_picture_is_stored_once_and_goes_with_the_last_session_that_has_it(log: SessionLog) -> None:
    await show(log, "s", CAT, DOG)
    await show(log, "s", CAT)
    await show(log, "t", CAT, CAT)
    await log.fork("a", "s", "fork", turn=1)
    await log.create("a", "made", messages=[showing(BIRD)], media=bytes_of(BIRD))
    cat, dog, bird = (f"a/{digest(data)}" for data in (CAT, DOG, BIRD))
    assert stored(log) == (sorted([cat, dog, bird]), 6)
    assert await log.media.get("a", digest(DOG)) == DOG
    await log.delete("a", "s")
    assert stored(log)[0] == sorted([cat, dog, bird])
    await log.delete("a", "fork")
    assert stored(log)[0] == sorted([cat, bird])
    await log.delete("a", "t")
    await log.delete("a", "made")
    assert stored(log) == ([], 0)
    assert await log.media.get("a", digest(CAT)) is None


async def test_tenants_share_no_picture(log: SessionLog) -> None:
    await show(log, "s", CAT, tenant="a")
    with pytest.raises(SessionMoved):  # whoever knows a digest does not have the picture
        await show(log, "s", CAT, tenant="b", have=[])
    assert await log.get("b", "s") is None
    assert await log.media.get("b", digest(CAT)) is None
    await show(log, "s", CAT, tenant="b")
    await log.delete("a", "s")
    assert await log.media.get("a", digest(CAT)) is None
    assert await log.media.get("b", digest(CAT)) == CAT


async def test_what_comes_later_keeps_the_pictures_of_a_session(log: SessionLog) -> None:
    await show(log, "s", CAT)
    await turn(log, "s", "a", "b")
    record = await read(log)
    extras = TurnExtras(parent=("s", 2), copies=True)
    new = NewTurn([*record.tokens, 7, 8], [*record.messages, user("x"), assistant("y")], "f1", "stop")
    await log.commit("a", "line", new, extras=extras)
    await log.rewind("a", "s", turn=0)
    assert await log.media.get("a", digest(CAT)) == CAT
    await log.delete("a", "s")
    assert await log.media.get("a", digest(CAT)) == CAT
    await log.delete("a", "line")
    assert stored(log) == ([], 0)


async def test_an_edit_replaces_pictures(log: SessionLog) -> None:
    await log.create("a", "s", messages=[showing(CAT)], media=bytes_of(CAT))
    edited = showing(DOG, text="New: ")
    await log.edit("a", "s", 0, edited.content, edited.media, media=bytes_of(DOG))
    assert (await read(log)).messages == [edited]
    await log.edit("a", "s", 0, "Text only")
    assert (await read(log)).messages == [user("Text only")]
    more = [user("x"), showing(BIRD)]
    await log.revise("a", "s", 1, more, media=bytes_of(BIRD))
    assert stored(log)[1] == 3


async def test_an_expired_session_takes_its_pictures_along(log: SessionLog) -> None:
    await log.create("a", "s", messages=[showing(CAT)], media=bytes_of(CAT), ttl=1)
    await log.expire(2**40)
    assert stored(log) == ([], 0)


async def test_servers_that_store_and_delete_one_picture_agree(where: Where) -> None:
    if isinstance(where, Path):
        pytest.skip("one server at a time has an SQLite log")
    async with opened(where) as one, opened(where) as two:
        for _ in range(10):
            await show(one, "s", CAT)
            await asyncio.gather(show(two, "t", CAT), one.delete("a", "s"))
            assert stored(one) == ([f"a/{digest(CAT)}"], 1)
            await two.delete("a", "t")
            assert stored(one) == ([], 0)


def test_a_log_of_the_format_before_is_upgraded(tmp_path: Path) -> None:
    path = tmp_path / "log.sqlite"
    with_log(path, lambda log: turn(log, "s", "a", "b"))
    later = ("shares", "key_usage", "media_refs", "media", "message_words", "message_texts")
    sqlite(path, *(f"DROP TABLE {name}" for name in later), "UPDATE log_format SET version = 6")
    with_log(path, lambda log: show(log, "t", CAT))
    assert sqlite(path, "SELECT version FROM log_format") == [(FORMAT,)]


async def test_a_damaged_picture_is_not_given_out(tmp_path: Path) -> None:
    path = tmp_path / "log.sqlite"
    async with opened(path) as log:
        await show(log, "s", CAT)
    sqlite(path, "UPDATE media SET data = x'00'")
    async with opened(path) as log:
        with pytest.raises(LogDamaged):
            await log.media.get("a", digest(CAT))


async def test_pictures_are_salvaged_with_their_sessions(tmp_path: Path) -> None:
    path = tmp_path / "log.sqlite"
    async with opened(path) as log:
        await show(log, "s", CAT, DOG)
        await show(log, "t", DOG)
    with path.open("r+b") as file:
        file.write(bytes(4096))  # the schema, and where every table begins
    async with opened(path) as log:
        assert log.salvage is not None
        assert log.salvage.whole == 2
        assert await log.media.get("a", digest(CAT)) == CAT
        assert await log.media.get("a", digest(DOG)) == DOG
        assert stored(log)[1] == 3
        assert {item.id for item in (await log.page("a", limit=9)).items} == {"s", "t"}


async def test_a_deleted_picture_leaves_no_bytes_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "log.sqlite"
    secret = b"an unmistakable picture " * 1000
    async with opened(path) as log:
        await show(log, "s", secret)
        await log.delete("a", "s")
    assert all(b"unmistakable" not in file.read_bytes() for file in tmp_path.iterdir())
