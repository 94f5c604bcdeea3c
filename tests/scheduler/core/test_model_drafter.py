"""A draft model changes no reply, and its sessions live as those of the served model do."""

from __future__ import annotations

import time
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from engine_kit import Outcome
from speculation_kit import assert_same, feed_all_drafts, make_turns
from tiny_models import greedy, make_model, make_tokenizer, save_model
from transformers import PreTrainedTokenizerFast

from cache.pages.session import SessionCache
from scheduler.core.drafters import HistoryDrafter
from scheduler.core.model_drafter import ModelDrafter
from scheduler.core.session_commands import SessionCommands
from scheduler.engine_assembly import build_engine
from scheduler.engine_config import EngineConfig
from scheduler.model.draft_model import load_draft_model
from scheduler.model.loader import LoadedModel, LoadFailed, prepare
from scheduler.protocol import DraftSource, Forget, Forgotten, Submit, pack_ids
from scheduler.sampling_params import Sampling, Stopping

GREEDY = Sampling(temperature=0.0)


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts are fed whenever there are any, and only those of the draft model."""
    feed_all_drafts(monkeypatch)
    monkeypatch.setattr(HistoryDrafter, "propose", lambda *_: None)


@cache
def loaded(name: str, seed: int) -> LoadedModel:
    return prepare(make_model(name, seed), make_tokenizer())


class Pair:
    """An engine with a draft model (None: without speculation)."""

    def __init__(self, draft: LoadedModel | None, folder: Path | None = None, name: str = "llama") -> None:
        config = EngineConfig(
            address="",
            model="",
            kv_memory=16 << 20,
            max_step_tokens=64,
            kv_folder=None if folder is None else str(folder / "kv"),
            disk_floor=0,
            speculate="off" if draft is None else "auto",
        )
        self.engine, facts = build_engine(config, loaded(name, 0), draft)
        self.commands = SessionCommands(self.engine.scheduler.store, facts.fingerprint, self.engine.drafter)
        self.outcomes: defaultdict[str, Outcome] = defaultdict(Outcome)

    @property
    def drafter(self) -> ModelDrafter:
        assert self.engine.drafter is not None
        return self.engine.drafter

    def send(self, turn: str, prompt: list[int], count: int = 12, session: str | None = None, **more: Any) -> None:
        asked = {"sampling": GREEDY, "stopping": Stopping(max_tokens=count, ignore_eos=True), "tenant": "a", **more}
        refused = self.engine.submit(Submit(turn, prompt=pack_ids(prompt), session=session, **asked))
        assert refused is None

    @torch.inference_mode()
    def run(self) -> None:
        while not self.engine.idle:
            for delta in self.engine.step().deltas:
                self.outcomes[delta.turn].add(delta)
            self.engine.check_integrity()
            if self.engine.drafter is not None:
                self.drafter.store.residency.check_integrity()
            if self.engine.stalled:
                time.sleep(0.001)

    def ask(self, turn: str, prompt: list[int], **more: Any) -> Outcome:
        self.send(turn, prompt, **more)
        self.run()
        return self.outcomes[turn]

    def leave(self) -> None:
        self.engine.stop()
        for store in (self.engine.scheduler.store, self.drafter.store):
            assert store.archive is not None
            store.archive.flush(60.0)
            store.archive.close()


@pytest.mark.parametrize(
    ("kind", "seed"), [("llama", 0), ("llama", 1), pytest.param("jamba", 0, marks=pytest.mark.wide), ("jamba", 1)]
)
def test_the_same_replies(kind: str, seed: int) -> None:
    turns = make_turns(4, 14)
    found = []
    for draft in (None, loaded(kind, seed)):
        pair = Pair(draft)
        for number, turn in enumerate(turns):
            pair.send(str(number), **turn)
            if number % 3 == 0:
                for delta in pair.engine.step().deltas:
                    pair.outcomes[delta.turn].add(delta)
        pair.run()
        found.append([pair.outcomes[str(number)] for number in range(len(turns))])
    assert_same(found[1], found[0])
    drafted, accepted = (pair.engine.stats().drafted["model"], pair.engine.stats().accepted.get("model", 0))
    assert drafted > accepted
    if kind == "llama" and seed == 0:
        assert accepted > 5


def test_a_draft_model_that_is_the_served_one_is_always_right() -> None:
    pair = Pair(loaded("llama", 0))
    out = pair.ask("t", [5, 6, 7, 8], count=40)
    assert out.tokens == greedy(make_model("llama"), [5, 6, 7, 8], 40, out.tokens)
    drafted, accepted = out.deltas[-1].drafts[DraftSource.MODEL]
    assert drafted == accepted >= 34
    assert pair.engine.stats().steps < 8


def fed_to(drafter: ModelDrafter, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Of each step of the draft model, as it is made: how many tokens each session feeds."""
    fed: list[list[int]] = []
    run = drafter._runner.run

    def watched(work: list[tuple[SessionCache, int]], rows: list[int]) -> torch.Tensor:
        fed.append([count for _, count in work])
        return run(work, rows)

    monkeypatch.setattr(drafter._runner, "run", watched)
    return fed


def test_its_sessions_are_resumed(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(loaded("llama", 0))
    prompt = list(range(60))
    prompt += pair.ask("t0", prompt, session="s").tokens
    session = pair.drafter.store.find("a", "s")
    assert session is not None
    assert session.length >= 60
    fed = fed_to(pair.drafter, monkeypatch)
    pair.ask("t1", [*prompt, 9, 9], session="s")
    assert max(map(max, fed)) < 24  # of 74 that the timeline has


def test_a_rewound_session_forgets_what_was_dropped() -> None:
    pair = Pair(loaded("llama", 0))
    pair.ask("t0", list(range(60)), session="s")
    out = pair.ask("t1", [*range(30), 99, 98], session="s", count=30)
    assert out.tokens == greedy(make_model("llama"), [*range(30), 99, 98], 30, out.tokens)
    drafted, accepted = out.deltas[-1].drafts[DraftSource.MODEL]
    assert drafted == accepted


def test_its_sessions_are_stored_and_deleted(tmp_path: Path) -> None:
    pair = Pair(loaded("llama", 0), tmp_path)
    prompt = list(range(60))
    prompt += pair.ask("t0", prompt, session="s").tokens
    pair.ask("t1", [7] * 50, session="other")
    pair.leave()
    again = Pair(loaded("llama", 0), tmp_path)
    assert again.drafter.store.archive is not None
    assert len(again.drafter.store.archive.disk.heads) == 2
    out = again.ask("t0", [*prompt, 9], session="s", count=30)
    assert out.tokens == greedy(make_model("llama"), [*prompt, 9], 30, out.tokens)
    again.commands.forget(Forget("a", "s", 1))
    answers: list[Any] = []
    while not answers:
        again.engine.step()
        answers = again.commands.take()
    assert isinstance(answers[0], Forgotten)
    assert again.drafter.store.find("a", "s") is None
    assert [owner.session for owner in again.drafter.store.archive.disk.heads] == ["other"]
    again.leave()


def test_a_long_history_is_caught_up_with_within_the_budget_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(loaded("llama", 0))
    fed = fed_to(pair.drafter, monkeypatch)
    pair.send("u", [n % 190 for n in range(100)], count=30)
    out = pair.ask("t", [n % 200 for n in range(420)], count=30)
    assert max(map(sum, fed)) <= 64
    assert sum(map(sum, fed)) > 520
    assert out.tokens == greedy(make_model("llama"), [n % 200 for n in range(420)], 30, out.tokens)
    assert out.deltas[-1].drafts[DraftSource.MODEL][1] > 12


def test_a_draft_model_that_fails_is_not_used_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(loaded("llama", 0))
    monkeypatch.setattr(pair.drafter._runner, "run", lambda *_: 1 / 0)
    out = pair.ask("t", [5, 6, 7, 8], count=10)
    assert out.tokens == greedy(make_model("llama"), [5, 6, 7, 8], 10, out.tokens)
    assert pair.engine.drafter is None


def test_a_draft_model_with_another_tokenizer_is_refused(tmp_path: Path) -> None:
    folder = save_model("llama", tmp_path)
    config = EngineConfig(address="", model=str(folder), draft_model=str(folder), device="cpu")
    said: list[Any] = []
    draft = load_draft_model(config, loaded("llama", 0), said.append)
    assert draft.verdict.mode.name == "packed"
    assert said[0].stage == "loading the draft model"
    other: PreTrainedTokenizerFast = make_tokenizer()
    other.add_tokens(["<another>"])
    other.save_pretrained(folder)
    with pytest.raises(LoadFailed, match="its tokenizer is not that of the served model"):
        load_draft_model(msgspec.structs.replace(config), loaded("llama", 0), said.append)
    draft_of_two_parts = save_model("t5", tmp_path)
    with pytest.raises(LoadFailed, match="encoder-decoder"):
        load_draft_model(
            msgspec.structs.replace(config, draft_model=str(draft_of_two_parts)), loaded("llama", 0), said.append
        )
