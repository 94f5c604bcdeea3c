"""The gated delta rule: what the kernel computes, and which rules are recognised. Its layers in chains:
test_convolution_program.py.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from program_kit import compiled
from stage_kit import LONG, SHORT, Stage, same
from tiny_models import logits, make_model
from transformers.models.qwen3_next import modeling_qwen3_next

from scheduler.accel.cpu.delta_rule_program import DeltaRule, RuleCall


def _changed(what: str, found: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    out, matrix = found
    return (out * 1.001, matrix) if what == "its result" else (out, matrix if matrix is None else matrix * 1.001)


def change_rule(monkeypatch: pytest.MonkeyPatch, change: Callable[..., Any]) -> None:
    """``change`` gets the function, its arguments and its options."""
    for name in ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"):
        function = getattr(modeling_qwen3_next, name)

        def rule(
            query: Any, key: Any, value: Any, g: Any, beta: Any, initial_state: Any = None, _inner: Any = function,
            **options: Any,
        ) -> Any:  # fmt: skip
            return change(_inner, (query, key, value, g, beta), {"initial_state": initial_state, **options})

        monkeypatch.setattr(modeling_qwen3_next, name, rule)


@torch.no_grad()
@pytest.mark.parametrize("what", ["its result", "its matrices", "its keys", "its convolution"])
def test_another_rule_is_no_program(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled()

    def change(rule: Any, given: tuple[Any, ...], options: dict[str, Any]) -> Any:
        query, key, *others = given
        found = rule(query, key.roll(1, -1) if what == "its keys" else key, *others, **options)
        return _changed(what, found) if what in ("its result", "its matrices") else found

    change_rule(monkeypatch, change)
    if what == "its convolution":
        for name in ("causal_conv1d_fn", "causal_conv1d_update"):
            inner = getattr(modeling_qwen3_next, name)
            monkeypatch.setattr(modeling_qwen3_next, name, lambda *args, f=inner, **more: f(*args, **more).tanh())
    model = make_model("qwen3_next")
    want = [logits(model, ids) for ids in LONG]
    stage = Stage(model)
    assert stage.fused["Qwen3NextDecoderLayer"] == 1
    if what != "its matrices":  # such a model says something else with every cut
        assert same(stage.run(LONG, SHORT), want)


@torch.no_grad()
def test_a_rule_whose_keys_have_any_length_is_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled()
    change_rule(monkeypatch, lambda rule, given, options: rule(*given, **{**options, "use_qk_l2norm_in_kernel": False}))
    model = make_model("qwen3_next")
    want = [logits(model, ids) for ids in LONG]
    stage = Stage(model)
    assert stage.fused["Qwen3NextDecoderLayer"] == 3
    assert same(stage.run(LONG, SHORT), want)


# keys, heads, depth, width, taps
SIZES = [(2, 4, 128, 128, 4), (3, 3, 24, 20, 2), (1, 4, 7, 40, 3), (2, 2, 64, 3, 5), (1, 1, 1, 1, 1)]


class _Rule:
    """A rule with random weights, as the kernel computes it and as it is defined."""

    def __init__(self, size: tuple[int, ...], activated: bool = True, normalised: bool = True) -> None:
        keys, heads, depth, width, taps = size
        self.rule = DeltaRule(keys, heads, depth, width, activated, normalised, depth**-0.5)
        generator = torch.Generator().manual_seed(sum(size))
        self.weight = torch.randn(taps, self.rule.channels, generator=generator)
        self.bias = torch.randn(self.rule.channels, generator=generator)
        self.inputs = torch.randn(70, self.rule.channels, generator=generator)
        self.decay = -torch.rand(70, self.rule.heads, generator=generator)
        self.strength = torch.rand(70, self.rule.heads, generator=generator)
        self.past = torch.randn(1, self.rule.channels, taps, generator=generator)
        self.matrix = torch.randn(self.rule.state_shape, generator=generator)

    def kernel(self, cuts: list[int], threads: int = 1) -> tuple[torch.Tensor, ...]:
        """The results, the last inputs and the matrices after steps that end at these tokens."""
        found, rule = compiled(), self.rule
        past, matrix, out = self.past.clone(), self.matrix.clone(), torch.full((70, rule.heads, rule.width), torch.nan)
        call = RuleCall.of(rule, self.weight, self.bias, [torch.float32] * 4)
        call.threads, call.together = threads, found.team
        call.input, call.decay, call.strength = (x.data_ptr() for x in (self.inputs, self.decay, self.strength))
        call.out, call.count = out.data_ptr(), 1
        function = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(found.delta_rule or 0)
        for first, last in zip([0, *cuts], cuts, strict=False):
            span = np.array([past.data_ptr(), 0, matrix.data_ptr(), 0, first, last - first], np.int64)
            call.spans = span.ctypes.data
            assert not function(ctypes.addressof(call))
        return out, past, matrix

    def defined(self) -> tuple[torch.Tensor, ...]:
        """The same in float64, token by token."""
        rule, taps = self.rule, len(self.weight)
        row = torch.cat([self.past[0].t(), self.inputs]).double()
        matrix, out = self.matrix[0].double(), []
        for t, (decay, strength) in enumerate(zip(self.decay.double().exp(), self.strength.double(), strict=True)):
            mixed = (self.weight.double() * row[t + 1 : t + 1 + taps]).sum(0) + self.bias
            mixed = torch.nn.functional.silu(mixed) if rule.activated else mixed
            size = rule.keys * rule.depth
            query, key = (part.view(rule.keys, rule.depth) for part in torch.split(mixed[: 2 * size], size))
            if rule.normalised:
                query, key = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (query, key))
            query, key = (x.repeat_interleave(rule.heads // rule.keys, 0) for x in (query * rule.scale, key))
            value = mixed[2 * size :].view(rule.heads, rule.width)
            matrix = matrix * decay[:, None, None]
            change = (value - torch.einsum("hkv,hk->hv", matrix, key)) * strength[:, None]
            matrix = matrix + key[:, :, None] * change[:, None]
            out.append(torch.einsum("hkv,hk->hv", matrix, query))
        return torch.stack(out), row[-taps:].t()[None], matrix[None]


def _close(one: torch.Tensor, other: torch.Tensor) -> bool:
    return float((one - other).abs().max()) <= 1e-4 * float(other.abs().max())


@pytest.mark.parametrize("size", SIZES)
def test_the_kernel_computes_the_rule_however_a_prompt_is_cut(size: tuple[int, ...]) -> None:
    one = _Rule(size)
    whole = one.kernel([70])
    assert all(map(_close, whole, one.defined()))
    for cuts in ([1, 70], [32, 33, 70], [31, 64, 70], list(range(1, 71))):
        assert all(map(torch.equal, one.kernel(cuts), whole)), cuts
    assert all(map(torch.equal, one.kernel([70], threads=3), whole))


@pytest.mark.parametrize(("activated", "normalised"), [(True, False), (False, True), (False, False)])
def test_rules_without_an_activation_or_with_keys_of_any_length(activated: bool, normalised: bool) -> None:
    one = _Rule(SIZES[1], activated, normalised)
    if not normalised:
        one.inputs, one.past = one.inputs / 9, one.past / 9  # else the matrices grow without bound
        one.bias = one.bias / 9
    assert all(map(_close, one.kernel([40, 70]), one.defined()))
