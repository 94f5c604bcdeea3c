"""The same turns with speculation and without: what must not differ, and what may be drafted."""

from __future__ import annotations

import json
import random
from array import array
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

import pytest
from engine_kit import Kit, Outcome
from tiny_models import ARCHITECTURES, OTHERS, RECURRENT, TWO_PARTS

from scheduler.core.drafters import Draft
from scheduler.core.speculator import Speculator
from scheduler.core.turn import Turn
from scheduler.protocol import DraftSource, Submit
from scheduler.sampling_params import Sampling, Stopping

KINDS = (*ARCHITECTURES, *RECURRENT, *OTHERS, "longrope", *TWO_PARTS)
SCHEMA = {"type": "object", "properties": {"kind": {"enum": ["alpha", "beta"]}}, "required": ["kind"]}
GRAMMAR = json.dumps({"grammars": [{"json_schema": {**SCHEMA, "additionalProperties": False}}]})
PATTERN = json.dumps({"grammars": [{"lark_grammar": 'start: /(ab|ba)+c/ "; then " /[A-D]{3,9}/'}]})
_LETTERS = range(65, 69)
_SEVERAL = (1, 1, 2, 3, 4, 8, 16, 32)  # turns at once
_ROUNDING = {"qwen3_next": 1e-4}  # its code has another formula for several tokens than for one; others: 1e-5
_WRONG = 70  # a token that few replies hold


def feed_all_drafts(patch: pytest.MonkeyPatch) -> None:
    """Drafts are fed whenever there are any, whatever they cost."""
    patch.setattr(Speculator, "_worth", lambda self, draft, *_: (len(draft.ids), 1.0))


def make_turn(draw: random.Random, seed: int) -> dict[str, Any]:
    """A turn of any sort: half of them sampled, a third with a grammar or stop strings. Few tokens are likely in most
    of them, so that something repeats.
    """
    part = [draw.choice(_LETTERS) for _ in range(draw.randrange(2, 9))]
    sampled, bound = draw.random() < 0.5, draw.random() < 1 / 3
    sampling = Sampling(
        temperature=draw.choice([0.3, 0.7, 1.0]) if sampled else 0.0,
        top_k=draw.choice([0, 0, 2, 3]),
        top_p=draw.choice([1.0, 0.8]),
        presence_penalty=draw.choice([0.0, 0.0, 0.3]),
        frequency_penalty=draw.choice([0.0, 0.0, 0.4]),
        repetition_penalty=draw.choice([1.0, 1.0, 1.2]),
        logit_bias=dict.fromkeys(_LETTERS, 12.0) if draw.random() < 0.7 else {},
        bad_words=((66, 67),) if draw.random() < 0.1 else (),
        seed=seed,
    )
    by_grammar = bound and draw.random() < 0.5
    stopping = Stopping(
        max_tokens=draw.choice([1, 4, 12, 24, 24]),
        min_tokens=draw.choice([0, 0, 3]),
        stop=draw.choice([("AAB",), ("C",), ("DA", "BB")]) if bound and not by_grammar else (),
        stop_token_ids=draw.choice([(), (), (67,)]),
        ignore_eos=draw.random() < 0.5,
    )
    return {
        "prompt": (part * 6)[: draw.randrange(4, 40)],
        "sampling": sampling,
        "stopping": stopping,
        "logprobs": draw.choice([0, 2]),
        "grammar": draw.choice([GRAMMAR, PATTERN]) if by_grammar else None,
        "session": None,
        "tenant": draw.choice("ab"),
    }


def make_turns(seed: int, count: int) -> list[dict[str, Any]]:
    """Turns of all sorts; some have sessions of their own."""
    draw = random.Random(seed)
    turns = [make_turn(draw, seed * 1000 + number) for number in range(count)]
    return [{**turn, "session": f"s{n}" if draw.random() < 0.3 else None} for n, turn in enumerate(turns)]


def run_turns(kit: Kit, turns: list[dict[str, Any]], predictions: list[list[int]] | None = None) -> list[Outcome]:
    """The outcomes of turns, several at once."""
    sent = []
    for number, turn in enumerate(turns):
        more: dict[str, Any] = {} if predictions is None else {"prediction": predictions[number]}
        sent.append(kit.send(**turn, **more))
        for _ in range(number % 3):
            kit.step()
    kit.run()
    return [kit.outcomes[turn] for turn in sent]


def assert_same(ours: list[Outcome], theirs: list[Outcome], rounding: float = 1e-5) -> None:
    """Tokens, text and ends are equal, log-probabilities up to ``rounding``."""
    for one, other in zip(ours, theirs, strict=True):
        assert (one.tokens, one.text, one.finish_reason) == (other.tokens, other.text, other.finish_reason)
        assert [delta.stop for delta in one.deltas if delta.tokens] == [d.stop for d in other.deltas if d.tokens]
        mine, yours = ([entry for delta in out.deltas for entry in delta.logprobs] for out in (one, other))
        for entry, same in zip(mine, yours, strict=True):
            assert entry.token_id == same.token_id
            assert entry.logprob == pytest.approx(same.logprob, abs=rounding, rel=rounding)
            tops = ([top[-1] for top in shown.top] for shown in (entry, same))
            assert next(tops) == pytest.approx(next(tops), abs=rounding, rel=rounding)


def guess(outcomes: list[Outcome], seed: int) -> list[list[int]]:
    """The replies with a wrong token here and there, for predictions."""
    draw = random.Random(seed)
    return [[t if draw.random() < 0.85 else _WRONG for t in out.tokens] for out in outcomes]


class WrongDraft(AssertionError):
    """Tokens were proposed from a place that is not the turn's to read."""


@dataclass
class Walk:
    """Turns of one architecture on an engine that drafts and on one that does not. Chats go on, so most of the later
    turns begin from what both have cached.
    """

    kind: str
    seed: int
    turns: int = 0
    drafted: Counter[DraftSource] = field(default_factory=Counter)
    accepted: Counter[DraftSource] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._draw = random.Random(self.seed)
        self._plain, self._kit = Kit(self.kind), Kit(self.kind, speculates=True)
        self._chats: dict[tuple[str, str], list[int]] = {}  # by tenant and session
        self._said: defaultdict[str, list[bytes]] = defaultdict(list)  # timelines by tenant
        learn = self._kit.speculator.learn

        def watched(turn: Turn, draft: Draft, accepted: int) -> None:
            self._check_place(turn.request, turn.ids, draft)
            learn(turn, draft, accepted)

        self._kit.speculator.learn = watched  # type: ignore[method-assign]

    def run(self, turns: int) -> None:
        """That many turns or a few more. Raises AssertionError at the first difference."""
        while self.turns < turns:
            batch = self._make_batch(self._draw.choice(_SEVERAL))
            plain = run_turns(self._plain, batch)
            for turn, out in zip(batch, plain, strict=True):
                self._said[turn["tenant"]].append(array("i", turn["prompt"] + out.tokens).tobytes())
            predicted = [g if self._draw.random() < 0.5 else [] for g in guess(plain, self._draw.randrange(1 << 30))]
            assert_same(run_turns(self._kit, batch, predicted), plain, _ROUNDING.get(self.kind, 1e-5))
            self._go_on(batch, plain)
            self.turns += len(batch)
        self.drafted, self.accepted = self._kit.speculator.drafted, self._kit.speculator.accepted

    def _make_batch(self, count: int) -> list[dict[str, Any]]:
        batch: list[dict[str, Any]] = []
        chats = self._draw.sample(sorted(self._chats), min(len(self._chats), count // 2 + count % 2))
        for number in range(count):
            turn = make_turn(self._draw, self._draw.randrange(1 << 40))
            if number < len(chats):
                turn["tenant"], turn["session"] = chats[number]
                turn["prompt"] = [*self._chats[chats[number]], *turn["prompt"][:6]]
            elif self._draw.random() < 0.4:
                turn["session"] = f"s{self.turns + number}"
            batch.append(turn)
        return batch

    def _go_on(self, batch: list[dict[str, Any]], outcomes: list[Outcome]) -> None:
        """Remember chats that may go on, a few."""
        for turn, out in zip(batch, outcomes, strict=True):
            if turn["session"] is not None:
                self._chats[turn["tenant"], turn["session"]] = turn["prompt"] + out.tokens
        self._chats = {name: ids for name, ids in list(self._chats.items())[-24:] if len(ids) < 100}
        if self.kind in TWO_PARTS:  # each of their prompts is read as a whole
            self._chats = {}

    def _check_place(self, request: Submit, ids: array[int], draft: Draft) -> None:
        """What another session is said to have said, a session of this tenant has said."""
        if draft.source is DraftSource.SESSIONS:
            wanted = array("i", draft.ids).tobytes()
            if not any(_holds(text, wanted) for text in self._said[request.tenant]):
                raise WrongDraft


def _holds(text: bytes, part: bytes) -> bool:
    at = text.find(part)
    while at % 4 and at >= 0:
        at = text.find(part, at + 1)
    return at >= 0
