"""Speculation changes no reply: the same tokens, text, log-probabilities and cache with it and without."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from engine_kit import Kit, Outcome
from tiny_models import CONTEXT

from scheduler.core.drafters import HistoryDrafter
from scheduler.core.speculator import Speculator
from scheduler.protocol import Cancel, DraftSource
from scheduler.sampling_params import Sampling, Stopping

SCHEMA = {"type": "object", "properties": {"kind": {"enum": ["alpha", "beta"]}}, "required": ["kind"]}
GRAMMAR = json.dumps({"grammars": [{"json_schema": {**SCHEMA, "additionalProperties": False}}]})
ONE_WORD = Sampling(temperature=0.0, logit_bias={65: 50.0})
KINDS = ["llama", "gemma2", "gemma3", "gpt_oss", "qwen3", "deepseek_v3", "falcon", "longrope"]


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts are fed whenever there are any, whatever they cost."""
    monkeypatch.setattr(Speculator, "_worth", lambda self, draft, *_: (len(draft.ids), 1.0))


def turns_of(seed: int, count: int) -> list[dict[str, Any]]:
    """Turns of all sorts. Few tokens are likely in most of them, so that something repeats."""
    draw = random.Random(seed)
    turns: list[dict[str, Any]] = []
    for number in range(count):
        part = [draw.randrange(5) + 65 for _ in range(draw.randrange(2, 9))]
        prompt = (part * 6)[: draw.randrange(4, 40)]
        sampled = draw.random() < 0.5
        sampling = Sampling(
            temperature=draw.choice([0.3, 1.0]) if sampled else 0.0,
            top_k=draw.choice([0, 2, 3]),
            top_p=draw.choice([1.0, 0.8]),
            frequency_penalty=draw.choice([0.0, 0.0, 0.4]),
            repetition_penalty=draw.choice([1.0, 1.0, 1.2]),
            logit_bias=dict.fromkeys(range(65, 68), 12.0) if draw.random() < 0.6 else {},
            bad_words=((66, 67),) if draw.random() < 0.1 else (),
            seed=seed * 1000 + number,
        )
        stopping = Stopping(
            max_tokens=draw.randrange(1, 25),
            min_tokens=draw.choice([0, 3]),
            stop=draw.choice([(), (), ("AAB",), ("C",)]),
            stop_token_ids=draw.choice([(), (67,)]),
            ignore_eos=draw.random() < 0.5,
        )
        turns.append(
            {
                "prompt": prompt,
                "sampling": sampling,
                "stopping": stopping,
                "logprobs": draw.choice([None, 0, 2]),
                "grammar": GRAMMAR if draw.random() < 0.2 else None,
                "session": f"s{number}" if draw.random() < 0.3 else None,
            }
        )
    return turns


def replies(kit: Kit, turns: list[dict[str, Any]], predictions: list[list[int]] | None = None) -> list[Outcome]:
    """The outcomes of turns, several at once."""
    sent = []
    for number, turn in enumerate(turns):
        more: dict[str, Any] = {} if predictions is None else {"prediction": predictions[number]}
        sent.append(kit.send(**turn, **more))
        for _ in range(number % 3):
            kit.step()
    kit.run()
    return [kit.outcomes[turn] for turn in sent]


def assert_same(ours: list[Outcome], theirs: list[Outcome]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert (one.tokens, one.text, one.finish_reason) == (other.tokens, other.text, other.finish_reason)
        assert [delta.stop for delta in one.deltas if delta.tokens] == [d.stop for d in other.deltas if d.tokens]
        mine, yours = ([entry for delta in out.deltas for entry in delta.logprobs] for out in (one, other))
        for entry, same in zip(mine, yours, strict=True):
            assert entry.token_id == same.token_id
            assert entry.logprob == pytest.approx(same.logprob, abs=1e-5)
            assert [top[0] for top in entry.top] == [top[0] for top in same.top]


def guesses(outcomes: list[Outcome], seed: int) -> list[list[int]]:
    """The replies with a wrong token here and there, for predictions."""
    draw = random.Random(seed)
    return [[t if draw.random() < 0.85 else 70 for t in out.tokens] for out in outcomes]


@pytest.mark.parametrize("name", KINDS)
def test_the_same_bytes(name: str, eager: None) -> None:
    turns = turns_of(KINDS.index(name), 9)
    plain = replies(Kit(name), turns)
    kit = Kit(name, speculates=True)
    assert_same(replies(kit, turns, guesses(plain, 1)), plain)
    assert sum(kit.speculator.accepted.values()) > 10
    assert kit.speculator.drafted[DraftSource.PREDICTION] > kit.speculator.accepted[DraftSource.PREDICTION] > 0
    again = [{**turn, "prompt": turn["prompt"] + out.tokens + [65]} for turn, out in zip(turns, plain, strict=True)]
    assert_same(replies(kit, again), replies(Kit(name), again))  # on what the first ones have left


def test_sources_of_drafts(eager: None) -> None:
    kit = Kit(speculates=True)
    out = kit.ask([65] * 12, 20, sampling=ONE_WORD)
    drafted, accepted = out.deltas[-1].drafts[DraftSource.HISTORY]
    assert drafted >= accepted >= 15
    assert len(out.tokens) == 20
    assert kit.engine.stats().accepted == {"history": accepted}
    steps = kit.engine.stats().steps
    assert steps < 8  # of 21 tokens


@pytest.fixture
def forgetful(monkeypatch: pytest.MonkeyPatch, eager: None) -> None:
    """A turn's own history proposes nothing."""
    monkeypatch.setattr(HistoryDrafter, "propose", lambda *_: None)


def test_what_another_session_of_the_tenant_said_is_proposed(forgetful: None) -> None:
    kit = Kit(speculates=True)
    kit.ask([1, 2, 3], 30, session="first", sampling=ONE_WORD)
    drafted, accepted = kit.ask([4, 5], 24, sampling=ONE_WORD).deltas[-1].drafts[DraftSource.SESSIONS]
    assert drafted >= accepted > 8
    assert kit.ask([4, 5], 24, tenant="b", sampling=ONE_WORD).deltas[-1].drafts == {}
    assert kit.ask([4, 5], 24, salt="own", sampling=ONE_WORD).deltas[-1].drafts == {}


def test_a_deleted_session_is_not_proposed_any_more(forgetful: None) -> None:
    kit = Kit(speculates=True)
    kit.ask([1, 2, 3], 30, session="first", sampling=ONE_WORD)
    kit.store.forget("a", "first")
    assert kit.ask([4, 5], 24, sampling=ONE_WORD).deltas[-1].drafts == {}


def test_a_forced_part_of_a_grammar_is_proposed(eager: None) -> None:
    kit = Kit(speculates=True)
    out = kit.ask([65, 66], 40, grammar=GRAMMAR, ignore_eos=False)
    drafted, accepted = out.deltas[-1].drafts[DraftSource.GRAMMAR]
    assert drafted >= accepted > 3
    assert json.loads(out.text)["kind"] in ("alpha", "beta")


def test_a_turn_that_does_not_want_it_is_not_drafted_for(eager: None) -> None:
    kit = Kit(speculates=True)
    out = kit.ask([65] * 12, 12, sampling=ONE_WORD, speculate=False)
    assert out.deltas[-1].drafts == {}


def test_a_full_context_ends_the_turn_where_it_did(eager: None) -> None:
    asked: dict[str, Any] = {"sampling": ONE_WORD, "stopping": Stopping(ignore_eos=True)}
    plain = Kit().ask([65] * (CONTEXT - 9), **asked)
    ours = Kit(speculates=True).ask([65] * (CONTEXT - 9), **asked)
    assert (ours.tokens, ours.finish_reason) == (plain.tokens, plain.finish_reason)
    assert len(ours.tokens) == 9


def test_a_step_without_room_drafts_nothing(eager: None) -> None:
    kit = Kit(speculates=True, step_tokens=4)
    turns = [kit.send([65] * 12, 12, sampling=ONE_WORD) for _ in range(4)]
    while any(kit.engine.scheduler.find(turn) for turn in turns):
        before = kit.engine.stats().generated_tokens
        kit.step()
        assert kit.engine.stats().generated_tokens - before <= 4


def test_a_cancelled_turn_leaves_what_it_has_said(eager: None) -> None:
    kit = Kit(speculates=True)
    turn = kit.send([65] * 12, 40, sampling=ONE_WORD)
    for _ in range(4):
        kit.step()
    kit.engine.cancel(Cancel(turn))
    kit.run()
    said = len(kit.outcomes[turn].tokens)
    again = kit.ask([65] * (12 + said) + [66], 2)
    assert again.receipt is not None
    assert again.receipt.cached >= 12 + said - 1


def test_overlapping_steps_say_the_same(eager: None) -> None:
    turns = turns_of(5, 16)
    plain = replies(Kit(overlaps=True), turns)
    kit = Kit(overlaps=True, speculates=True)
    assert_same(replies(kit, turns, guesses(plain, 2)), plain)
    assert sum(kit.speculator.accepted.values()) > 20


def test_drafting_stops_where_nothing_is_accepted() -> None:
    kit = Kit(speculates=True)
    wrong = [[90] * 40] * 6
    turns: list[dict[str, Any]] = [{"prompt": [65, 70, number], "count": 40} for number in range(6)]
    replies(kit, turns, wrong)
    assert kit.speculator.drafted[DraftSource.PREDICTION] < 80
