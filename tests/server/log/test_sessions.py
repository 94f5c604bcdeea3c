"""Sessions as a whole, on both databases: listing, metadata, TTL, pins, deletion, idempotent turns, export."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from log_kit import Where, assistant, opened, read, text, texts, three_turns, turn, user

from server.log.listing import SessionFilter
from server.log.logged_message import LoggedMessage
from server.log.portable import InvalidLog, PortableLog
from server.log.retries import CommittedTurn, Idempotency
from server.log.session_log import SessionLog
from server.log.timeline import NewTurn, SessionExists, SessionMoved, SessionRecord, UnknownSession


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The log's time: its one item, to be set."""
    time = [1_700_000_000.0]
    for module in ("session_reader", "session_table"):
        monkeypatch.setattr(f"server.log.{module}.now", lambda: time[0])
    return time


async def listed(log: SessionLog, tenant: str = "a", descending: bool = True, **filters: Any) -> list[str]:
    """The ids of the first page."""
    page = await log.page(tenant, SessionFilter(**filters), limit=9, descending=descending)
    return [item.id for item in page.items]


async def test_the_list_is_ordered_by_last_use(log: SessionLog, clock: list[float]) -> None:
    for session in ("one", "two", "three"):
        clock[0] += 1
        await turn(log, session, "a", "b")
    await log.create("b", "foreign")
    assert await listed(log) == ["three", "two", "one"]
    clock[0] += 1
    await turn(log, "two", "c", "d")
    await log.update("a", "one", metadata={"k": "v"})  # is no use
    assert await listed(log) == ["two", "three", "one"]
    assert await listed(log, descending=False) == ["one", "three", "two"]
    (item,) = (await log.page("a", limit=1)).items
    assert (item.turns, item.tokens, item.messages, item.used) == (2, 4, 4, int(clock[0]))
    assert item == (await read(log, "two")).summary


@pytest.mark.parametrize("descending", [True, False])
async def test_pages_show_every_session_once(log: SessionLog, clock: list[float], descending: bool) -> None:
    for number in range(7):
        clock[0] += number % 2  # some were used at the same moment
        await log.create("a", f"s{number}")
    found: list[str] = []
    after = None
    more = True
    while more:
        page = await log.page("a", limit=3, after=after, descending=descending)
        found += [item.id for item in page.items]
        after, more = found[-1], page.has_more
    assert found == sorted(found, reverse=descending)
    assert len(set(found)) == len(found) == 7
    with pytest.raises(UnknownSession):
        await log.page("a", limit=3, after="nobody")


async def test_the_list_is_filtered(log: SessionLog, clock: list[float]) -> None:
    for session, metadata in (("A.x", {"k": "1", "l": "2"}), ("a_x", {"k": "1"}), ("a.x", {'k"': "1"})):
        clock[0] += 10
        await log.create("a", session, metadata=metadata)
    assert await listed(log, metadata={"k": "1"}) == ["a_x", "A.x"]
    assert await listed(log, metadata={"k": "1", "l": "2"}) == ["A.x"]
    assert await listed(log, metadata={'k"': "1"}) == ["a.x"]
    assert await listed(log, metadata={"k": "2"}) == []
    assert await listed(log, prefix="a") == ["a.x", "a_x"]  # a is not A
    assert await listed(log, prefix="a_") == ["a_x"]  # and _ is no wildcard
    assert await listed(log, prefix="%") == []
    used = int(clock[0])
    assert await listed(log, used_after=used - 10) == ["a.x", "a_x"]
    assert await listed(log, used_before=used) == ["a_x", "A.x"]
    assert await listed(log, used_after=used - 10, used_before=used, prefix="a") == ["a_x"]


async def test_the_list_is_filtered_by_every_model_that_has_written_a_turn(log: SessionLog) -> None:
    """Forks have those of their parents; metadata is apart, whatever it says."""
    await turn(log, "both", "a", "b", model="one")
    await turn(log, "both", "c", "d", model='tw"o')
    await turn(log, "both", "e", "f", model="one")
    await turn(log, "one", "a", "b", model="one", tenant="a")
    await turn(log, "theirs", "a", "b", model="one", tenant="b")
    await log.create("a", "none", metadata={'["model", "one"]': "", "model": "one"})
    await log.fork("a", "both", "fork")
    await log.update("a", "both", metadata={"k": "v"})
    assert await listed(log, model="one", descending=False) == ["both", "one", "fork"]
    assert await listed(log, model='tw"o', descending=False) == ["both", "fork"]
    assert await listed(log, model="tw") == []
    assert (await read(log, "both")).summary.metadata == {"k": "v"}
    assert (await read(log, "fork")).summary.metadata == {}
    assert await log.metadata_keys("a", "") == [('["model", "one"]', 1), ("k", 1), ("model", 1)]
    await log.delete("a", "both")
    assert await listed(log, model="one", descending=False) == ["one", "fork"]


async def test_an_update_sets_what_is_given(log: SessionLog) -> None:
    await three_turns(log)
    version = (await read(log)).version
    await log.update("a", "s", metadata={"k": "v", "l": "w"}, ttl=60, pinned_until=2**33)
    record = await read(log)
    assert (record.metadata, record.ttl, record.pinned_until) == ({"k": "v", "l": "w"}, 60, 2**33)
    assert record.version == version
    summary = await log.update("a", "s", metadata={"m": "x"})
    assert (summary.metadata, summary.ttl, summary.pinned_until) == ({"m": "x"}, 60, 2**33)
    summary = await log.update("a", "s", ttl=None, pinned_until=None)
    assert (summary.metadata, summary.ttl, summary.expires, summary.pinned_until) == ({"m": "x"}, None, None, None)


async def test_a_session_ends_its_ttl_after_its_last_change(log: SessionLog, clock: list[float]) -> None:
    await log.create("a", "s", ttl=100)
    await log.create("a", "stays")
    clock[0] += 60
    await turn(log, "s", "a", "b")
    clock[0] += 60
    assert (await read(log)).expires == int(clock[0]) + 40
    assert await log.expire(clock[0]) == []
    clock[0] += 40
    assert await log.get("a", "s") is None
    assert await listed(log) == ["stays"]
    assert not await log.delete("a", "s")
    for verb in (
        lambda: log.update("a", "s", ttl=None),
        lambda: log.fork("a", "s", "t"),
        lambda: log.rewind("a", "s", turn=0),
        lambda: log.rows("a", "s"),
        lambda: log.page("a", limit=9, after="s"),
    ):
        with pytest.raises(UnknownSession):
            await verb()
    assert await log.expire(clock[0]) == [("a", "s")]
    assert [*await log.tombstones()] == [("a", "s")]
    assert await log.expire(clock[0]) == []


async def test_sessions_expire_a_few_at_a_time(
    log: SessionLog, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.log.session_log.EXPIRED_AT_ONCE", 2)
    for number in range(5):
        await log.create("a", f"s{number}", ttl=10)
    assert len(await log.expire(clock[0] + 10)) == len(await log.tombstones()) == 5


@pytest.mark.parametrize("how", ["turn", "create", "fork", "restore"])
async def test_the_id_of_a_session_that_has_expired_begins_empty(log: SessionLog, clock: list[float], how: str) -> None:
    await turn(log, "other", "x", "y")
    await log.create("a", "s", messages=[user("old")], metadata={"k": "v"}, ttl=10)
    clock[0] += 10
    if how == "turn":
        await turn(log, "s", "x", "y", expect=0)
    elif how == "create":
        await log.create("a", "s")
    elif how == "fork":
        await log.fork("a", "other", "s")
    else:
        await log.restore("a", "s", await log.rows("a", "other"))
    record = await read(log)
    assert "old" not in texts(record)
    assert (record.metadata, record.ttl) == ({}, None)
    assert [*await log.tombstones()] == [("a", "s")]


async def test_a_turn_that_was_running_when_its_session_expired_is_committed(
    log: SessionLog, clock: list[float]
) -> None:
    await turn(log, "s", "a", "b")
    await log.update("a", "s", ttl=10)
    version = (await read(log)).version
    with log.claim("a", "s"):
        clock[0] += 20
        assert await log.expire(clock[0]) == []
        await log.commit(
            "a",
            "s",
            NewTurn(tokens=[1], messages=[user("m")], fingerprint="f", finish_reason="stop"),
            expect=version,
        )
    assert (await read(log)).tokens == [1]


async def test_pins(log: SessionLog, clock: list[float]) -> None:
    until = int(clock[0]) + 60
    await log.create("a", "s", pinned_until=until)
    await log.create("b", "s")
    await log.update("b", "s", pinned_until=until + 60)
    assert sorted(await log.find_pinned(clock[0])) == [("a", "s", until), ("b", "s", until + 60)]
    clock[0] += 60
    assert await log.find_pinned(clock[0]) == [("b", "s", until + 60)]
    assert (await read(log)).pinned_until is None


async def test_a_deleted_session_never_comes_back(log: SessionLog) -> None:
    await three_turns(log)
    await log.update("a", "s", metadata={"k": "v"})
    version = (await read(log)).version
    assert await log.delete("a", "s")
    assert await log.get("a", "s") is None
    assert not await log.delete("a", "s")
    assert await listed(log, metadata={"k": "v"}) == []
    with pytest.raises(SessionMoved):  # a turn that began before
        await turn(log, "s", "x", "y", expect=version)
    assert [*await log.tombstones()] == [("a", "s")]
    await three_turns(log)
    record = await read(log)
    assert (text(record), record.metadata) == ("abcdefghijkl", {})
    assert record.version != version  # the same number of rows, another session
    with pytest.raises(SessionMoved):
        await turn(log, "s", "x", "y", expect=version)
    await log.delete("a", "s")
    assert [*await log.tombstones()] == [("a", "s")]
    life = (await log.tombstones())["a", "s"]
    await log.swept("b", "s", life)
    await log.swept("a", "s", life - 1)  # that of the life before
    assert [*await log.tombstones()] == [("a", "s")]
    await log.swept("a", "s", life)
    assert [*await log.tombstones()] == []


async def test_a_turn_commits_only_on_what_it_was_built_on(log: SessionLog) -> None:
    await turn(log, "s", "a", "b", expect=0)
    with pytest.raises(SessionMoved):
        await turn(log, "s", "x", "y", expect=0)
    version = (await read(log)).version
    await turn(log, "s", "c", "d", expect=version)
    changed = await read(log)
    for refused in (
        lambda: turn(log, "s", "x", "y", expect=version),
        lambda: log.rewind("a", "s", turn=0, expect=version),
        lambda: log.edit("a", "s", 0, "x", expect=version),
    ):
        with pytest.raises(SessionMoved):
            await refused()
    assert await read(log) == changed
    await log.rewind("a", "s", turn=1, expect=changed.version)
    await log.edit("a", "s", 0, "x", expect=(await read(log)).version)


async def test_a_turn_of_an_idempotency_key_is_committed_once_and_replayed(where: Where, clock: list[float]) -> None:
    async with opened(where) as log:
        assert await log.replay("a", "s", "key") is None
        await turn(log, "s", "ab", "cde", cached=1, finish_reason="length", idempotency=Idempotency("key", "hash"))
        await turn(log, "s", "f", "g", idempotency=Idempotency("other", "hash"))
        await log.rewind("a", "s", turn=0)
        await turn(log, "s", "h", "i")
        before = await read(log)
        with pytest.raises(SessionMoved):
            await turn(log, "s", "ab", "cde", idempotency=Idempotency("key", "hash"))
        assert await read(log) == before
    async with opened(where) as log:
        expected = CommittedTurn("hash", assistant("cde"), "length", 2, 3, 1, 1_700_000_000)
        assert await log.replay("a", "s", "key") == expected
        assert await log.replay("a", "t", "key") is None
        clock[0] += 40 * 3600
        await log.expire(clock[0])
        assert await log.replay("a", "s", "key") == expected
        clock[0] += 40 * 3600
        await log.expire(clock[0])
        assert await log.replay("a", "s", "key") is None


async def test_an_exported_session_is_restored_from_json(log: SessionLog) -> None:
    await three_turns(log)
    await turn(log, "s", "m", "n", fingerprint="f2", finish_reason="length", cached=2)
    await log.edit("a", "s", 6, "edited")
    before = await read(log)
    exported = msgspec.json.decode(msgspec.json.encode(await log.rows("a", "s")), type=PortableLog)
    assert exported.tokens.tolist() == before.tokens
    summary = await log.restore("b", "t", exported, metadata={"k": "v"}, ttl=60)
    after = await read(log, "t", "b")
    same = ("tokens", "messages", "rendered", "turns", "fingerprint")
    assert [getattr(after, name) for name in same] == [getattr(before, name) for name in same]
    assert (after.metadata, after.ttl, after.parent, after.summary) == ({"k": "v"}, 60, None, summary)
    with pytest.raises(SessionExists):
        await log.restore("a", "s", exported)


def forged(exported: PortableLog, turn: int = 1, **changes: Any) -> PortableLog:
    turns = [*exported.turns]
    turns[turn] = msgspec.structs.replace(turns[turn], **changes)
    return msgspec.structs.replace(exported, turns=turns)


async def test_what_could_not_have_left_a_log_is_refused(log: SessionLog) -> None:
    await three_turns(log)
    exported = await log.rows("a", "s")
    replace = msgspec.structs.replace
    for wrong in (
        replace(exported, format=2),
        replace(exported, created=-1),
        replace(exported, fingerprint="f" * 200),
        replace(exported, rest=[LoggedMessage("tool", "")]),
        forged(exported, tokens=b"123"),
        forged(exported, tokens=b"\xff\xff\xff\xff"),
        forged(exported, prompt_tokens=9),
        forged(exported, prompt_tokens=3),
        forged(exported, cached=6),
        forged(exported, cached=-1),
        forged(exported, created=2**60),
        forged(exported, finish_reason="x" * 40),
        forged(exported, messages=[]),
        forged(exported, messages=[assistant("a"), user("b")]),
        replace(exported, rest=[LoggedMessage("user", "", tool_call_id="c")]),
    ):
        with pytest.raises(InvalidLog):
            await log.restore("a", "t", wrong)
    assert await log.get("a", "t") is None
    await log.restore("a", "t", forged(exported))


def test_a_record_without_turns_covers_its_messages() -> None:
    record = SessionRecord("s", [1], [user("a")], "f", 1)
    assert record.rendered == 1
