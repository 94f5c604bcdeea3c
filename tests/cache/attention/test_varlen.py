"""What torch's flash kernels are told, against a double that computes what torch documents."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu_kit import varlen_attn

from cache.attention import trial
from cache.attention.varlen import Plan, Varlen
from cache.memory.tier import PageShape
from cache.pages.layers import ScoreOptions

CPU = torch.device("cpu")
HALF = PageShape(2, 8, 2, 8, torch.float16)
PLAIN = ScoreOptions(0.5, None, None)
FULL, SLIDING, CHUNKED = trial.LAYERS


def newer(*args: Any, enable_gqa: bool = False, **options: Any) -> Any:
    """torch 2.12 and later: groups of heads are asked for."""
    assert enable_gqa
    return varlen_attn(*args, **options)


@pytest.mark.parametrize("function", [varlen_attn, newer])
@pytest.mark.parametrize("sinks", [None, torch.zeros(4)])
def test_it_is_right_where_it_fits(function: Any, sinks: torch.Tensor | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "WORK", (((40, 1), (0, 1)), ((30, 1), (20, 3), (0, 30), (25, 21))))
    assert Varlen(CPU, function).fits(HALF, 4, 8, torch.float16, ScoreOptions(0.5, None, sinks), FULL)


def test_what_is_told_for_some_segments_is_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    step = trial.made_up(((30, 2), (20, 9), (0, 5), (40, 7)), CPU, HALF, False, torch.Generator().manual_seed(1))
    query = torch.randn(4, step.tokens, 8, generator=torch.Generator().manual_seed(2)).half()
    out = query.new_full((step.tokens, 4, 8), float("nan"))
    for layer in (FULL, SLIDING):
        plan = Plan(step, layer, {3, 1})
        assert plan.rows.tolist() == [*range(2, 11), *range(16, 23)]
        Varlen(CPU, varlen_attn).attend(plan, step, 0, query, PLAIN, out)
        want = trial.defined(step, layer, query.float(), PLAIN)
        assert (out[plan.rows] - want[plan.rows]).abs().max() < 2e-3 * want.abs().max()
        assert out[:2].isnan().all()
        assert out[11:16].isnan().all()
    assert Plan(step, SLIDING, {3}).places.shape == (47 - 23,)  # no key before the first window is read


@pytest.mark.parametrize(
    ("shape", "heads", "dtype", "scores", "layer"),
    [
        (HALF, 4, torch.float16, PLAIN, CHUNKED),
        (HALF, 4, torch.float16, ScoreOptions(0.5, 30.0, None), FULL),
        (HALF, 3, torch.float16, PLAIN, FULL),
        (HALF, 4, torch.bfloat16, PLAIN, FULL),
        (HALF._replace(dtype=torch.float32), 4, torch.float32, PLAIN, FULL),
        (HALF._replace(value_dim=16), 4, torch.float16, PLAIN, FULL),
        (HALF._replace(key_dim=12, value_dim=12), 4, torch.float16, PLAIN, FULL),
        (HALF._replace(key_dim=264, value_dim=264), 4, torch.float16, PLAIN, FULL),
    ],
)
def test_what_it_cannot_compute_it_is_not_asked_for(
    shape: PageShape, heads: int, dtype: torch.dtype, scores: ScoreOptions, layer: Any
) -> None:
    def never(*args: Any, **options: Any) -> None:
        raise AssertionError

    assert not Varlen(CPU, never).fits(shape, heads, shape.key_dim, dtype, scores, layer)
