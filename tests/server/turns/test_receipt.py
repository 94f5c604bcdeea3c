"""The cache receipt: counts, reasons and sums, from what the engine reused and what the log holds."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
from fake_engine import FACTS

from cache.tier import Tier
from scheduler.protocol import Submit, pack_ids
from scheduler.turn_receipt import Miss, Receipt
from server.chat.prompts import Prompt
from server.log.identity import Session
from server.log.logged_message import LoggedMessage
from server.log.timeline import SessionRecord
from server.schemas.objects import CacheMiss, CacheReceipt, MissReason, TokenText
from server.turns.receipt import PromptHistory, receipt_of, sum_receipts

ASKED = [LoggedMessage("user", "Hi")]
LOGGED = [*ASKED, LoggedMessage("assistant", "Ho")]
MORE = [*LOGGED, LoggedMessage("user", "Hm")]
EDITED = [LoggedMessage("user", "Ha"), *MORE[1:]]
LOG = list(range(100, 120))  # the last one was sampled and never fed


def reused_tokens(*tokens: int) -> dict[Tier, int]:
    """These of the device, the host, the disk and the remote tier; none of any other tier."""
    return dict.fromkeys(Tier, 0) | dict(zip((Tier.DEVICE, Tier.HOST, Tier.DISK, Tier.REMOTE), tokens, strict=True))


def record(tokens: Sequence[int] = LOG, fingerprint: str = FACTS.fingerprint) -> SessionRecord:
    return SessionRecord("s", list(tokens), LOGGED, fingerprint, created=0)


def decode(ids: Sequence[int]) -> str:
    return "".join(f"<{id}>" for id in ids)


def told(
    ids: Sequence[int],
    cached: int,
    miss: Miss | None = None,
    *,
    record: SessionRecord | None,
    named: bool = True,
    messages: list[LoggedMessage] = MORE,
    reusable: bool = True,
    echo: str = "",
    matched: int = 0,
    expected: int | None = None,
) -> CacheReceipt:
    engine = Receipt(len(ids), cached, miss=miss, matched=matched, expected=expected)
    prompt = Prompt(list(ids), messages, echo)
    return receipt_of(prompt, engine, PromptHistory(named, record, FACTS.fingerprint, reusable), decode)


def counts(receipt: CacheReceipt) -> tuple[int, int, int]:
    reused = receipt.reused
    assert receipt.prompt_tokens == receipt.recomputed + receipt.new + (sum(reused.values()))
    return receipt.prompt_tokens - receipt.recomputed - receipt.new, receipt.recomputed, receipt.new


def test_a_warm_turn_reuses_all_that_was_fed_and_misses_nothing() -> None:
    warm = told([*LOG, 1, 2, 3], 19, record=record())
    assert counts(warm) == (19, 0, 4)
    assert warm.miss is None


def test_tiers_are_told_apart_and_the_device_has_the_rest() -> None:
    engine = Receipt(30, 19, loaded={Tier.HOST: 5, Tier.DISK: 8, Tier.REMOTE: 2}, load_seconds=0.0123456)
    receipt = receipt_of(
        Prompt([*LOG, *range(10)], MORE), engine, PromptHistory(True, record(), FACTS.fingerprint), decode
    )
    assert receipt.reused == reused_tokens(4, 5, 8, 2)
    assert (receipt.load_ms, receipt.new, receipt.recomputed) == (12.346, 11, 0)


@pytest.mark.parametrize("miss", [Miss.EVICTED, Miss.DAMAGED, Miss.CHEAPER, Miss.NO_ROOM, Miss.NO_CHECKPOINT])
def test_the_engine_says_why_it_had_not_all_of_a_session(miss: Miss) -> None:
    cold = told([*LOG, 1, 2], 7, miss, record=record())
    assert counts(cold) == (7, 12, 3)
    assert cold.miss == CacheMiss(MissReason(miss.value), 7)


@pytest.mark.parametrize("miss", [None, Miss.DIVERGED])
def test_a_logged_history_that_the_engine_never_heard_of_was_evicted(miss: Miss | None) -> None:
    assert told([*LOG, 1, 2], 0, miss, record=record(), matched=3, expected=5).miss == CacheMiss(MissReason.EVICTED, 0)


@pytest.mark.parametrize(("cached", "missed"), [(19, False), (18, True)])
def test_one_token_of_a_prompt_is_always_fed(cached: int, missed: bool) -> None:
    again = told(LOG, cached, record=record(), messages=ASKED)  # the same prompt once more, as regenerate does
    assert (again.miss is not None) == missed


def test_at_most_one_token_of_the_common_history_is_no_miss() -> None:
    assert told([*LOG, 1, 2], 18, record=record()).miss is not None
    assert told([*LOG[:10], 1, 2, 3], 9, record=record([*LOG[:10], 7])).miss is None


def test_a_prompt_that_only_leaves_the_token_that_was_never_fed_is_no_miss() -> None:
    assert told([*LOG[:-1], 1, 2, 3], 19, record=record()).miss is None


def test_an_edited_history_is_told_by_its_first_token() -> None:
    edited = told([*LOG[:5], 7, *LOG[6:], 1], 5, Miss.DIVERGED, record=record(), messages=EDITED)
    assert counts(edited) == (5, 0, 16)
    assert edited.miss == CacheMiss(MissReason.EDITED_HISTORY, 5, TokenText(7, "<7>"), TokenText(105, "<105>"))


def test_the_same_words_as_other_tokens_are_drift() -> None:
    drifted = told([*LOG[:5], 7, *LOG[6:], 1], 5, record=record())
    assert drifted.miss == CacheMiss(MissReason.TEMPLATE_DRIFT, 5, TokenText(7, "<7>"), TokenText(105, "<105>"))


@pytest.mark.parametrize(
    ("text", "reason"), [("HiHo Hm", MissReason.TEMPLATE_DRIFT), ("Hi, Ho", MissReason.EDITED_HISTORY)]
)
def test_raw_prompts_are_compared_as_one_text(text: str, reason: MissReason) -> None:
    said = [LoggedMessage("user", text)]
    raw = told([*LOG[:5], 7, 8, 9], 5, record=record(), messages=said, echo=text)
    assert raw.miss is not None
    assert raw.miss.reason == reason


def test_where_a_history_was_both_edited_and_evicted_the_first_loss_counts() -> None:
    both = told([*LOG[:15], 7, 8, 9, 10, 11], 4, Miss.EVICTED, record=record(), messages=EDITED)
    assert both.miss == CacheMiss(MissReason.EVICTED, 4)
    assert counts(both) == (4, 11, 5)


def test_a_state_without_a_checkpoint_is_asked_why_it_had_to_go_back() -> None:
    edited = told([*LOG[:15], 7, 8, 9, 10], 4, Miss.NO_CHECKPOINT, record=record(), messages=EDITED)
    assert edited.miss is not None
    assert (edited.miss.reason, edited.miss.at) == (MissReason.EDITED_HISTORY, 15)


def test_a_log_of_another_model_is_named_as_such() -> None:
    other = told([5, 6, 7, 8], 0, Miss.DIVERGED, record=record(fingerprint="another"), expected=100)
    assert other.miss == CacheMiss(MissReason.FINGERPRINT, 0)
    assert told([5, 6, 7, 8], 3, record=record(fingerprint="another")).miss is None  # a retry: all of it is there


def test_a_new_session_has_missed_nothing() -> None:
    for known in (None, record([])):
        new = told([1, 2, 3], 1, Miss.DIVERGED, record=known, matched=1, expected=9)
        assert new.miss is None
        assert counts(new) == (1, 0, 2)


def test_an_unnamed_conversation_is_told_where_it_left_the_tenants_own_cache() -> None:
    unnamed = told([1, 2, 3, 4], 1, Miss.DIVERGED, record=None, named=False, matched=2, expected=9)
    assert unnamed.miss == CacheMiss(MissReason.DIVERGED, 2, TokenText(3, "<3>"), TokenText(9, "<9>"))
    assert told([1, 2, 3], 0, record=None, named=False).miss is None
    assert told([1, 2, 3], 0, Miss.EVICTED, record=None, named=False).miss == CacheMiss(MissReason.EVICTED, 0)


def test_a_prompt_that_ends_where_the_cache_goes_on_has_no_diverging_token() -> None:
    short = told([1, 2, 3, 4], 1, Miss.DIVERGED, record=None, named=False, matched=4, expected=9)
    assert short.miss == CacheMiss(MissReason.DIVERGED, 4, None, TokenText(9, "<9>"))


def test_where_nothing_may_be_skipped_nothing_is_missed() -> None:
    whole = told([*LOG, 1, 2], 0, record=record(), reusable=False)
    assert whole.miss is None
    assert counts(whole) == (0, 19, 3)


@pytest.mark.parametrize(
    ("facts", "prompt_logprobs", "reusable"),
    [({}, None, True), ({}, 0, False), ({"encoder_decoder": True}, None, False), ({"mode": "recomputed"}, None, False)],
)
def test_what_may_be_skipped_depends_on_model_and_request(
    facts: dict[str, object], prompt_logprobs: int | None, reusable: bool
) -> None:
    submit = Submit("t", "default", pack_ids([1]), prompt_logprobs=prompt_logprobs)
    served = msgspec.structs.replace(FACTS, **facts)
    past = PromptHistory.of(Session("default", "s", stateful=True), None, served, "f", submit)
    assert (past.reusable, past.named) == (reusable, True)
    assert not PromptHistory.of(None, None, served, "f", submit).named


def test_several_prompts_add_up_and_the_first_miss_counts() -> None:
    first = CacheReceipt(10, reused_tokens(1, 2, 3, 4), 0, 0, 0.5)
    second = CacheReceipt(5, reused_tokens(1, 0, 0, 0), 2, 2, 0.25, miss=CacheMiss(MissReason.EVICTED, 1))
    third = CacheReceipt(1, reused_tokens(0, 0, 0, 0), 0, 1, 0, miss=CacheMiss(MissReason.DAMAGED, 0))
    total = sum_receipts([first, second, third], 0.0021)
    assert total == CacheReceipt(16, reused_tokens(2, 2, 3, 4), 2, 3, 0.75, 2.1, CacheMiss(MissReason.EVICTED, 1))
    assert sum_receipts([first], None).prefill_ms is None
