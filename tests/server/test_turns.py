"""The mailbox of a turn: bounded where nobody reads, and a reader that is there never notices."""

import asyncio

import pytest
from scripted_process import piece, read

from scheduler.messages import Delta, FinishReason, Receipt, TokenLogprob
from server import turns
from server.errors import ApiError
from server.turns import BACKLOG, MERGE_AT, Turn


def delta(number: int, finish: FinishReason | None = None) -> Delta:
    return Delta("t", (number,), f"{number} ", finish)


def test_what_nobody_reads_is_bounded_and_the_turn_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "READER_SECONDS", -1.0)
    cancelled: list[str] = []
    turn = Turn("t", cancelled.append)
    for number in range(BACKLOG):
        turn.push(delta(number))
        assert len(turn._deltas) <= MERGE_AT
    assert cancelled == []
    for number in range(100):
        turn.push(delta(number))
    assert cancelled == ["t"]
    assert turn._deltas == []

    async def reads() -> None:
        with pytest.raises(ApiError) as told:
            await piece(turn)
        assert told.value.body.error.code == "reader_too_slow"

    asyncio.run(reads())


def test_log_probabilities_count_by_their_alternatives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "READER_SECONDS", -1.0)
    cancelled: list[str] = []
    turn = Turn("t", cancelled.append)
    entry = TokenLogprob(1, "a", b"a", -0.5, ((1, "a", b"a", -0.5),) * 20)
    for _ in range(BACKLOG // 22 + 1):
        turn.push(Delta("t", (1,), "a", logprobs=(entry,)))
    assert cancelled == ["t"]


def test_a_reader_that_was_here_lately_has_time() -> None:
    cancelled: list[str] = []
    turn = Turn("t", cancelled.append)
    for number in range(2 * BACKLOG):
        turn.push(delta(number))
    assert cancelled == []


def test_nothing_is_lost_or_doubled_by_the_merging() -> None:
    async def reads() -> None:
        turn = Turn("t", lambda name: None)
        for number in range(3 * MERGE_AT + 5):
            turn.push(delta(number))
        turn.push(delta(-1, FinishReason.STOP))
        got = await read(turn)
        assert [token for delta in got for token in delta.tokens] == [*range(3 * MERGE_AT + 5), -1]
        assert "".join(delta.text for delta in got) == "".join(f"{n} " for n in [*range(3 * MERGE_AT + 5), -1])
        assert got[-1].finish_reason is FinishReason.STOP

    asyncio.run(reads())


def test_a_patient_reader_is_told_of_the_receipt_of_many_and_of_the_end() -> None:
    turn = Turn("t", lambda name: None)
    heard: list[Delta] = []
    turn.patience, turn.heard = 3, heard.append

    def told() -> bool:
        was = turn.news.is_set()
        turn.news.clear()
        return was

    def after(came: Delta) -> bool:
        turn.push(came)
        return told()

    assert after(Delta("t", receipt=Receipt(1, 0)))
    assert [after(delta(number)) for number in range(3)] == [False, False, True]
    taken = turn.take()
    assert taken is not None
    assert taken.tokens == (0, 1, 2)
    assert [after(delta(3)), after(delta(4, FinishReason.STOP))] == [False, True]
    assert [one.tokens for one in heard] == [(), (0,), (1,), (2,), (3,), (4,)]
    failed = Turn("t", lambda name: None)
    failed.patience = 3
    failed.fail(ApiError(400, "no"))
    assert failed.news.is_set()
