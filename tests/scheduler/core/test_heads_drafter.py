"""A model's own layers for multi-token prediction propose what they say, and change no reply."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from engine_kit import Kit
from speculation_kit import assert_same, feed_all_drafts, make_turns, run_turns
from tiny_models import model_of, of_unit_gain
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from scheduler.core import heads_drafter
from scheduler.core.drafters import Draft, HistoryDrafter
from scheduler.core.heads_drafter import HeadsDrafter
from scheduler.core.turn import Turn
from scheduler.protocol import DraftSource

KIND = "deepseek_v3"


def make_heads(layers: int) -> Any:
    """MTP layers with random weights, large enough that what they say depends on all that they see."""
    torch.manual_seed(3)
    heads = MtpModel(model_of(KIND), layers).eval()
    heads.config.num_hidden_layers = layers  # the model's configuration has one
    for layer in heads.layers:
        of_unit_gain(layer)
    return heads


class Watched(HeadsDrafter):
    """Remembers what it has proposed, behind which tokens."""

    def __init__(self, layers: int) -> None:
        super().__init__(make_heads(layers), model_of(KIND).get_decoder())
        self.proposed: list[tuple[list[int], list[int]]] = []

    def propose(self, wanted: Mapping[Turn, int], room: int) -> dict[Turn, Draft]:
        drafts = super().propose(dict.fromkeys(wanted, self.most), room)
        self.proposed += [(turn.ids.tolist(), list(draft.ids)) for turn, draft in drafts.items()]
        return {turn: draft._replace(ids=draft.ids[: wanted[turn]]) for turn, draft in drafts.items()}


@pytest.fixture(params=[1, 3])
def drafter(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    """Of that many layers. Only they draft, and everything is fed."""
    feed_all_drafts(monkeypatch)
    monkeypatch.setattr(HistoryDrafter, "propose", lambda *_: None)
    made = Watched(request.param)
    yield made
    made.hook.remove()


def kit_of(drafter: HeadsDrafter) -> Kit:
    kit = Kit(KIND, speculates=True)
    kit.speculator.asked = drafter
    return kit


@torch.inference_mode()
def said(heads: Any, ids: list[int]) -> list[int]:
    """The definition: what the layers say behind ``ids``, from the hidden states of a forward from scratch."""
    model = model_of(KIND)
    hidden = model.model(torch.tensor([ids[:-1]]), use_cache=False).last_hidden_state
    places = torch.arange(1, len(ids))[None]
    found: list[int] = heads(torch.tensor([ids[1:]]), hidden, None, places, MtpCache(config=heads.config))[0][
        0
    ].tolist()
    return found


def test_they_propose_what_they_say(drafter: Watched) -> None:
    kit = kit_of(drafter)
    turns = [kit.send([number + 60, *range(70, 70 + 9 * number)], 14) for number in range(3)]
    kit.run()
    assert all(len(kit.outcomes[turn].tokens) == 14 for turn in turns)
    assert len(drafter.proposed) > 20
    for ids, draft in drafter.proposed:
        assert draft == said(drafter._heads, ids)


def test_the_same_replies(drafter: Watched) -> None:
    turns = make_turns(8, 16)
    plain = run_turns(Kit(KIND), turns)
    kit = kit_of(drafter)
    assert_same(run_turns(kit, turns), plain)
    assert kit.speculator.drafted[DraftSource.HEADS] > 30


def test_what_is_right_is_kept(drafter: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """The layers of a model that says what they say."""
    plain = Kit(KIND).ask([65, 66, 67], 20)
    timeline = [65, 66, 67, *plain.tokens]

    def right(turn: Turn, fed: Any) -> list[int]:
        said_by_them(turn, fed)
        return timeline[len(turn.ids) :][: drafter.most]

    said_by_them = drafter._say
    monkeypatch.setattr(drafter, "_say", right)
    kit = kit_of(drafter)
    out = kit.ask([65, 66, 67], 20)
    assert out.tokens == plain.tokens
    drafted, accepted = out.deltas[-1].drafts[DraftSource.HEADS]
    assert drafted == accepted >= (9 if drafter.most == 1 else 14)


def test_a_cached_prompt_is_not_seen(drafter: Watched) -> None:
    kit = kit_of(drafter)
    first = kit.ask([65, 66, 67, 68], 8, session="s")
    again = [65, 66, 67, 68, *first.tokens, 69, 70]
    drafter.proposed.clear()
    out = kit.ask(again, 8, session="s")
    assert out.tokens == Kit(KIND).ask(again, 8).tokens
    assert len(drafter.proposed) >= 2


def test_no_more_than_there_is_room_for(drafter: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    kit = kit_of(drafter)
    monkeypatch.setattr(kit.engine.scheduler, "spare_tokens", lambda plan: 3)
    assert len(kit.ask([65, 66, 67, 68], 8).tokens) == 8
    assert drafter.proposed == []  # four positions are to be read first


def test_a_long_prompt_is_seen_from_its_end(drafter: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heads_drafter, "_SEEN", 6)
    kit = kit_of(drafter)
    out = kit.ask(list(range(60, 100)), 10)
    assert out.tokens == Kit(KIND).ask(list(range(60, 100)), 10).tokens
    assert len(drafter.proposed) >= 3
