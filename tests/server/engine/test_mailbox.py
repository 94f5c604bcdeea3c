"""The mailbox of a turn: bounded where nobody reads, and a reader that is there never notices."""

import pytest
from scripted_process import piece, read

from scheduler.protocol import Delta, FinishReason, TokenLogprob
from scheduler.turn_receipt import Receipt
from server.engine import mailbox
from server.engine.mailbox import MERGE_AT, Mailbox
from server.errors import ApiError


def delta(number: int, finish: FinishReason | None = None) -> Delta:
    return Delta("t", (number,), f"{number} ", finish)


ENTRY = TokenLogprob(1, "a", b"a", -0.5, ((1, "a", b"a", -0.5),) * 20)


async def test_what_nobody_reads_is_bounded_and_the_turn_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mailbox, "BACKLOG", 100_000)
    cancelled: list[str] = []
    turn = Mailbox("t", cancelled.append)
    pushed = 0
    while not cancelled:
        turn.push(Delta("t", (1,), "a", logprobs=(ENTRY,)))
        pushed += 1
        assert len(turn._deltas) < MERGE_AT
        assert turn._packed_bytes == sum(map(len, turn._packed)) <= 100_000
    assert cancelled == ["t"]
    assert 100_000 / 400 < pushed < 100_000 / 100  # bytes of a token with twenty alternatives
    assert not turn._deltas
    with pytest.raises(ApiError) as told:
        await piece(turn)
    assert told.value.body.error.code == "reader_too_slow"


def test_a_minute_of_twenty_alternatives_may_wait() -> None:
    """A hundred tokens a second, which is fast, that are all there when the reader comes."""
    cancelled: list[str] = []
    turn = Mailbox("t", cancelled.append)
    for _ in range(6000):
        turn.push(Delta("t", (1,), "a", logprobs=(ENTRY,)))
    turn.push(delta(-1, FinishReason.STOP))
    assert cancelled == []
    pieces = []
    while (taken := turn.take()) is not None:
        pieces.append(taken)
    assert max(len(one.tokens) for one in pieces) == MERGE_AT  # so that no single event is huge
    assert sum((one.logprobs for one in pieces), ()) == (ENTRY,) * 6000


async def test_nothing_is_lost_or_doubled_by_the_merging() -> None:
    turn = Mailbox("t", lambda name: None)
    for number in range(3 * MERGE_AT + 5):
        turn.push(delta(number))
    turn.push(delta(-1, FinishReason.STOP))
    got = await read(turn)
    assert [token for delta in got for token in delta.tokens] == [*range(3 * MERGE_AT + 5), -1]
    assert "".join(delta.text for delta in got) == "".join(f"{n} " for n in [*range(3 * MERGE_AT + 5), -1])
    assert got[-1].finish_reason is FinishReason.STOP


def test_a_patient_reader_is_told_of_the_receipt_of_many_and_of_the_end() -> None:
    turn = Mailbox("t", lambda name: None)
    heard: list[Delta] = []
    turn.patience, turn.heard = 3, lambda delta, at: heard.append(delta)

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
    failed = Mailbox("t", lambda name: None)
    failed.patience = 3
    failed.fail(ApiError(400, "no"))
    assert failed.news.is_set()
