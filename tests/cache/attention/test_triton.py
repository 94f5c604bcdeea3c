"""What the kernel over pages is told: plans and launches; which backend gets which spans on a GPU."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from gpu_kit import TritonDouble, varlen_attn

from cache.attention import packed_attention, self_test, varlen
from cache.attention.backend import Signature
from cache.attention.backends import backends
from cache.attention.packed_attention import PackedAttention
from cache.attention.self_test import LAYERS, SelfTest, StepSpec, random_step, reference
from cache.attention.triton import TritonPlan, triton_backend
from cache.attention.varlen import VarlenBackend, VarlenPlan, varlen_backend
from cache.memory.memory_tier import PageShape
from cache.pages.layers import AttentionLayer, Reach, ScoreOptions
from cache.pages.packed import PackedStep

CPU = torch.device("cpu")
SHAPE = PageShape(2, 8, 2, 8, torch.float32)
PLAIN = ScoreOptions(0.5, None, None)


def step_of(*work: tuple[int, int], hide: bool = False, shape: PageShape = SHAPE) -> PackedStep:
    """A step of sessions with so many tokens cached and new."""
    return random_step(StepSpec(work, hide), CPU, shape, torch.Generator().manual_seed(1))


def signature(capped: bool = False, sinks: bool = False, chunked: bool = False) -> Signature:
    return Signature(SHAPE, 4, 8, torch.float32, capped, sinks, chunked)


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize(("capped", "sinks"), [(False, False), (True, True)])
def test_a_plan_tells_all_that_is_needed(
    capped: bool, sinks: bool, chunked: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(self_test, "SESSIONS", (((40, 1), (0, 1), (17, 1)), ((30, 1), (20, 3), (0, 19))))
    assert SelfTest(TritonDouble(), "plans", CPU).passes(signature(capped, sinks, chunked))
    assert not caplog.records


class Near(TritonDouble):
    """One number is a little off."""

    def attend(self, *args: Any) -> None:
        super().attend(*args)
        args[-1][-1, 0, 0] += 1e-3


class Lazy(TritonDouble):
    def attend(self, *args: Any) -> None:
        pass


class Choosy(TritonDouble):
    def plan(self, *args: Any) -> None:
        return None


class Broken(TritonDouble):
    def attend(self, *args: Any) -> None:
        raise OSError("no compiler\nand more")


def test_what_is_wrong_or_raises_is_said_once_and_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "warmturn.engine")
    monkeypatch.setattr(self_test, "SESSIONS", (((20, 3),),))
    for wrong in (Near(), Lazy(), Choosy(), Broken()):
        tested = SelfTest(wrong, "this way", CPU)
        assert not tested.passes(signature())
        assert not tested.passes(signature())
    assert [record.getMessage().count("torch is used") for record in caplog.records] == [1, 1, 1, 1]
    assert caplog.messages[3].endswith("no compiler")


class Device:
    """A GPU's two backends, and which plans the second kind makes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, kernel: bool = True, flash: bool = True) -> None:
        self.double, self.flash = TritonDouble(), VarlenBackend(CPU, varlen_attn)
        self.plans: list[list[int]] = []
        monkeypatch.setattr(self.double, "fits", lambda signature: kernel)
        monkeypatch.setattr(self.flash, "fits", lambda signature: flash and not signature.chunked)
        monkeypatch.setattr(packed_attention, "backends", lambda device: [self.flash, self.double])
        monkeypatch.setattr(varlen, "LONG", 6)

        def made(step: PackedStep, layer: AttentionLayer, numbers: frozenset[int], *rest: Any) -> VarlenPlan:
            self.plans.append(sorted(numbers))
            return VarlenPlan(step, layer, numbers, *rest)

        monkeypatch.setattr(varlen, "VarlenPlan", made)

    def run(self, step: PackedStep, layer: AttentionLayer) -> set[int]:
        """The spans that are done in one layer; what is done is right."""
        query = torch.randn(4, step.tokens, 8, generator=torch.Generator().manual_seed(3))
        out = query.new_full((step.tokens, 4, 8), float("nan"))
        left = PackedAttention([layer])._attend_in_place(step, layer, 0, query, PLAIN, out)
        want = reference(step, layer, query, PLAIN)
        for number, span in enumerate(step.spans):
            rows = slice(span.row, span.row + span.size)
            if number in left:
                assert out[rows].isnan().all()
            else:
                assert (out[rows] - want[rows]).abs().max() < 1e-5
        return set(range(len(step.spans))) - left


@pytest.mark.parametrize("layer", LAYERS)
def test_long_spans_are_torchs_and_short_ones_the_kernels(
    layer: AttentionLayer, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device(monkeypatch)
    step = step_of((30, 1), (20, 9), (40, 5), (0, 30))
    assert device.run(step, layer) == {0, 1, 2, 3}
    assert device.run(step, layer) == {0, 1, 2, 3}  # by the plans that are there
    assert device.plans == ([] if layer.reach is Reach.CHUNKED else [[1, 3]])
    assert device.double.calls == 2


def test_a_step_of_long_spans_needs_one_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    assert device.run(step_of((20, 9), (0, 30)), LAYERS[0]) == {0, 1}
    assert device.plans == [[0, 1]]
    assert device.double.calls == 0


def test_hidden_tokens_are_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    assert device.run(step_of((30, 9), (0, 30), hide=True), LAYERS[0]) == {0, 1}
    assert device.plans == [[1]]


def test_layers_of_all_kinds_share_the_kernels_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    device, step = Device(monkeypatch, flash=False), step_of((30, 1), (20, 3))
    for layer in LAYERS:
        device.run(step, layer)
    assert [type(plan) for plan in step.plans.values()] == [TritonPlan]


def test_without_the_kernel_torch_has_all_it_can_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch, kernel=False)
    assert device.run(step_of((30, 1), (0, 30)), LAYERS[0]) == {0, 1}
    assert device.plans == [[0, 1]]
    assert device.run(step_of((30, 1), (0, 30), hide=True), LAYERS[0]) == {1}
    assert device.run(step_of((30, 1), (0, 30)), LAYERS[2]) == set()


def test_without_torchs_the_kernel_has_all(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch, flash=False)
    assert device.run(step_of((30, 1), (0, 30)), LAYERS[0]) == {0, 1}
    assert device.double.calls == 1


def test_a_cpu_has_neither() -> None:
    assert triton_backend(CPU) is None
    assert varlen_backend(CPU) is None
    assert len(backends(CPU)) <= 1
