"""Layers that attend to what an earlier layer has stored: they are programs, and in one chain with that layer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_kit import Kit
from program_kit import compiled, count_calls
from stage_kit import DECODE, LONG, SHORT, STEPS, Stage, same
from tiny_models import greedy, logits, make_model

from scheduler.accel.cpu.handed_keys import HandedKeys, MappingWatch, are_there, missing
from scheduler.accel.cpu.recorder import Unrecordable

LAYERS, STORING, TAKING = 6, 3, 4


@torch.no_grad()
def test_layers_that_take_keys_are_in_the_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = count_calls(monkeypatch)
    model = make_model("gemma4_shared")
    want = [logits(model, ids) for ids in LONG]
    stage = Stage(model)
    assert stage.chains == [LAYERS]
    assert stage.fusion._recorded is not None
    calls.clear()
    assert same(stage.run(LONG, DECODE), want)
    assert calls["chain"] == len(DECODE) - 1  # in the first step there are no pages yet
    chained = [stage.run(LONG, steps) for steps in (SHORT, STEPS)]
    assert all(same(got, want) for got in chained)
    stage.fusion.unrecord()
    assert all(map(torch.equal, stage.run(LONG, SHORT), chained[0]))
    stage.fusion.unlink()
    calls.clear()
    assert all(map(torch.equal, stage.run(LONG, SHORT), chained[0]))
    assert same(stage.run(LONG, STEPS), want)
    assert not calls["chain"]


@torch.no_grad()
@pytest.mark.parametrize("at", [pytest.param(1, marks=pytest.mark.wide), STORING, TAKING])
def test_what_a_layer_gave_is_changed_before_the_next_one_gets_it(at: int) -> None:
    """So the layers behind it are called for what is not ready, and find in the mapping whose keys they take."""
    compiled()
    model = make_model("gemma4_shared")
    stage = Stage(model)

    def changing(module: Any) -> None:
        inner = module.forward
        module.forward = lambda *args, **kwargs: inner(*args, **kwargs) * 1.5

    changing(model.model.layers[at])
    got = [*stage.run(LONG, SHORT), *stage.run(LONG, STEPS)]
    stage.mode.remove()
    changing(model.model.layers[at])
    assert same(got, [logits(model, ids) for ids in LONG] * 2)


@torch.no_grad()
@pytest.mark.parametrize("at", [STORING, TAKING])
def test_a_layer_that_runs_as_it_is_hands_keys_on_and_takes_them(at: int) -> None:
    compiled()
    model = make_model("gemma4_shared")
    want = [logits(model, ids) for ids in LONG]
    model.model.layers[at].mlp.register_forward_hook(lambda module, args, out: None)
    stage = Stage(model)
    assert stage.fused["Gemma4TextDecoderLayer"] == LAYERS - 1
    assert same(stage.run(LONG, SHORT), want)
    assert same(stage.run(LONG, STEPS), want)


@torch.no_grad()
def test_keys_of_another_layer_than_at_load_are_for_the_layers_own_code() -> None:
    compiled()
    model = make_model("gemma4_shared")
    stage = Stage(model)
    inner = model.model.layers[TAKING].forward

    def forward(*args: Any, shared_kv_states: Any, **kwargs: Any) -> Any:
        """With the keys of two layers exchanged, of which one has wider heads: its own code fails."""
        first, second = shared_kv_states
        swapped = {first: shared_kv_states[second], second: shared_kv_states[first]}
        return inner(*args, shared_kv_states=type(shared_kv_states)(swapped), **kwargs)

    model.model.layers[TAKING].forward = forward
    with pytest.raises(RuntimeError):
        stage.run(LONG, STEPS)


@pytest.mark.parametrize("divided", [False, True])
def test_sessions_resume(divided: bool) -> None:
    """Also where windowed layers have parts of pages of their own."""
    compiled()
    kit = Kit("gemma4_shared", divided=divided)
    prompts = [list(range(20, 60)), list(range(100, 109))]
    turns = [kit.send(prompt, 6) for prompt in prompts]
    kit.run()
    for prompt, turn in zip(prompts, turns, strict=True):
        more = [*prompt, *kit.outcomes[turn].tokens, 7, 8, 9]
        after = kit.ask(more, 6)
        assert kit.outcomes[turn].tokens == greedy(kit.model, prompt, 6, kit.outcomes[turn].tokens)
        assert after.tokens == greedy(kit.model, more, 6, after.tokens)


def test_what_no_layer_has_handed_on_before_another_takes_it() -> None:
    gives, takes = HandedKeys(2, "a", 1, stores=True), HandedKeys(2, "a", 1, stores=False)
    assert missing([[gives], [], [takes]]) == []
    assert missing([[takes], [gives]]) == [(0, takes)]
    assert missing([[gives], [takes._replace(layer=0)]]) == [(1, takes._replace(layer=0))]
    assert missing([[gives], [takes._replace(argument=1)]]) == [(1, takes._replace(argument=1))]
    assert missing([[gives, gives._replace(layer=3)], [takes]]) == [(1, takes)]


def test_whose_keys_are_in_a_mapping() -> None:
    key, value = torch.zeros(1), torch.ones(1)
    step: Any = SimpleNamespace(origins={id(key): (1, key, value)})
    takes = HandedKeys(0, "a", 1, stores=False)
    assert are_there([takes], [{"a": (key, value)}], step)
    assert not are_there([takes], [{"a": (key, key)}], step)
    assert not are_there([takes], [{"a": (value, key)}], step)
    assert not are_there([takes], [{"a": key}], step)
    assert not are_there([takes], [{}], step)
    assert not are_there([takes._replace(layer=0)], [{"a": (key, value)}], step)


def test_a_mapping_is_used_for_nothing_else() -> None:
    known: Any = SimpleNamespace(take=lambda pair: 1, layer_of=lambda pair: 2)
    mapping: dict[str, Any] = {"a": "pair"}
    watch = MappingWatch(mapping, 3, known)
    watch["b"] = watch["a"]
    assert watch.seen == [HandedKeys(3, "a", 1, stores=False), HandedKeys(3, "b", 2, stores=True)]
    assert mapping == {"a": "pair", "b": "pair"}
    with pytest.raises(Unrecordable):
        watch["c"]
    with pytest.raises(Unrecordable):
        watch[None] = 1
    with pytest.raises(Unrecordable):
        len(watch)
    with pytest.raises(Unrecordable):
        list(watch)
    with pytest.raises(Unrecordable):
        del watch["a"]
