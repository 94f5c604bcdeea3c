"""Layers computed ahead, in one call: the model says what it said, whatever happens between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from program_kit import compiled
from stage_kit import LONG, STEPS, Stage
from tiny_models import logits, make_model
from torch.nn.modules.module import register_module_forward_hook
from wide import widely

from scheduler.accel.cpu import layer_chain
from scheduler.accel.cpu.foresight import Call, Origin, Origins, same_arguments
from scheduler.accel.cpu.layer_chain import ChainResult, LayerChain
from scheduler.forward.modes import PackedMode

SHORT = [[(0, 1)], [(0, 1)], [(0, 30), (1, 30), (2, 10)], [(0, 1)], [(0, 30), (1, 11)], [(2, 2), (0, 5)], [(0, 29)]]


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each step was for the chain."""
    compiled()
    found: list[bool] = []
    forwards: list[Any] = []

    def run(original: Callable[..., Any], one: LayerChain, cache: Any, *args: Any) -> Any:
        results = original(one, cache, *args)
        if forwards and forwards[-1] is cache:  # tried again by the first layer itself
            found.pop()
        forwards.append(cache)  # so that the next one lies elsewhere
        found.append(results is not None)
        return results

    for way in (LayerChain.run, LayerChain.run_last):
        monkeypatch.setattr(LayerChain, way.__name__, lambda *args, way=way: run(way, *args))
    return found


def same(got: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> bool:
    return all(
        float((one - other).abs().max()) <= 1e-4 * float(other.abs().max())
        for one, other in zip(got, want, strict=True)
    )


def llama() -> Any:
    """A model of three layers, so that one of them is neither the first nor the last."""
    return make_model("llama", num_hidden_layers=3)


@torch.no_grad()
def test_steps_of_any_number_of_rows(runs: list[bool]) -> None:
    """More rows than before need other room, which those of steps before and after lie in as well."""
    model = llama()
    want = [logits(model, ids) for ids in LONG]
    stage = Stage(model)
    runs.clear()
    assert same(stage.run(LONG, SHORT), want)
    assert runs == [False] + [True] * (len(SHORT) - 1)  # in the first one there are no pages yet


@torch.no_grad()
def test_room_that_moves_between_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled()
    stage = Stage(llama())
    original, held = LayerChain.run_last, []

    def run(one: LayerChain, *args: Any) -> Any:
        room = one._layers[0].room
        room.tensors(room.rows + 1)
        results = original(one, *args)
        if results is not None:
            held.append(one._between[0].key == room.tensors(1)["output", 1].data_ptr())
        return results

    monkeypatch.setattr(LayerChain, "run_last", run)
    stage.run(LONG[:1], [[(0, 1)]] * 4)
    assert held == [True] * 3


@torch.no_grad()
def test_steps_whose_results_are_large_go_layer_by_layer(monkeypatch: pytest.MonkeyPatch, runs: list[bool]) -> None:
    monkeypatch.setattr(layer_chain, "_MOST", 3 * 64 * 4 * 40)  # 40 rows of three layers
    model = llama()
    want = [logits(model, ids) for ids in LONG]
    stage = Stage(model)
    stage.fusion.unrecord()
    runs.clear()
    assert same(stage.run(LONG, SHORT), want)
    assert runs == [False, True, False, True, False, True, True]


@torch.no_grad()
def test_two_tiers_by_turns(runs: list[bool]) -> None:
    stage = Stage(llama())
    want = stage.run(LONG, SHORT)
    runs.clear()
    assert same(stage.run(LONG, SHORT), want)
    assert same(stage.run(LONG[:1], [[(0, 1)], [(0, 30)], [(0, 66)]]), want[:1])


@torch.no_grad()
@pytest.mark.parametrize("at", [0, pytest.param(1, marks=pytest.mark.wide), 2])
@pytest.mark.parametrize("how", widely(["mul", "mul_"], "mul_"))
def test_hooks_change_what_a_layer_gave(how: str, at: int) -> None:
    compiled()
    model = llama()
    stage = Stage(model)
    layers: Any = model.model.layers
    hook = layers[at].register_forward_hook(lambda module, args, out: getattr(out, how)(1.5))
    got = [*stage.run(LONG, SHORT), *stage.run(LONG, STEPS)]
    stage.mode.remove()
    want = [logits(model, ids) for ids in LONG]
    hook.remove()
    assert same(got, want * 2)


@torch.no_grad()
@pytest.mark.parametrize("at", [0, 1])
def test_hooks_of_all_modules_run_too(at: int) -> None:
    compiled()
    model = llama()
    stage = Stage(model)
    layer: Any = model.model.layers[at]
    hook = register_module_forward_hook(lambda module, args, out: out * 1.5 if module is layer else None)
    try:
        got = [*stage.run(LONG, SHORT), *stage.run(LONG, STEPS)]
        stage.mode.remove()
        want = [logits(model, ids) for ids in LONG]
    finally:
        hook.remove()
    assert same(got, want * 2)


@torch.no_grad()
@pytest.mark.parametrize("name", ["register_forward_hook", "register_forward_pre_hook"])
def test_hooks_that_come_between_two_layers_run_too(name: str) -> None:
    compiled()
    model = llama()
    stage = Stage(model)
    layers: Any = model.model.layers
    called: list[Any] = []
    inner, missing = layers[0].forward, iter([False, True, False])

    def forward(*args: Any, **kwargs: Any) -> Any:
        out = inner(*args, **kwargs)
        if next(missing):
            getattr(layers[1], name)(lambda module, *rest: called.append(module))
        return out

    layers[0].forward = forward
    stage.run(LONG[:1], [[(0, 5)], [(0, 1)], [(0, 1)]])
    assert called == [layers[1], layers[1]]


@torch.no_grad()
@pytest.mark.parametrize("at", [0, 1, 2])
def test_what_a_layer_gave_is_changed_before_the_next_one_gets_it(runs: list[bool], at: int) -> None:
    model = llama()
    stage = Stage(model)
    layers: Any = model.model.layers

    def changing(module: Any) -> None:
        inner = module.forward
        module.forward = lambda *args, **kwargs: inner(*args, **kwargs) * 1.5

    changing(layers[at])
    runs.clear()
    got = [*stage.run(LONG, SHORT), *stage.run(LONG, STEPS)]
    assert any(runs)
    stage.mode.remove()
    changing(layers[at])
    assert same(got, [logits(model, ids) for ids in LONG] * 2)


@torch.no_grad()
def test_a_layer_that_is_left_out(runs: list[bool]) -> None:
    model = llama()
    stage = Stage(model)
    layers: Any = model.model.layers
    layers[1].forward = lambda hidden, **kwargs: hidden
    got = stage.run(LONG, SHORT)
    stage.mode.remove()
    layers[1].forward = lambda hidden, **kwargs: hidden
    assert same(got, [logits(model, ids) for ids in LONG])


@torch.no_grad()
def test_chains_that_are_not_right_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled()
    model = llama()
    want = [logits(model, ids) for ids in LONG]
    original = LayerChain._place_tensors

    def place(one: LayerChain, inputs: list[list[torch.Tensor]], *rest: Any) -> Any:
        inputs[0][0].copy_(inputs[0][0].roll(1, -1))
        return original(one, inputs, *rest)

    monkeypatch.setattr(LayerChain, "_place_tensors", place)
    stage = Stage(model)
    assert stage.fused["LlamaDecoderLayer"] == 3
    assert stage.chains == []
    assert same(stage.run(LONG, SHORT), want)


@torch.no_grad()
def test_a_mode_that_comes_back_has_its_chains(runs: list[bool]) -> None:
    stage = Stage(llama())
    assert isinstance(stage.mode, PackedMode)
    stage.mode.remove()
    stage.mode.install()
    runs.clear()
    stage.run(LONG, SHORT)
    assert runs == [False] + [True] * (len(SHORT) - 1)  # in the first one there are no pages yet


@torch.no_grad()
@pytest.mark.parametrize("name", ["gemma3", "gemma4"])
def test_layers_with_other_positions_are_in_the_chain(runs: list[bool], name: str) -> None:
    """Of gemma4 they have heads of another size, too."""
    model = make_model(name)
    want = [logits(model, ids) for ids in LONG]
    stage = Stage(model)
    assert stage.chains == [model.config.num_hidden_layers]
    stage.mode.remove()
    stage.mode.install()  # modules whose results have to be known are watched again
    runs.clear()
    assert same(stage.run(LONG, SHORT), want)
    assert runs == [False] + [True] * (len(SHORT) - 1)
    stage.mode.remove()
    assert not any(module._forward_hooks for module in model.modules())


@torch.no_grad()
def test_positions_that_were_not_foreseen(monkeypatch: pytest.MonkeyPatch, runs: list[bool]) -> None:
    model = make_model("gemma3")
    want = [logits(model, ids) for ids in LONG]
    stage = Stage(model)
    assert isinstance(stage.mode, PackedMode)
    assert stage.mode.fusion is not None
    stage.mode.fusion.unrecord()
    monkeypatch.setattr(Origins, "expect", lambda self, first, differences: first)
    runs.clear()
    assert same(stage.run(LONG, SHORT), want)
    assert any(runs)


def test_where_arguments_come_from() -> None:
    table, origins, module = torch.arange(24.0).view(1, 2, 3, 4), Origins(), torch.nn.ReLU()
    first: Call = (0, table[:, :, 0]), {"a": None, "b": torch.ones(1)}
    with origins.watching([module]):
        given = module(torch.ones(3))
        other: Call = (1, table[:, :, 2]), {"a": None, "b": given}
        found = origins.differences(first, other)
        assert found == ((1, 8), ("b", Origin(module, ())))
        guessed = origins.expect(first, found)
        assert guessed is not None
        assert same_arguments(guessed, other)
        module(torch.ones(3))
        guessed = origins.expect(first, found)
        assert guessed is not None
        assert not same_arguments(guessed, other)  # another step's
        assert origins.differences(first, ((1, table[:, :, 2]), {"a": None, "b": torch.ones(3)})) is None
        assert origins.differences(first, ((1, table[:, :, 2]), {"a": 1, "b": given})) is None
        assert origins.differences(first, ((1,), {"a": None, "b": given})) is None
    assert origins.expect(first, found) is None
    assert not module._forward_hooks


def test_calls_are_alike_where_all_but_the_first_argument_is_the_same_object() -> None:
    x, y = torch.ones(2), torch.ones(2)
    assert same_arguments(((1, x), {"a": y, "b": None}), ((2, x), {"a": y, "b": None}))
    assert not same_arguments(((1, x), {"a": y}), ((1, y), {"a": y}))
    assert not same_arguments(((1, x), {"a": y}), ((1, x), {"a": x}))
    assert not same_arguments(((1,), {"a": y}), ((1,), {"b": y}))
    assert not same_arguments(((1,), {}), ((1, x), {}))
    ahead = ChainResult(x, ((None,), {}), y)
    assert ahead.fits((x,), {})
    assert not ahead.fits((y,), {})
    assert not ahead.fits((), {})
