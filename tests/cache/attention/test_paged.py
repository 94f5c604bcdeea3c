"""What the kernel over pages is told: plans, cuts, who is asked for which segments, and when nobody is."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from gpu_kit import Told, varlen_attn

from cache.attention import gpu, paged, trial, varlen
from cache.attention.paged import cut
from cache.attention.varlen import Varlen
from cache.memory.tier import PageShape
from cache.pages.layers import AttentionLayer, Reach, ScoreOptions
from cache.pages.packed import PackedStep

CPU = torch.device("cpu")
SHAPE = PageShape(2, 8, 2, 8, torch.float32)
PLAIN = ScoreOptions(0.5, None, None)


def step_of(*work: tuple[int, int], hide: bool = False, shape: PageShape = SHAPE) -> PackedStep:
    """A step of sessions with so many tokens cached and new."""
    return trial.made_up(work, CPU, shape, hide, torch.Generator().manual_seed(1))


def by_plan(
    step: PackedStep, layer: AttentionLayer, query: torch.Tensor, scores: ScoreOptions, out: torch.Tensor
) -> None:
    """All segments by one plan."""
    Told().attend(paged.plan(step, frozenset(range(len(step.segments)))), layer, step.tier, 0, query, scores, out)


@pytest.mark.parametrize(("capped", "sinks"), [(False, False), (True, True)])
def test_a_plan_tells_all_that_is_needed(
    capped: bool, sinks: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(trial, "WORK", (((40, 1), (0, 1), (17, 1)), ((30, 1), (20, 3), (0, 19))))
    assert trial.right("plans", by_plan, CPU, SHAPE, 4, capped, sinks)
    assert not caplog.records


def test_what_is_wrong_or_raises_is_said_and_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "warmturn.engine")
    monkeypatch.setattr(trial, "WORK", (((20, 3),),))

    def near(
        step: PackedStep, layer: AttentionLayer, query: torch.Tensor, scores: ScoreOptions, out: torch.Tensor
    ) -> None:
        by_plan(step, layer, query, scores, out)
        out[-1, 0, 0] += 1e-3

    def lazy(*about: Any) -> None:
        """Leaves the output as it is."""

    def broken(*about: Any) -> None:
        raise OSError("no compiler\nand more")

    for wrong in (near, lazy, broken):
        assert not trial.right("this way", wrong, CPU, SHAPE, 4, False, False)
    assert [record.getMessage().count("torch's is used") for record in caplog.records] == [1, 1, 1]
    assert caplog.messages[2].endswith("no compiler")


@pytest.mark.parametrize("group", [1, 3, 4, 8, 71])
@pytest.mark.parametrize("key_heads", [1, 2, 8])
@pytest.mark.parametrize(("segments", "tokens"), [(1, 1), (16, 16), (256, 256), (2, 33), (3, 2000)])
def test_a_launch_fits_a_tile_and_fills_the_device(group: int, key_heads: int, segments: int, tokens: int) -> None:
    for rows in (16, 64):
        shape = cut(group, key_heads, rows, segments, tokens, 132)
        assert shape.rows >= max(rows, group)
        assert shape.rows & (shape.rows - 1) == 0
        assert 1 <= shape.tokens * group <= shape.rows < (shape.tokens + 1) * group + group
        assert shape.splits in (1, 2, 4, 8, 16, 32)
        assert shape.splits == 1 or segments * key_heads * shape.splits <= 2 * 132
    assert cut(4, 8, 16, 1, 1, 132).splits == 32
    assert cut(4, 8, 16, 64, 64, 132).splits == 1


class Asked:
    """Who was asked for which segments."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, kernel: bool = True, flash: bool = True) -> None:
        self.told, self.flash = Told(), Varlen(CPU, varlen_attn)
        self.plans: list[list[int]] = []
        monkeypatch.setattr(self.told, "fits", lambda *about: kernel)
        monkeypatch.setattr(self.flash, "fits", lambda *about: flash and about[-1].reach is not Reach.CHUNKED)
        monkeypatch.setattr(paged, "kernel", lambda device: self.told)
        monkeypatch.setattr(varlen, "varlen", lambda device: self.flash)
        monkeypatch.setattr(varlen, "LONG", 6)
        plan = varlen.Plan

        def made(step: PackedStep, layer: AttentionLayer, numbers: frozenset[int]) -> varlen.Plan:
            self.plans.append(sorted(numbers))
            return plan(step, layer, numbers)

        monkeypatch.setattr(varlen, "Plan", made)

    def run(self, step: PackedStep, layer: AttentionLayer) -> frozenset[int]:
        """One layer; what is done is right."""
        query = torch.randn(4, step.tokens, 8, generator=torch.Generator().manual_seed(3))
        out = query.new_full((step.tokens, 4, 8), float("nan"))
        done = gpu.attend(step, layer, 0, query, PLAIN, out)
        want = trial.defined(step, layer, query, PLAIN)
        for number, segment in enumerate(step.segments):
            rows = slice(segment.row, segment.row + segment.size)
            if number in done:
                assert (out[rows] - want[rows]).abs().max() < 1e-5
            else:
                assert out[rows].isnan().all()
        return done


@pytest.mark.parametrize("layer", trial.LAYERS)
def test_long_segments_are_torchs_and_short_ones_the_kernels(
    layer: AttentionLayer, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Asked(monkeypatch)
    step = step_of((30, 1), (20, 9), (40, 5), (0, 30))
    assert asked.run(step, layer) == {0, 1, 2, 3}
    assert asked.run(step, layer) == {0, 1, 2, 3}  # by the plans that are there
    assert asked.plans == ([] if layer.reach is Reach.CHUNKED else [[1, 3]])
    assert asked.told.calls == 2


def test_hidden_tokens_are_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(monkeypatch)
    assert asked.run(step_of((30, 9), (0, 30), hide=True), trial.LAYERS[0]) == {0, 1}
    assert asked.plans == [[1]]


def test_without_the_kernel_torch_has_all_it_can_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(monkeypatch, kernel=False)
    assert asked.run(step_of((30, 1), (0, 30)), trial.LAYERS[0]) == {0, 1}
    assert asked.run(step_of((30, 1), (0, 30), hide=True), trial.LAYERS[0]) == {1}
    assert asked.run(step_of((30, 1), (0, 30)), trial.LAYERS[2]) == frozenset()


def test_without_torchs_the_kernel_has_all(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(monkeypatch, flash=False)
    assert asked.run(step_of((30, 1), (0, 30)), trial.LAYERS[0]) == {0, 1}
    assert asked.told.calls == 1


def test_a_cpu_has_neither() -> None:
    assert paged.kernel(CPU) is None
    assert varlen.varlen(CPU) is None
