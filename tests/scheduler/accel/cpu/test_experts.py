"""Packed experts: the sums of the chosen experts and nothing else is read, for a row whatever is beside it."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from architectures.build import build
from program_kit import compiled
from tiny_models import logits
from torch.func import functional_call
from transformers.integrations.moe import use_experts_implementation
from wide import widely

from cache.pages.layers import read_layers
from scheduler.accel.cpu import experts
from scheduler.accel.cpu.experts import PackedExperts, pack_experts, packed_experts
from scheduler.accel.cpu.packing import Packing
from scheduler.forward.rope import LongRope
from scheduler.model.measurement import describe
from scheduler.model.probe import probe
from scheduler.weights.stand_in import WeightStandIn

# Between them: gates that are joined, interleaved, clamped or missing, biases, weights the other way round.
NAMES = (
    "mixtral",
    "qwen3_moe",
    "deepseek_v2",
    "deepseek_v3",
    "gpt_oss",
    "glm4_moe",
    "qwen3_5_moe_text",
    "qwen3_next",
    "nemotron_h",
    "aria_text",
)
BFLOAT16 = ("mixtral", "gpt_oss", "aria_text")  # by default, too
PROMPT = list(range(60, 90))
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packing pays, however small the weights."""
    compiled()
    monkeypatch.setattr(experts, "_MOST", dict.fromkeys(experts._MOST, float("inf")))


def modules_of(model: Any) -> list[Any]:
    return [module for module in model.modules() if experts.is_experts(module)]


def made_up(module: Any, tokens: int, choices: int = 2) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    dense = module.down_proj
    inside = dense.shape[2 if module.is_transposed else 1]
    weights, index = torch.rand(tokens, dense.shape[0], generator=generator).topk(choices)
    return torch.randn(tokens, inside, generator=generator).to(dense.dtype), index, weights.to(dense.dtype)


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(name, dtype, marks=() if dtype is torch.float32 or name in BFLOAT16 else pytest.mark.wide)
        for name in NAMES
        for dtype in ROUNDING
    ],
)
def test_packed_experts_sum_what_their_own_code_sums_in_float32(name: str, dtype: torch.dtype) -> None:
    model = build(name, "causal").to(dtype)
    found = modules_of(model)
    calls = [made_up(module, 9) for module in found]
    want = []
    for module, call in zip(found, calls, strict=True):
        plain = {key: weight.float() for key, weight in module.named_parameters()}
        want.append(functional_call(module, plain, (call[0].float(), call[1], call[2].float())))
    packing = Packing({})
    pack_experts(model, packing)
    assert len(packing) == len(found) >= 1
    for module, call, expected in zip(found, calls, want, strict=True):
        got = module(*call)
        assert got.dtype is dtype
        assert float((got.float() - expected).norm() / expected.norm()) < ROUNDING[dtype]
    assert not any(one.touched for one in packing._modules)


@torch.no_grad()
@pytest.mark.parametrize("dtype", ROUNDING)
def test_a_row_is_the_same_to_the_bit_whatever_is_beside_it_and_for_any_threads(dtype: torch.dtype) -> None:
    model = build("gpt_oss", "causal").to(dtype)
    pack_experts(model, Packing({}))
    (module, *_) = [module for module in model.modules() if packed_experts(module) is not None]
    hidden, index, weights = made_up(module, 301)
    want = torch.cat([module(hidden[i : i + 1], index[i : i + 1], weights[i : i + 1]) for i in range(len(hidden))])
    threads = torch.get_num_threads()
    try:
        for many in (1, 2):
            torch.set_num_threads(many)
            for rows in (2, 17, 33, 301):
                assert torch.equal(module(hidden[:rows], index[:rows], weights[:rows]), want[:rows])
    finally:
        torch.set_num_threads(threads)


@torch.no_grad()
def test_a_token_reads_the_experts_that_it_chooses() -> None:
    model, packing = build("mixtral", "causal"), Packing({})
    found = modules_of(model)
    pack_experts(model, packing)
    for module in found:
        module(*made_up(module, 3, choices=2))
    whole = sum(packed.nbytes for module in found if (packed := packed_experts(module)) is not None)
    assert packing.bytes_of_row == whole * 2 // found[0].down_proj.shape[0]


@torch.no_grad()
def test_experts_that_no_row_has_chosen_are_not_read_and_a_number_of_none_adds_nothing() -> None:
    model = build("mixtral", "causal").to(torch.bfloat16)
    pack_experts(model, Packing({}))
    module = next(module for module in model.modules() if packed_experts(module) is not None)
    hidden, _, weights = made_up(module, 5)
    count = module.down_proj.shape[0]
    chosen = torch.tensor([[0, 1]] * 5)
    want = module(hidden, chosen, weights)
    packed = packed_experts(module)
    assert packed is not None
    for matrix in (packed.up, packed.down):
        parts = matrix.matrix.data.view(count, -1)
        parts[2:] = float("nan")
    assert torch.equal(module(hidden, chosen, weights), want)
    beside = module(hidden, torch.tensor([[0, count], [1, -1], *[[0, 1]] * 3]), weights)
    assert torch.equal(beside[2:], want[2:])
    assert not torch.equal(beside[:1], want[:1])
    single = module(hidden[:1], torch.tensor([[0]]), weights[:1, :1])
    assert torch.equal(beside[:1], single)


@torch.no_grad()
@pytest.mark.parametrize(("name", "dtype"), [("mixtral", torch.bfloat16), ("gpt_oss", torch.float32)])
def test_plain_weights_are_released_and_come_back_to_the_bit(name: str, dtype: torch.dtype) -> None:
    model = build(name, "causal").to(dtype)
    found = modules_of(model)
    before = [{key: weight.clone() for key, weight in module.named_parameters()} for module in found]
    alive = [weakref.ref(weight) for module in found for key, weight in module.named_parameters() if "bias" not in key]
    want = logits(model, PROMPT)
    packing = Packing({})
    pack_experts(model, packing)
    gc.collect()
    assert not any(one() is not None for one in alive)
    assert packing.nbytes >= sum(weight.nbytes for one in before for key, weight in one.items() if "bias" not in key)
    assert isinstance(found[0].down_proj, WeightStandIn)
    packing.remove()
    for module, weights in zip(found, before, strict=True):
        for key, weight in weights.items():
            assert torch.equal(getattr(module, key), weight)
            assert type(getattr(module, key)) is torch.nn.Parameter
    assert torch.equal(logits(model, PROMPT), want)


class _Halved:
    """The configuration of a module."""

    _experts_implementation = "eager"


@use_experts_implementation
class _Halving(torch.nn.Module):
    """Its own code is not what its attributes say."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.act_fn = torch.nn.SiLU()
        self.gate_up_proj = torch.nn.Parameter(torch.randn(4, 96, 32) / 6)
        self.down_proj = torch.nn.Parameter(torch.randn(4, 32, 48) / 7)

    def forward(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        gate, up = (hidden @ self.gate_up_proj[0].T).chunk(2, dim=-1)
        out: torch.Tensor = (self.act_fn(gate) * up / 2) @ self.down_proj[0].T
        return out


class _Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config: Any = _Halved()
        self.experts: Any = _Halving(self.config)

    def set_experts_implementation(self, name: str) -> None:
        self.config._experts_implementation = name


@torch.no_grad()
def test_a_module_that_computes_something_else_keeps_its_own_code() -> None:
    model, packing = _Model(), Packing({})
    call = made_up(model.experts, 7)
    want = model.experts(*call)
    pack_experts(model, packing)
    assert len(packing) == 0
    assert type(model.experts.down_proj) is torch.nn.Parameter
    assert torch.equal(model.experts(*call), want)


@torch.no_grad()
def test_what_is_slower_for_many_tokens_in_plain_weights_runs_for_few(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("mixtral", "causal")
    found = modules_of(model)
    monkeypatch.setattr(Packing, "pays", lambda self, what, plain, packed, x, most, nbytes: x.shape[1] <= 16)
    packing = Packing({})
    pack_experts(model, packing)
    assert len(packing) == len(found)
    ran: list[int] = []
    forward = PackedExperts.forward

    def watched(self: PackedExperts, *given: torch.Tensor) -> torch.Tensor:
        ran.append(len(given[0]))
        return forward(self, *given)

    monkeypatch.setattr(PackedExperts, "forward", watched)
    for tokens in (4, 16, 17):
        call = made_up(found[0], tokens)
        want = type(found[0]).forward.__wrapped__(found[0], *call)
        assert float((found[0](*call) - want).norm() / want.norm()) < 1e-5
    assert ran == [4, 16]


@torch.no_grad()
@pytest.mark.parametrize("name", widely(["mixtral", "gpt_oss", "deepseek_v3", "qwen3_next"], "gpt_oss qwen3_next"))
def test_a_model_is_probed_as_before_and_nothing_else_reads_packed_experts(name: str) -> None:
    model = build(name, "causal")
    layers = read_layers(model.config.get_text_config(decoder=True))
    plain = probe(model, layers, 4, LongRope(model))
    plain.mode.remove()
    packing = Packing({})
    pack_experts(model, packing)
    packed = len(packing)
    verdict = probe(model, layers, 4, LongRope(model), packing=packing)
    verdict.mode.remove()
    assert describe(verdict.mode) == describe(plain.mode), verdict.report
    assert packed == len(packing) >= 3
