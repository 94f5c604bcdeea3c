"""Search: what is said is found, what was taken back or deleted is not, and nobody finds what is another's."""

from __future__ import annotations

from pathlib import Path

import pytest
import sqlalchemy as sql
from log_kit import as_format_7, opened, read, sqlite, turn, user, with_log
from postgres_server import PostgresServer

from server.log.listing import SessionFilter
from server.log.search_index import PIECE, Hit, excerpt, matches, pieces, words_of
from server.log.session_log import SessionLog
from server.log.tables import message_texts


async def found(log: SessionLog, query: str, tenant: str = "a", limit: int = 100) -> dict[str, list[Hit]]:
    """The hits of a search, by session."""
    page = await log.page(tenant, SessionFilter(words=words_of(query)), limit=limit)
    assert page.hits is not None
    assert [item.id for item in page.items] == [*page.hits]
    return {**page.hits}


async def test_messages_and_titles_are_found_by_the_beginnings_of_words(log: SessionLog) -> None:
    await turn(log, "s", "Where is the Nightingale?", "In the *garden*, says example.com/birds.")
    await log.create("a", "t", messages=[user("Something else")], metadata={"title": "Trip to Gent"})
    (hit,) = (await found(log, "nightin"))["s"]
    assert hit == Hit(0, "user", "Where is the ", "Nightingale", "?")
    (hit,) = (await found(log, "GARDEN birds"))["s"]
    assert (hit.message, hit.role, hit.match) == (1, "assistant", "garden")
    assert (await found(log, "gent"))["t"] == [Hit(None, "title", "Trip to ", "Gent", "")]
    assert await found(log, "nightingale garden") == {}  # of two messages
    assert await found(log, "ightingale") == {}
    assert (await found(log, "example"))["s"][0].match == "example"
    assert (await found(log, "com"))["s"][0].match == "com"


QUERIES = ['"', 'a" OR "b', "NEAR(x y)", "a:* & b", "rowid: x", "'; DROP TABLE turns; --", "- ^ * ( )"]


@pytest.mark.parametrize("query", QUERIES)
async def test_a_query_is_only_words(log: SessionLog, query: str) -> None:
    await turn(log, "s", "hello", "there")
    if words_of(query):
        assert await found(log, query) == {}
    assert "s" in await found(log, "hello")


async def test_what_was_taken_back_is_not_found(log: SessionLog) -> None:
    for ask, reply in (("apple", "pear"), ("plum", "cherry")):
        await turn(log, "s", ask, reply)
    await log.fork("a", "s", "f", turn=1)
    assert [*await found(log, "apple")] == ["f", "s"]
    assert [*await found(log, "cherry")] == ["s"]
    await log.rewind("a", "s", turn=1)
    assert await found(log, "cherry") == {}
    await log.edit("a", "s", 0, "melon")
    assert [*await found(log, "pear")] == ["f"]
    assert [*await found(log, "melon")] == ["s"]
    await log.update("a", "s", metadata={"title": "Fruit"})
    await log.update("a", "s", metadata={"title": "Vegetables"})
    assert await found(log, "fruit") == {}
    assert [*await found(log, "vegetables")] == ["s"]


async def test_what_is_deleted_or_expired_is_not_found(log: SessionLog) -> None:
    await turn(log, "s", "secret", "reply")
    await log.create("a", "t", messages=[user("secret")], ttl=1000)
    assert len(await found(log, "secret")) == 2
    await log.delete("a", "s")
    assert [*await found(log, "secret")] == ["t"]
    await log.expire(4e9)
    assert await found(log, "secret") == {}
    left = await log._thread.read(lambda connection: connection.execute(sql.select(message_texts)).all())
    assert left == []


async def test_nothing_of_a_deleted_session_stays_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "log.sqlite"
    async with opened(path) as log:
        for number in range(30):
            await turn(log, f"s{number}", f"common words and unmistakable{number}", "a reply")
        await log.delete("a", "s7")
    data = path.read_bytes()
    assert b"unmistakable8" in data
    assert b"unmistakable7" not in data
    assert b"mistakable7" not in data


async def test_a_tenant_finds_its_own(log: SessionLog) -> None:
    await turn(log, "s", "hello", "there", tenant="a")
    await turn(log, "s", "hello", "again", tenant="b")
    assert [hit.match for hit in (await found(log, "again", "b"))["s"]] == ["again"]
    assert await found(log, "again", "a") == {}
    assert await found(log, "hello", "c") == {}


async def test_filters_and_pages_hold_for_searches_too(log: SessionLog) -> None:
    for number in range(5):
        await turn(log, f"s{number}", "hello", "there", fingerprint=f"f{number % 2}")
        await log.update("a", f"s{number}", metadata={"label:odd": "yes"} if number % 2 else {})
    page = await log.page("a", SessionFilter(words=["hello"]), limit=2)
    assert ([item.id for item in page.items], page.has_more) == (["s4", "s3"], True)
    page = await log.page("a", SessionFilter(words=["hello"]), limit=2, after="s3")
    assert [item.id for item in page.items] == ["s2", "s1"]
    page = await log.page("a", SessionFilter(words=["hello"], metadata={"label:odd": "yes"}), limit=9)
    assert [item.id for item in page.items] == ["s3", "s1"]
    page = await log.page("a", SessionFilter(fingerprint="f0"), limit=9)
    assert [item.id for item in page.items] == ["s4", "s2", "s0"]
    assert page.hits is None


async def test_only_the_best_hits_of_a_session_are_told(log: SessionLog) -> None:
    for _ in range(4):
        await turn(log, "s", "hello", "hello")
    await log.update("a", "s", metadata={"title": "hello"})
    assert [hit.message for hit in (await found(log, "hello"))["s"]] == [None, 7, 6]


async def test_texts_of_any_length_and_any_characters(log: SessionLog) -> None:
    long = "word " * 40_000 + "x" * 120_000 + " needle\0 Grüße 你好 \U0001f600"
    await log.create("a", "s", messages=[user(long)])
    assert (await found(log, "needle"))["s"][0].match == "needle"
    assert (await found(log, "grüße"))["s"][0].match == "Grüße"
    assert "s" in await found(log, "你好")


async def test_titles_come_from_the_first_message(log: SessionLog) -> None:
    await log.create("a", "s", messages=[user("  Tell me\nabout " + "long " * 30)])
    await log.create("a", "named", messages=[user("Hello")], metadata={"title": "Mine"})
    await log.create("a", "marked", messages=[user("## Is **2**3** in `a_b`, `\n**so** or 2**3**4?")])
    await log.create("a", "empty")
    await log.create("a", "heading", messages=[user("## Plan\n\n- [ ] first")])
    await log.create("a", "task", messages=[user("- [x] first #1")])
    await log.create("a", "mark", messages=[user("#")])
    await log.create("a", "tag", messages=[user("#python **is** nice")])
    titles = {item.id: item.title for item in (await log.page("a", limit=9)).items}
    assert titles == {
        "s": "Tell me about long long long long long long long long long…",
        "named": "Mine",
        "marked": "Is 2**3 in a_b, ` so or 2**3**4?",
        "empty": "",
        "heading": "Plan - [ ] first",
        "task": "first #1",
        "mark": "#",
        "tag": "#python is nice",
    }
    record = await read(log)
    assert record.summary.title == titles["s"]


async def test_the_texts_of_an_older_log_are_found(tmp_path: Path) -> None:
    path = tmp_path / "log.sqlite"
    async with opened(path) as log:
        await turn(log, "s", "hello", "there")
        await turn(log, "s", "and now", "something")
        await log.update("a", "s", metadata={"title": "Greetings"})
        await turn(log, "damaged", "hello", "there")
    as_format_7(path)
    sqlite(path, "UPDATE turns SET messages = replace(messages, 'hello', 'hallo') WHERE session_id = 2")
    async with opened(path) as log:
        assert [*await found(log, "hello")] == ["s"]
        assert [*await found(log, "something")] == ["s"]
        assert [*await found(log, "greetings")] == ["s"]


async def test_an_older_log_in_postgresql(postgres: PostgresServer) -> None:
    url = postgres.new_database()
    async with opened(url) as log:
        await turn(log, "s", "hello", "there")

        def drop(connection: sql.Connection) -> None:
            connection.exec_driver_sql("DROP TABLE message_texts")
            connection.exec_driver_sql("UPDATE log_format SET version = 7")

        await log._thread.write(drop)
    async with opened(url) as log:
        assert [*await found(log, "there")] == ["s"]


def test_a_damaged_index_is_made_anew(tmp_path: Path) -> None:
    path = tmp_path / "log.sqlite"

    async def hello(log: SessionLog) -> None:
        await turn(log, "s", "hello", "there")
        assert log.salvage is None

    with_log(path, hello)
    sqlite(path, "UPDATE message_words_data SET block = zeroblob(length(block))")

    async def after(log: SessionLog) -> None:
        assert log.salvage is None
        assert "s" in await found(log, "hello")

    with_log(path, after)
    with_log(path, hello)


async def test_postgresql_searches_with_its_index(postgres: PostgresServer) -> None:
    async with opened(postgres.new_database()) as log:
        await turn(log, "s", "hello", "there")

        def plan(connection: sql.Connection) -> str:
            connection.exec_driver_sql("SET LOCAL enable_seqscan = off")
            query = sql.select(message_texts.c.session_id).where(matches(connection, ["hello"]))
            compiled = query.compile(connection, compile_kwargs={"literal_binds": True})
            return "\n".join(str(row[0]) for row in connection.exec_driver_sql(f"EXPLAIN {compiled}"))

        assert "message_words" in await log._thread.read(plan)


def test_pieces_are_divided_between_words() -> None:
    text = "ab " * PIECE
    assert "".join(pieces(text)) == text
    assert all(piece.endswith(" ") and len(piece) <= PIECE for piece in pieces(text))
    assert [len(piece) for piece in pieces("x" * (PIECE + 1))] == [PIECE, 1]
    assert [*pieces(" \n ")] == []


def test_excerpts() -> None:
    assert excerpt("one two three", ["tw"]) == ("one ", "two", " three")
    before, match, after = excerpt("a" * 100 + " word " + "b" * 200, ["word"])
    assert (match, before[0], after[-1], len(before), len(after)) == ("word", "…", "…", 41, 121)
    assert excerpt("nothing of it", ["word"]) == ("", "", "nothing of it")
