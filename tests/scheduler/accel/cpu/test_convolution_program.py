"""Layers with a short convolution along tokens, or a gated delta rule after one: they are programs, and in one chain
with layers that attend.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from architectures.build import build
from engine_kit import Kit
from program_kit import compiled, count_calls, linear
from stage_kit import DECODE, LONG, SHORT, STEPS, Stage, same
from tiny_models import greedy, logits, make_model
from torch import nn
from transformers.cache_utils import LinearAttentionLayer
from transformers.models.lfm2 import modeling_lfm2

from cache.pages.packed import Span
from scheduler.accel.cpu.convolution_program import ConvolutionProgram
from scheduler.accel.cpu.fusion import record_modules
from scheduler.accel.cpu.layer_chain import ChainResult
from scheduler.accel.cpu.recording import record
from scheduler.forward.modes import PackedMode

LAYERS = 4  # convolution, attention, convolution, convolution; or three delta rules, attention
RULES = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")


def make(name: str) -> Any:
    return build(name, "causal") if name in RULES else make_model(name)


ALL = (*LONG, *LONG)


@torch.no_grad()
@pytest.mark.parametrize("name", ["lfm2", *RULES])
def test_layers_with_a_state_are_in_the_chain(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = count_calls(monkeypatch)
    model = make(name)
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
@pytest.mark.parametrize("name", ["lfm2", "qwen3_5_text"])
def test_in_bfloat16_the_results_are_no_worse_than_those_of_the_modules(name: str) -> None:
    compiled()
    want = [logits(make(name), ids) for ids in LONG]
    stage = Stage(make(name).to(torch.bfloat16))
    assert stage.chains == [LAYERS]

    def error() -> float:
        pairs = zip(stage.run(LONG, STEPS), want, strict=True)
        return max(float((one - other).norm() / other.norm()) for one, other in pairs)

    chained = error()
    stage.mode.unfuse()
    assert chained <= 1.2 * error()


@torch.no_grad()
@pytest.mark.parametrize("how", ["changed", "left out"])
@pytest.mark.parametrize(("name", "at"), [*(("lfm2", at) for at in (0, 1, 2)), ("qwen3_next", 0), ("qwen3_next", 1)])
def test_a_state_that_was_moved_on_in_vain_is_taken_back(name: str, at: int, how: str) -> None:
    """The layers behind it were computed ahead, and are computed again."""
    compiled()
    model = make_model(name)
    stage = Stage(model)

    def change(module: Any) -> None:
        inner = module.forward
        module.forward = lambda hidden, *args, **kwargs: (
            inner(hidden, *args, **kwargs) * 1.5 if how == "changed" else hidden
        )

    change(model.model.layers[at])
    got = [*stage.run(LONG, SHORT), *stage.run(LONG, DECODE)]
    stage.mode.remove()
    change(model.model.layers[at])
    assert same(got, [logits(model, ids) for ids in ALL])


@torch.no_grad()
@pytest.mark.parametrize("name", ["lfm2", "qwen3_next"])
def test_programs_and_the_modules_own_code_by_turns(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both find in a state what the other has left there."""
    compiled()
    model = make_model(name)
    want = [logits(model, ids) for ids in ALL]
    stage = Stage(model)
    inner, steps = stage.mode.forward, iter(range(1000))

    def forward(*args: Any) -> torch.Tensor:
        if next(steps) % 2:
            return inner(*args)
        with stage.fusion.aside():
            return inner(*args)

    monkeypatch.setattr(stage.mode, "forward", forward)
    assert same([*stage.run(LONG, SHORT), *stage.run(LONG, DECODE)], want)
    next(steps)
    assert same([*stage.run(LONG, SHORT), *stage.run(LONG, DECODE)], want)


@torch.no_grad()
@pytest.mark.parametrize("name", ["lfm2", "qwen3_next"])
def test_states_of_another_kind_are_for_the_modules_own_code(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = count_calls(monkeypatch)
    model = make_model(name)
    want = [logits(model, ids) for ids in LONG]
    stage = Stage(model)
    monkeypatch.setattr(ConvolutionProgram, "_state", lambda self, span: None)
    calls.clear()
    assert same(stage.run(LONG, SHORT), want)
    assert not calls["chain"]


def change_convolution(monkeypatch: pytest.MonkeyPatch, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    for name in ("causal_conv1d_fn", "causal_conv1d_update"):
        function = getattr(modeling_lfm2, name)
        monkeypatch.setattr(
            modeling_lfm2, name, lambda *args, function=function, **kwargs: change(function(*args, **kwargs))
        )


@torch.no_grad()
def test_what_is_more_than_a_convolution_is_no_program(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled()
    plain = modeling_lfm2.causal_conv1d_fn
    change_convolution(monkeypatch, torch.tanh)
    assert modeling_lfm2.causal_conv1d_fn is not plain
    model = make_model("lfm2")
    want = [logits(model, ids) for ids in LONG]
    stage = Stage(model)
    assert stage.fused["Lfm2DecoderLayer"] == 1
    assert same(stage.run(LONG, SHORT), want)


CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a little more": lambda out: out * 1.00008,
    "another type": torch.Tensor.half,
    "nothing of it": lambda out: torch.zeros(1, out.shape[1], 1),
}


@torch.no_grad()
def test_a_layer_that_is_refused_begins_with_the_same_state_again(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled()
    stage = Stage(make_model("lfm2"))
    stage.mode.unfuse()
    assert isinstance(stage.mode, PackedMode)
    recorded, steps = partial(record, stage.mode.attention, linear), [[(0, 50)], [(0, 47)]]
    for name, change in {"nothing": torch.Tensor.clone, **CHANGES}.items():
        with monkeypatch.context() as patch:
            change_convolution(patch, change)
            want = stage.run(LONG[:1], steps)
            layers = list(stage.model.model.layers)
            with record_modules(layers, recorded) as watches:
                assert all(map(torch.equal, stage.run(LONG[:1], steps), want)), name
        refused = [watch._refused is not None for watch in watches if watch.module in layers]
        assert refused == [name in CHANGES, False, name in CHANGES, name in CHANGES], name


class _Both(nn.Module):
    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, hidden: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        hidden = self.first(hidden, **kwargs)
        return self.second(hidden, **kwargs)  # type: ignore[no-any-return]


@torch.no_grad()
def test_a_convolution_and_attention_in_one_module_are_two_programs() -> None:
    compiled()
    model = make_model("lfm2")
    first, second, *others = model.model.layers
    want = [logits(model, ids) for ids in LONG]
    model.model.layers = nn.ModuleList([_Both(first, second), *others, nn.Identity()])
    model.model.layers[-1].forward = lambda hidden, **kwargs: hidden
    stage = Stage(model)
    assert "_Both" not in stage.fused
    assert stage.fused["Lfm2DecoderLayer"] == LAYERS
    assert same(stage.run(LONG, SHORT), want)


@torch.no_grad()
def test_sessions_without_tokens_and_rows_of_another_step() -> None:
    found = compiled()
    stage = Stage(make_model("lfm2"))
    program = stage.fusion._fused[0]._layer
    assert isinstance(program, ConvolutionProgram)
    layer: Any = LinearAttentionLayer()
    layer.lazy_initialization(conv_states=torch.zeros(program._shape), conv_kernel_size=program._shape[2])
    layer.has_previous_state[0] = True
    before = layer.conv_states[0].normal_().clone()
    session = SimpleNamespace(state=SimpleNamespace(layers=[layer]), length=7)
    step: Any = SimpleNamespace(spans=[Span(session, 0, 0)], tokens=0)  # type: ignore[arg-type]
    assert not program.begin(step, 1, keep=True)
    assert program.begin(step, 0, keep=True)
    convolve = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(found.convolve or 0)
    assert not convolve(ctypes.addressof(program._call))
    assert torch.equal(layer.conv_states[0], before)


@torch.no_grad()
@pytest.mark.parametrize("recorded", [True, False])
def test_what_a_failed_step_left_ready_is_dropped(recorded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled()
    model = make_model("lfm2")
    want = [logits(model, ids) for ids in LONG]
    stage = Stage(model)
    if not recorded:
        stage.fusion.unrecord()
    behind = [one for fused in stage.fusion._fused for one in fused._behind]
    inner, stale = stage.mode.forward, ChainResult(torch.ones(1), ((), {}), torch.ones(1), [])

    def forward(*args: Any) -> torch.Tensor:
        for fused in behind:
            fused._computed = stale
        return inner(*args)

    monkeypatch.setattr(stage.mode, "forward", forward)
    assert same(stage.run(LONG, DECODE), want)
    assert [fused._computed for fused in behind] == [None] * (LAYERS - 1)
    for fused in behind:
        fused._computed = stale
    stage.fusion.unlink()
    assert [fused._computed for fused in behind] == [None] * (LAYERS - 1)
    assert same(stage.run(LONG, DECODE), want)  # a state that another run has moved on is not taken back


def test_sessions_resume_rewind_and_fork() -> None:
    compiled()
    kit = Kit("lfm2")
    assert kit.mode.fusion is not None
    prompts = [list(range(20, 60)), list(range(100, 109)), list(range(7))]
    turns = [kit.send(prompt, 9) for prompt in prompts]
    kit.run()
    for prompt, turn in zip(prompts, turns, strict=True):
        assert kit.outcomes[turn].tokens == greedy(kit.model, prompt, 9, kit.outcomes[turn].tokens)
    first = [*prompts[0], *kit.outcomes[turns[0]].tokens]
    asked = [[*first, 7, 8, 9], [*first, 200, 201], [*prompts[0], 3]]  # one goes on, others from its checkpoints
    turns = [kit.send(prompt, 6) for prompt in asked]
    kit.run()
    for prompt, turn in zip(asked, turns, strict=True):
        assert kit.outcomes[turn].tokens == greedy(kit.model, prompt, 6, kit.outcomes[turn].tokens)


def test_states_that_a_failed_step_left_half_way_are_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled()
    kit = Kit("lfm2")
    prompt = list(range(20))
    want = greedy(kit.model, prompt, 12)
    turn = kit.send(prompt, 12)
    for _ in range(5):
        kit.step()

    def fail(*_: Any) -> None:
        raise RuntimeError("after all layers")

    with monkeypatch.context() as patch:
        patch.setattr(kit.model.lm_head, "forward", fail)
        kit.step()
    made = kit.outcomes[turn].tokens
    assert made == want[: len(made)]
    assert kit.ask([*prompt, *made], 12 - len(made)).tokens == want[len(made) :]
