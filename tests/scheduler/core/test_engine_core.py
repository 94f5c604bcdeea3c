"""The engine: refusals, ends, cancellations, failures. Exactly one end per turn, and the KV stays."""

from __future__ import annotations

import pytest
from engine_kit import END, PAGE, Kit, Outcome, failing
from msgspec.structs import replace
from tiny_models import greedy, make_tokenizer

from cache.tier import Tier
from scheduler.core.turn_limits import Limits
from scheduler.protocol import FinishReason, Forget, Forgotten, Submit, pack_ids, unpack_ids
from scheduler.sampling_params import Sampling, Stopping


def reused(outcome: Outcome) -> int:
    """The cached tokens of its receipt."""
    return outcome.receipt.cached


def prompt_that_repeats_nothing(kit: Kit, length: int) -> tuple[list[int], list[int]]:
    """A prompt whose first ``length`` greedy tokens are all different, and these tokens."""
    for start in range(100):
        prompt = [start, start + 50, start + 20]
        tokens = greedy(kit.model, prompt, length)
        if len(set(tokens)) == length and END not in tokens:
            return prompt, tokens
    raise AssertionError("no such prompt")


# -- refusals -------------------------------------------------------------------------------------------------------


def test_a_full_queue_refuses() -> None:
    kit = Kit(max_running=1, max_queued=2)
    kit.send([1], 5)
    kit.step()
    kit.send([2], 1)
    kit.send([3], 1)
    with pytest.raises(ValueError, match="queue_full"):
        kit.send([4], 1)
    kit.run()
    assert len(kit.outcomes) == 3
    kit.ask([4], 1)


def test_one_tenant_does_not_fill_the_queue_for_the_others() -> None:
    kit = Kit(max_running=1, max_queued=2)
    kit.send([1], 5)
    kit.step()
    waiting = [kit.send([2], 1), kit.send([3], 1, session="s")]
    other = kit.send([4], 1, tenant="b")
    (refused,) = kit.engine.take_refusals()
    assert (refused.turn, refused.code) == (waiting[-1], "queue_full")
    assert kit.engine.take_refusals() == []
    with pytest.raises(ValueError, match="queue_full"):
        kit.send([5], 1, tenant="b")  # one of each waits
    kit.run()
    assert kit.outcomes[other].finish_reason is FinishReason.LENGTH
    assert kit.outcomes[waiting[0]].finish_reason is FinishReason.LENGTH
    kit.ask([3], 1, session="s")  # its name is free again


def test_a_queue_overfilled_by_preempted_turns_refuses_and_the_engine_lives() -> None:
    kit = Kit(pages=60, max_running=4, max_queued=4)
    sent = [kit.send([number, *range(30, 50)], 60) for number in range(4)]
    while len(kit.scheduler.running) < 4:
        kit.step()
    sent += [kit.send([100 + number, *range(60, 130)], 1) for number in range(4)]
    while len(kit.scheduler.waiting) <= 4:
        kit.step()
    with pytest.raises(ValueError, match="queue_full"):
        kit.send([99], 1, tenant="b")
    kit.run()
    assert all(kit.outcomes[turn].finish_reason is FinishReason.LENGTH for turn in sent)


def test_a_session_runs_one_turn_at_a_time() -> None:
    kit = Kit()
    first = kit.send([1, 2], 4, session="s")
    with pytest.raises(ValueError, match="session_busy"):
        kit.send([1, 2, 3], 1, session="s")
    kit.step()
    with pytest.raises(ValueError, match="session_busy"):
        kit.send([1, 2, 3], 1, session="s")
    kit.send([1, 2, 3], 1, session="other")
    kit.send([1, 2, 3], 1, session="s", tenant="b")
    kit.run()
    prompt = [1, 2, *kit.outcomes[first].tokens, 9]
    assert reused(kit.ask(prompt, 1, session="s")) == 5


@pytest.mark.parametrize(
    ("length", "count", "fits"), [(30, 2, True), (30, 3, False), (32, 0, True), (33, 0, False), (32, 1, False)]
)
def test_the_context_is_kept(length: int, count: int, fits: bool) -> None:
    kit = Kit(context=32)
    if fits:
        assert len(kit.ask([1] * length, count).tokens) == count
    else:
        with pytest.raises(ValueError, match="context_length_exceeded"):
            kit.send([1] * length, count)
    assert kit.engine.idle


def test_without_max_tokens_a_turn_ends_with_the_context() -> None:
    kit = Kit(context=32)
    prompt = list(range(20))
    outcome = kit.ask(prompt, stopping=Stopping(ignore_eos=True))
    assert outcome.tokens == greedy(kit.model, prompt, 12, outcome.tokens)
    assert outcome.finish_reason is FinishReason.LENGTH
    with pytest.raises(ValueError, match="context_length_exceeded"):
        kit.send([1] * 32, stopping=Stopping())


@pytest.mark.parametrize("prompt", [[], [-1], [5, 259], [2**31 - 1]])
def test_prompts_that_are_none_are_refused(prompt: list[int]) -> None:
    kit = Kit()
    with pytest.raises(ValueError, match="invalid_prompt"):
        kit.send(prompt, 1)
    assert kit.engine.idle


# -- how turns end --------------------------------------------------------------------------------------------------


def test_max_tokens_zero_only_fills_the_cache() -> None:
    kit = Kit(step_tokens=8)
    outcome = kit.ask(list(range(20)), 0)
    assert outcome.tokens == []
    assert outcome.text == ""
    assert outcome.finish_reason is FinishReason.LENGTH
    assert reused(kit.ask(list(range(25)), 1)) == 20


def test_a_stop_token_ends_the_turn_and_shows_nothing() -> None:
    kit = Kit()
    prompt, tokens = prompt_that_repeats_nothing(kit, 6)
    outcome = kit.ask(prompt, stopping=Stopping(max_tokens=20, stop_token_ids=(tokens[4], 999), ignore_eos=True))
    assert outcome.tokens == tokens[:5]
    assert outcome.finish_reason is FinishReason.STOP
    assert outcome.deltas[-1].stop == tokens[4]
    assert outcome.text == bytes(tokens[:4]).decode(errors="replace")
    # The token that ended the turn was never fed.
    assert reused(kit.ask([*prompt, *tokens, 1], 1)) == len(prompt) + 4


def test_min_tokens_and_an_end_of_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    kit = Kit()
    prompt, tokens = prompt_that_repeats_nothing(kit, 6)
    monkeypatch.setattr(kit.engine._stop_checker, "_eos_token_ids", frozenset({tokens[2]}))
    monkeypatch.setattr(kit.engine._sampler, "_eos", (tokens[2],))
    outcome = kit.ask(prompt, stopping=Stopping(max_tokens=6))
    assert (outcome.tokens, outcome.finish_reason) == (tokens[:3], FinishReason.STOP)
    assert outcome.deltas[-1].stop is None
    ignoring = kit.ask(prompt, stopping=Stopping(max_tokens=6, ignore_eos=True))
    assert (ignoring.tokens, ignoring.finish_reason) == (tokens, FinishReason.LENGTH)
    # At least two tokens: the third may be the end. At least three: another one is drawn in its place.
    assert kit.ask(prompt, stopping=Stopping(max_tokens=6, min_tokens=2)).tokens == tokens[:3]
    longer = kit.ask(prompt, stopping=Stopping(max_tokens=6, min_tokens=3)).tokens
    assert longer[:2] == tokens[:2]
    assert longer[2] != tokens[2]
    assert len(longer) > 3


def test_a_stop_string_ends_the_turn_across_tokens() -> None:
    kit = Kit()
    bias = Sampling(temperature=0.0, logit_bias=dict.fromkeys(b"abc", 100.0))
    whole = kit.ask([1, 2], 30, sampling=bias).text
    assert set(whole) <= set("abc")
    stop = whole[9:12]
    at = whole.index(stop)
    outcome = kit.ask([1, 2], 30, sampling=bias, stop=(stop, "zzz"))
    assert outcome.text == whole[:at]
    assert outcome.deltas[-1].stop == stop
    assert outcome.finish_reason is FinishReason.STOP
    assert len(outcome.tokens) == at + 3
    late = kit.ask(
        [1, 2], sampling=bias, stopping=Stopping(max_tokens=30, min_tokens=30, stop=(stop,), ignore_eos=True)
    )
    assert len(late.tokens) == 30


def test_text_is_what_the_tokens_decode_to() -> None:
    kit = Kit()
    for start in range(10):
        outcome = kit.ask([start, 3, 4], 20)
        assert outcome.text == make_tokenizer().decode(outcome.tokens, skip_special_tokens=True)


# -- cancellation ---------------------------------------------------------------------------------------------------


def test_cancelled_while_waiting() -> None:
    kit = Kit(max_running=1)
    kit.send([1], 3)
    kit.step()
    waiting = kit.send([2], 3)
    kit.cancel(waiting)
    kit.run()
    assert kit.outcomes[waiting].finish_reason is FinishReason.CANCELLED
    assert not kit.outcomes[waiting].admitted
    assert kit.outcomes[waiting].tokens == []


def test_cancelled_while_prefilling_the_kv_stays() -> None:
    kit = Kit(step_tokens=8)
    prompt = list(range(40))
    turn = kit.send(prompt, 3)
    kit.step(2)
    kit.cancel(turn)
    kit.step()
    assert kit.outcomes[turn].finish_reason is FinishReason.CANCELLED
    assert reused(kit.ask_checked(prompt, 2)) == 16


def test_cancelled_with_text_held_back_that_is_told_too() -> None:
    kit = Kit()
    free = kit.ask([5, 6, 7], 6)
    stop = free.text[-1] + "\x00"  # its first half is always there, its second never
    turn = kit.send([5, 6, 7], 30, stop=(stop,))
    kit.step(6)
    assert kit.outcomes[turn].text == free.text[:-1]
    kit.cancel(turn)
    kit.step()
    assert (kit.outcomes[turn].text, kit.outcomes[turn].tokens) == (free.text, free.tokens)


def test_cancelled_while_decoding_the_kv_stays() -> None:
    kit = Kit()
    turn = kit.send([5, 6, 7], 30)
    kit.step(6)
    kit.cancel(turn)
    tokens = list(kit.outcomes[turn].tokens)
    kit.step()
    assert kit.engine.idle
    assert kit.outcomes[turn].finish_reason is FinishReason.CANCELLED
    assert kit.outcomes[turn].tokens == tokens
    assert len(tokens) == 6
    assert reused(kit.ask([5, 6, 7, *tokens, 9], 1)) == 3 + 5  # the last one was pending


def test_a_cancel_that_comes_late_or_for_nobody_is_ignored() -> None:
    kit = Kit()
    turn = kit.send([1], 1)
    kit.run()
    kit.cancel(turn)
    kit.cancel("nobody")
    assert kit.engine.step().deltas == ()


def test_forget_cancels_the_turn_and_drops_the_session() -> None:
    kit = Kit()
    kit.ask([1, 2, 3, 4], 2, session="s")
    turn = kit.send([1, 2, 3, 4, 5], 9, session="s")
    kit.step()
    for session in ("s", "unknown"):
        kit.engine.end("a", session)
        kit.commands.forget(Forget("a", session, 7))
    assert kit.commands.take() == [Forgotten("a", "s", 7), Forgotten("a", "unknown", 7)]
    kit.run()
    kit.step()
    assert kit.outcomes[turn].finish_reason is FinishReason.CANCELLED
    assert kit.engine.stats().sessions == 0
    assert kit.engine.stats().tier(Tier.DEVICE).used == 0
    assert reused(kit.ask([1, 2, 3, 4, 5], 1)) == 0


def test_stop_ends_every_turn_once() -> None:
    kit = Kit(max_running=2)
    turns = [kit.send([i], 20) for i in range(5)]
    kit.step()
    last = kit.engine.stop()
    for delta in last.deltas:
        kit.outcomes[delta.turn].add(delta)
    assert {kit.outcomes[turn].finish_reason for turn in turns} == {FinishReason.CANCELLED}
    assert kit.engine.idle
    assert (last.stats.running, last.stats.waiting) == (0, 0)
    kit.engine.check_integrity()


# -- failures -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), ValueError("odd"), IndexError(), AssertionError("x")])
def test_a_model_that_raises_ends_the_turns_of_that_step_and_no_others(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    kit = Kit(max_running=2)
    kit.ask([7, 8, 9], 2)
    turns = [kit.send([i, 1], 5) for i in range(2)]
    waiting = kit.send([50, 1], 3)
    kit.step()
    with monkeypatch.context() as patch:
        patch.setattr(kit.mode, "forward", failing(error))
        kit.step()
    for turn in turns:
        assert kit.outcomes[turn].finish_reason is FinishReason.ERROR
        assert kit.outcomes[turn].deltas[-1].error
    kit.run()
    assert kit.outcomes[waiting].tokens == greedy(kit.model, [50, 1], 3, kit.outcomes[waiting].tokens)
    # What was fed before the failure is still right.
    prompt = [0, 1, *kit.outcomes[turns[0]].tokens, 3]
    assert reused(kit.ask_checked(prompt, 3)) == 2


def test_states_that_a_failed_step_left_half_way_are_not_used_again() -> None:
    """A recurrent layer cannot go back: what ran before the failure has moved on already."""
    kit = Kit("qwen3_next")
    prompt = list(range(20))
    want = greedy(kit.model, prompt, 12)
    turn = kit.send(prompt, 12)
    kit.step(5)
    hook = kit.model.model.norm.register_forward_pre_hook(failing(RuntimeError("after all layers")))
    try:
        kit.step()
    finally:
        hook.remove()
    made = kit.outcomes[turn].tokens
    assert kit.outcomes[turn].finish_reason is FinishReason.ERROR
    assert made == want[: len(made)]
    assert kit.ask([*prompt, *made], 12 - len(made)).tokens == want[len(made) :]


def test_a_failure_in_sampling_ends_the_turns_of_that_step(monkeypatch: pytest.MonkeyPatch) -> None:
    kit = Kit()
    turn = kit.send([1, 2, 3], 5)
    with monkeypatch.context() as patch:
        patch.setattr(kit.engine._sampler, "draw", failing(IndexError("no such token")))
        kit.step()
    assert kit.outcomes[turn].finish_reason is FinishReason.ERROR
    kit.ask_checked([1, 2, 3], 3)


def test_a_reply_that_cannot_be_decoded_ends_its_own_turn_only(monkeypatch: pytest.MonkeyPatch) -> None:
    kit = Kit()
    bad, good = kit.send([1, 2], 4), kit.send([3, 4], 4)
    found = kit.scheduler.find(bad)
    assert found is not None
    monkeypatch.setattr(found.text, "push", failing(ValueError("no text")))
    kit.run()
    assert kit.outcomes[bad].finish_reason is FinishReason.ERROR
    assert kit.outcomes[good].tokens == greedy(kit.model, [3, 4], 4, kit.outcomes[good].tokens)
    assert kit.outcomes[good].finish_reason is FinishReason.LENGTH


def test_an_error_says_nothing_of_the_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    kit = Kit()
    turn = kit.send([1], 2)
    monkeypatch.setattr(kit.mode, "forward", failing(RuntimeError("secret path")))
    kit.step()
    assert "secret" not in (kit.outcomes[turn].deltas[-1].error or "")


def test_what_a_model_embeds_but_does_not_say_is_refused_where_it_is_asked_for() -> None:
    limits = Limits(100, 259, width=250)
    plain = Submit("t", "a", pack_ids([255]), None, Sampling(), Stopping(max_tokens=1))
    assert limits.refuse(plain, unpack_ids(plain.prompt)) is None
    for asked in (replace(plain, prompt_logprobs=0), replace(plain, sampling=Sampling(logit_bias={255: 1.0}))):
        refused = limits.refuse(asked, unpack_ids(asked.prompt))
        assert refused is not None
        assert refused.code == "invalid_prompt"


# -- what is told ---------------------------------------------------------------------------------------------------


def test_the_first_news_of_a_turn_is_its_receipt_even_while_it_prefills() -> None:
    kit = Kit(step_tokens=4)
    turn = kit.send(list(range(12)), 2)
    kit.step()
    assert [(d.receipt is not None, d.tokens) for d in kit.outcomes[turn].deltas] == [(True, ())]
    kit.run()
    assert [d.receipt is not None for d in kit.outcomes[turn].deltas] == [True, False, False]
    assert [d.finish_reason is not None for d in kit.outcomes[turn].deltas] == [False, False, True]


def test_counters_and_gauges() -> None:
    kit = Kit()
    kit.ask(list(range(10)), 4)
    kit.ask(list(range(12)), 3)
    stats = kit.engine.stats()
    assert (stats.prompt_tokens, stats.cached_tokens, stats.generated_tokens) == (22, 10, 7)
    assert (stats.running, stats.waiting, stats.sessions) == (0, 0, 2)
    assert stats.tier(Tier.DEVICE).used == kit.pool.device.used > 0
    assert stats.tier(Tier.DEVICE).capacity == 512
    assert stats.steps == 4 + 3
    kit.send([1], 1)
    assert kit.engine.stats().waiting == 1


def test_a_step_with_nothing_to_do_runs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    kit = Kit()
    monkeypatch.setattr(kit.runner, "run", failing(AssertionError("the model ran")))
    outputs = kit.engine.step()
    assert outputs.deltas == ()
    assert outputs.stats.steps == 0


def test_many_turns_of_all_sorts_leave_no_page_behind() -> None:
    kit = Kit(pages=40, host_pages=10, step_tokens=16)
    for round_ in range(6):
        turns = [
            kit.send(
                [round_, i, *range(i)],
                2 + i,
                session=f"s{i}" if i % 2 else None,
                tenant="ab"[i % 2],
                prompt_logprobs=0 if i == 3 else None,
            )
            for i in range(8)
        ]
        kit.step()
        kit.cancel(turns[round_])
        kit.run()
        assert all(kit.outcomes[turn].finish_reason is not None for turn in turns)
    for session in [*kit.store.residency.warm, *kit.store.residency.hosted]:
        kit.store.discard(session)
    assert kit.pool.device.used == kit.pool.host.used == 0
    assert kit.scheduler._turns == {}
    assert kit.scheduler._names == set()


def test_pages_are_crossed_at_every_offset() -> None:
    kit = Kit()
    want = greedy(kit.model, [1, 2, 3], 2 * PAGE)
    for offset in range(2 * PAGE):
        prompt = [1, 2, 3, *want[:offset]]
        assert kit.ask(prompt, 2 * PAGE - offset).tokens == want[offset:]
