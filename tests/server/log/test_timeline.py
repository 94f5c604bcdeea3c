"""What a session holds after each verb, on both databases: tokens, messages and turns, and what is unrendered."""

from collections.abc import Awaitable, Callable

import pytest
from log_kit import Where, assistant, read, rewind_to_token, text, texts, three_turns, turn, user, with_log

from server.log.retries import Idempotency
from server.log.session_log import SessionLog
from server.log.timeline import NewTurn, NoSuchPlace, RewindPoint, SessionExists, UnknownSession, drop_reply, locate


async def test_a_turn_tells_where_its_reply_is(log: SessionLog) -> None:
    first = await turn(log, "s", "a", "bcd", cached=0)
    second = await turn(log, "s", "ef", "gh", cached=3, finish_reason="length", fingerprint="f2")
    record = await read(log)
    assert record.turns == (first, second)
    assert (second.number, second.prompt_tokens, second.tokens, second.messages) == (2, 6, 8, 4)
    assert (second.cached, second.finish_reason, second.fingerprint) == (3, "length", "f2")
    assert first.fingerprint == "f1"
    assert record.fingerprint == "f2"
    assert record.used >= record.created == first.created


async def test_a_turn_that_leaves_the_logged_timeline_drops_the_turns_behind(log: SessionLog) -> None:
    await three_turns(log)
    messages = [user("a"), assistant("bcd"), user("X"), assistant("Y")]
    tokens = [*map(ord, "abcdXY")]
    await log.commit(
        "a", "s", NewTurn(tokens=tokens, messages=messages, prompt_tokens=5, fingerprint="f1", finish_reason="stop")
    )
    record = await read(log)
    assert (text(record), texts(record)) == ("abcdXY", ["a", "bcd", "X", "Y"])
    assert [t.tokens for t in record.turns] == [4, 6]


async def test_a_turn_whose_reply_begins_before_another_ones_end_drops_that_one(log: SessionLog) -> None:
    await three_turns(log)
    said = (await read(log)).messages
    await log.commit(
        "a",
        "s",
        NewTurn(
            tokens=[*map(ord, "abcdefghijklmn")],
            messages=[*said, user("m"), assistant("n")],
            prompt_tokens=6,
            fingerprint="f1",
            finish_reason="stop",
        ),
    )
    assert [t.tokens for t in (await read(log)).turns] == [4, 14]


@pytest.mark.parametrize(
    ("turns", "left", "said"), [(3, "abcdefghijkl", 6), (2, "abcdefgh", 4), (1, "abcd", 2), (0, "", 0)]
)
async def test_a_rewind_to_a_turn(log: SessionLog, turns: int, left: str, said: int) -> None:
    await three_turns(log)
    summary = await log.rewind("a", "s", turn=turns)
    record = await read(log)
    assert (text(record), len(record.messages), len(record.turns)) == (left, said, turns)
    assert record.summary == summary
    await turn(log, "s", "m", "n")
    assert text(await read(log)) == left + "mn"


@pytest.mark.parametrize(
    ("tokens", "place", "left", "said"),
    [
        (12, RewindPoint(3, 12), "abcdefghijkl", ["a", "bcd", "e", "fgh", "i", "jkl"]),
        (11, RewindPoint(3, 11, 9), "abcdefghijk", ["a", "bcd", "e", "fgh", "i", "jk"]),
        (
            9,
            RewindPoint(2, 8),
            "abcdefgh",
            ["a", "bcd", "e", "fgh"],
        ),  # the end of a prompt: nothing of the reply is left
        (8, RewindPoint(2, 8), "abcdefgh", ["a", "bcd", "e", "fgh"]),
        (6, RewindPoint(2, 6, 5), "abcdef", ["a", "bcd", "e", "f"]),
        (1, RewindPoint(0, 0), "", []),
        (0, RewindPoint(0, 0), "", []),
    ],
)
async def test_a_rewind_to_a_token(
    log: SessionLog, tokens: int, place: RewindPoint, left: str, said: list[str]
) -> None:
    await three_turns(log)
    assert locate(await read(log), tokens) == place
    record = await rewind_to_token(log, tokens)
    assert (text(record), texts(record), len(record.turns)) == (left, said, place.turns)


async def test_a_reply_that_was_cut_can_be_cut_again_and_generated_whole(log: SessionLog) -> None:
    await three_turns(log)
    await rewind_to_token(log, 11)
    record = await rewind_to_token(log, 10)
    assert (text(record), texts(record)[-1]) == ("abcdefghij", "j")
    assert (record.turns[2].prompt_tokens, record.turns[2].finish_reason) == (9, "length")
    assert text(drop_reply(record)) == "abcdefghi"


@pytest.mark.parametrize(
    ("index", "left", "turns"), [(5, "abcdefgh", 2), (4, "abcdefgh", 2), (3, "abcd", 1), (2, "abcd", 1), (0, "", 0)]
)
async def test_an_edit_drops_what_is_behind_and_leaves_it_unrendered(
    log: SessionLog, index: int, left: str, turns: int
) -> None:
    await three_turns(log)
    before = await read(log)
    await log.edit("a", "s", index, "new")
    record = await read(log)
    assert texts(record) == [*texts(before)[:index], "new"]
    assert record.messages[index].role == before.messages[index].role
    assert (text(record), len(record.turns), record.rendered) == (left, turns, 2 * turns)


async def test_what_was_edited_is_rendered_by_the_next_turn(log: SessionLog) -> None:
    await three_turns(log)
    await log.edit("a", "s", 2, "E")
    await log.commit(
        "a",
        "s",
        NewTurn(
            tokens=[*map(ord, "abcdEF")],
            messages=[user("a"), assistant("bcd"), user("E"), assistant("F")],
            prompt_tokens=5,
            fingerprint="f1",
            finish_reason="stop",
        ),
    )
    record = await read(log)
    assert (texts(record), record.rendered, len(record.turns)) == (["a", "bcd", "E", "F"], 4, 2)


@pytest.mark.parametrize("again", ["jkl", "jk", "jklm", "x"])
async def test_another_reply_takes_the_place_of_the_last_one_when_it_commits(log: SessionLog, again: str) -> None:
    await three_turns(log)
    record = await read(log)
    asked = drop_reply(record)
    assert (text(asked), texts(asked), asked.rendered) == ("abcdefghi", ["a", "bcd", "e", "fgh", "i"], 5)
    assert await read(log) == record  # nothing is written yet
    await log.commit(
        "a",
        "s",
        NewTurn(
            tokens=[*asked.tokens, *map(ord, again)],
            messages=[*asked.messages, assistant(again)],
            prompt_tokens=len(asked.tokens),
            fingerprint="f1",
            finish_reason="stop",
        ),
        idempotency=Idempotency("k", "h"),
        expect=asked.version,
    )
    after = await read(log)
    assert (text(after), texts(after)[-1], len(after.turns)) == ("abcdefghi" + again, again, 3)
    assert after.turns[2].prompt_tokens == 9
    replayed = await log.replay("a", "s", "k")
    assert replayed is not None
    assert (replayed.reply.content, replayed.completion_tokens) == (again, len(again))


async def test_dropping_a_reply_that_is_not_the_end_of_a_turn(where: Where, log: SessionLog) -> None:
    await log.create("a", "s", messages=[user("a"), assistant("b")])
    seeded = drop_reply(await read(log))
    assert (texts(seeded), seeded.tokens, seeded.rendered) == (["a"], [], 0)
    assert drop_reply(seeded) == seeded  # it ends with a question
    await log.commit(
        "a", "t", NewTurn(tokens=[1, 2], messages=[user("a"), assistant("b")], fingerprint="f", finish_reason="")
    )
    unknown = drop_reply(await read(log, "t"))  # nobody said where its reply begins
    assert (texts(unknown), unknown.tokens, unknown.rendered) == (["a"], [], 0)
    await three_turns(log, "u")
    await log.edit("a", "u", 3, "edited")
    edited = drop_reply(await read(log, "u"))
    assert (texts(edited), text(edited), edited.rendered) == (["a", "bcd", "e"], "abcd", 2)


@pytest.mark.parametrize(("turns", "left"), [(None, "abcdefghijkl"), (3, "abcdefghijkl"), (1, "abcd"), (0, "")])
async def test_a_fork_is_the_same_up_to_its_turn_and_then_its_own(
    log: SessionLog, turns: int | None, left: str
) -> None:
    await three_turns(log)
    await log.update("a", "s", metadata={"k": "v"}, ttl=60, pinned_until=2**33)
    before = await read(log)
    summary = await log.fork("a", "s", "new", turn=turns)
    record = await read(log, "new")
    count = 3 if turns is None else turns
    assert (text(record), record.turns, record.parent) == (left, before.turns[:count], ("s", count))
    assert (record.metadata, record.ttl, record.pinned_until) == ({"k": "v"}, 60, None)
    assert summary == record.summary
    await turn(log, "new", "m", "n")
    await turn(log, "s", "o", "p")
    assert text(await read(log, "new")) == left + "mn"
    assert text(await read(log)) == "abcdefghijklop"


async def test_a_fork_of_everything_has_what_is_unrendered_too(log: SessionLog) -> None:
    await three_turns(log)
    await log.edit("a", "s", 2, "E")
    await log.fork("a", "s", "all")
    await log.fork("a", "s", "turn", turn=1)
    assert texts(await read(log, "all")) == ["a", "bcd", "E"]
    assert texts(await read(log, "turn")) == ["a", "bcd"]


async def test_places_that_are_not_there(log: SessionLog) -> None:
    await three_turns(log)
    record = await read(log)
    places: list[tuple[str, int, Callable[[], Awaitable[object]]]] = [
        ("turn", 3, lambda: log.rewind("a", "s", turn=4)),
        ("turn", 3, lambda: log.rewind("a", "s", turn=-1)),
        ("tokens", 12, lambda: log.rewind("a", "s", tokens=13)),
        ("tokens", 12, lambda: log.rewind("a", "s", tokens=-1)),
        ("index", 5, lambda: log.edit("a", "s", 6, "x")),
        ("index", 5, lambda: log.edit("a", "s", -1, "x")),
        ("turn", 3, lambda: log.fork("a", "s", "new", turn=4)),
    ]
    for param, last, verb in places:
        with pytest.raises(NoSuchPlace) as refused:
            await verb()
        assert (refused.value.param, refused.value.last) == (param, last)
    assert await read(log) == record
    assert await log.get("a", "new") is None


async def test_seeded_messages_wait_for_the_first_turn(log: SessionLog) -> None:
    summary = await log.create("a", "s", messages=[user("one"), assistant("two")], metadata={"k": "v"})
    record = await read(log)
    assert (texts(record), record.rendered, record.tokens, record.turns) == (["one", "two"], 0, [], ())
    assert (record.fingerprint, record.metadata, summary) == ("", {"k": "v"}, record.summary)
    with pytest.raises(SessionExists):
        await log.create("a", "s")
    await turn(log, "s", "three", "four")
    record = await read(log)
    assert (texts(record), record.rendered) == (["one", "two", "three", "four"], 4)
    assert (record.metadata, len(record.turns)) == ({"k": "v"}, 1)


def test_what_happened_is_read_back_after_a_restart(where: Where) -> None:
    async def write(log: SessionLog) -> None:
        await log.create("a", "s", messages=[user("żółć\0🙂")], metadata={"k\0": "v\0"}, ttl=1000, pinned_until=2**33)
        await three_turns(log)
        await log.edit("a", "s", 5, "E")
        await turn(log, "s", "m", "n")
        await rewind_to_token(log, len((await read(log)).tokens))
        await log.fork("a", "s", "t", turn=2)

    async def both(log: SessionLog) -> None:
        found.append((await read(log), await read(log, "t")))

    found: list[object] = []

    async def written(log: SessionLog) -> None:
        await write(log)
        await both(log)

    with_log(where, written)
    with_log(where, both)
    assert found[0] == found[1]


async def test_a_tenants_sessions_are_unknown_to_others(log: SessionLog) -> None:
    await three_turns(log)
    await turn(log, "s", "x", "y", idempotency=Idempotency("k", "h"))
    before = await read(log)
    assert await log.get("b", "s") is None
    assert await log.summary("b", "s") is None
    assert await log.replay("b", "s", "k") is None
    assert not await log.delete("b", "s")
    assert (await log.page("b", limit=9)).items == []
    for verb in (
        lambda: log.update("b", "s", ttl=1),
        lambda: log.fork("b", "s", "t"),
        lambda: log.rewind("b", "s", turn=0),
        lambda: log.edit("b", "s", 0, "x"),
        lambda: log.rows("b", "s"),
        lambda: log.page("b", limit=9, after="s"),
    ):
        with pytest.raises(UnknownSession):
            await verb()
    await turn(log, "s", "mine", "", tenant="b")
    assert await read(log) == before
