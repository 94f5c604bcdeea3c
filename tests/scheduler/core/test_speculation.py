"""Speculation changes no reply: the same tokens, text, log-probabilities and cache with it and without."""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine_kit import Kit
from speculation_kit import GRAMMAR, KINDS, Walk, assert_same, feed_all_drafts, guess, make_turns, run_turns
from tiny_models import CONTEXT
from wide import widely

from cache.memory.codec import Codec
from cache.pages.session import Position, SessionCache
from cache.segments.chain import Owner
from scheduler.core.constraint import Constraint
from scheduler.core.drafters import Draft, HistoryDrafter
from scheduler.core.engine_core import EngineCore
from scheduler.core.launched_step import DraftedRows, LaunchedStep
from scheduler.core.sessions_index import SessionsIndex
from scheduler.core.speculator import Speculator
from scheduler.core.turn import Turn
from scheduler.protocol import Cancel, DraftSource
from scheduler.sampling_params import Sampling, Stopping

ONE_WORD = Sampling(temperature=0.0, logit_bias={65: 50.0})


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts are fed whenever there are any, whatever they cost."""
    feed_all_drafts(monkeypatch)


@pytest.mark.parametrize("kind", widely(KINDS, "llama"))
def test_the_same_bytes(kind: str, eager: None) -> None:
    walk = Walk(kind, seed=7)
    walk.run(20 if kind in ("llama", "gemma3") else 10)  # the others are slow
    drafted, accepted = sum(walk.drafted.values()), sum(walk.accepted.values())
    assert drafted - 20 > accepted > 20


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_bytes_of_many_turns(kind: str, eager: None) -> None:
    walk = Walk(kind, seed=int(os.environ.get("SPECULATION_SEED", "1")))
    walk.run(-(-int(os.environ.get("SPECULATION_TURNS", "500")) // len(KINDS)))
    counts = {str(source): (walk.drafted[source], walk.accepted[source]) for source in walk.drafted}
    print(f"{kind}: {walk.turns} turns, drafted and accepted: {counts}")


def _accept_one_too_many(patch: pytest.MonkeyPatch) -> None:
    agrees = DraftedRows.agrees

    def wrong(rows: DraftedRows) -> bool:
        turn = rows.turn
        if not rows.accepted and len(rows.draft.ids) > 1 and turn.finish_reason is None and turn.session is not None:
            turn.ids[-1] = turn.session.token_ids[-1] = rows.draft.ids[0]  # as if the draft were what was drawn
        return agrees(rows)

    patch.setattr(DraftedRows, "agrees", wrong)


def _keep_the_state(patch: pytest.MonkeyPatch) -> None:
    undraft = SessionCache.undraft

    def wrong(session: SessionCache, before: Position, length: int) -> Position:
        return undraft(session, before._replace(state=session.state), length)

    patch.setattr(SessionCache, "undraft", wrong)


def _leave_the_grammar(patch: pytest.MonkeyPatch) -> None:
    verify, accept, within = EngineCore._verify, Constraint.accept, [False]

    def verifying(core: EngineCore, step: LaunchedStep) -> None:
        within[0] = True
        verify(core, step)
        within[0] = False

    patch.setattr(EngineCore, "_verify", verifying)
    patch.setattr(Constraint, "accept", lambda self, token: False if within[0] else accept(self, token))


def _read_all_tenants(patch: pytest.MonkeyPatch) -> None:
    add, find = SessionsIndex.add, SessionsIndex.find
    patch.setattr(SessionsIndex, "add", lambda self, scope, session: add(self, "", session))
    patch.setattr(SessionsIndex, "find", lambda self, scope, ids, own: find(self, "", ids, own))


def _count_what_was_rejected(patch: pytest.MonkeyPatch) -> None:
    learn = Speculator.learn

    def wrong(self: Speculator, turn: Turn, draft: Draft, accepted: int) -> None:
        counts = turn.token_counts
        if counts is not None:
            known = counts._known
            counts.read(turn.ids[turn.prompt_length :][:known] + array("i", draft.ids[accepted:]))
            counts._known = known
        learn(self, turn, draft, accepted)

    patch.setattr(Speculator, "learn", wrong)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("plant", "kind"),
    [
        (_accept_one_too_many, "llama"),
        (_keep_the_state, "jamba"),
        (_keep_the_state, "bloom"),
        (_leave_the_grammar, "llama"),
        (_read_all_tenants, "llama"),
        (_count_what_was_rejected, "llama"),
    ],
)
def test_a_planted_fault_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], kind: str, eager: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        Walk(kind, seed=3).run(150)


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


def test_what_an_evicted_session_said_is_proposed_while_it_is_stored(forgetful: None, tmp_path: Path) -> None:
    kit = Kit(speculates=True, folder=tmp_path)
    kit.ask([1, 2, 3], 30, session="first", sampling=ONE_WORD)
    kit.settle()
    kit.store.forget("a", "first")  # from memory
    asked: dict[str, Any] = {"count": 24, "sampling": ONE_WORD}
    assert kit.ask([4, 5], session="second", **asked).deltas[-1].drafts[DraftSource.SESSIONS][1] > 8
    for name in ("first", "second"):
        kit.store.forget("a", name)
        kit.archive.forget(Owner("a", name, True), lambda: None)
    assert kit.ask([4, 5], **asked).deltas[-1].drafts == {}


def restarted(tmp_path: Path) -> Kit:
    """A new engine, which finds a session of another one on disk."""
    kit = Kit(speculates=True, folder=tmp_path)
    kit.ask([1, 2, 3], 30, session="first", sampling=ONE_WORD)
    kit.leave()
    fresh = Kit(speculates=True, folder=tmp_path)
    fresh.step()
    return fresh


def test_what_a_stored_session_said_is_proposed_after_a_restart(forgetful: None, tmp_path: Path) -> None:
    kit = restarted(tmp_path)
    drafted, accepted = kit.ask([4, 5], 24, sampling=ONE_WORD).deltas[-1].drafts[DraftSource.SESSIONS]
    assert drafted >= accepted > 8


def test_a_stored_session_is_proposed_to_its_tenant_only_and_while_it_exists(forgetful: None, tmp_path: Path) -> None:
    kit = restarted(tmp_path)
    assert kit.ask([4, 5], 24, tenant="b", sampling=ONE_WORD).deltas[-1].drafts == {}
    assert kit.ask([4, 5], 24, salt="own", sampling=ONE_WORD).deltas[-1].drafts == {}
    kit.archive.forget(Owner("a", "first", True), lambda: None)
    assert kit.ask([4, 5], 24, sampling=ONE_WORD).deltas[-1].drafts == {}


def test_a_forced_part_of_a_grammar_is_proposed(eager: None) -> None:
    kit = Kit(speculates=True)
    dense = Sampling(temperature=0.0, logit_bias=dict.fromkeys(b"\t\n\r ", -100.0))
    out = kit.ask([65, 66], 40, grammar=GRAMMAR, ignore_eos=False, sampling=dense)
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
    kit.step(4)
    kit.engine.cancel(Cancel(turn))
    kit.run()
    said = len(kit.outcomes[turn].tokens)
    again = kit.ask([65] * (12 + said) + [66], 2)
    assert again.receipt.cached >= 12 + said - 1


@pytest.mark.parametrize(
    "options",
    [
        {"name": "llama", "kv": Codec.INT8, "pages": 40, "step_tokens": 16},
        {"name": "gemma3", "kv": Codec.INT8, "divided": True, "pages": 40},
    ],
    ids=["int8", "int8 and windows"],
)
def test_rounded_keys_and_pages_that_windows_free(options: dict[str, Any], eager: None) -> None:
    """With few pages: turns are preempted, idle sessions evicted, and what no window sees makes room."""
    turns = [{**turn, "prompt": turn["prompt"] * 2} for turn in make_turns(6, 8)]
    plain = run_turns(Kit(**options), turns)
    kit = Kit(**options, speculates=True)
    assert_same(run_turns(kit, turns, guess(plain, 2)), plain)
    assert sum(kit.speculator.drafted.values()) > sum(kit.speculator.accepted.values()) > 20


def test_overlapping_steps_say_the_same(eager: None) -> None:
    turns = make_turns(5, 16)
    plain = run_turns(Kit(overlaps=True), turns)
    kit = Kit(overlaps=True, speculates=True)
    assert_same(run_turns(kit, turns, guess(plain, 2)), plain)
    assert sum(kit.speculator.accepted.values()) > 20


def test_drafting_stops_where_nothing_is_accepted() -> None:
    kit = Kit(speculates=True)
    wrong = [[90] * 40] * 6
    turns: list[dict[str, Any]] = [{"prompt": [65, 70, number], "count": 40} for number in range(6)]
    run_turns(kit, turns, wrong)
    assert kit.speculator.drafted[DraftSource.PREDICTION] < 80
