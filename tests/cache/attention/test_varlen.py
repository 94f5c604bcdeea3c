"""What torch's flash kernels are told, against a double that computes what torch documents."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu_kit import varlen_attn

from cache.attention import self_test
from cache.attention.backend import Signature
from cache.attention.self_test import LAYERS, StepSpec, random_step, reference
from cache.attention.varlen import VarlenBackend, VarlenPlan, varlen_backend
from cache.memory.memory_tier import PageShape
from cache.pages.layers import ScoreOptions

CPU = torch.device("cpu")
HALF = PageShape(2, 8, 2, 8, torch.float16)
PLAIN = ScoreOptions(0.5, None, None)
FULL, SLIDING, _ = LAYERS


def newer(*args: Any, enable_gqa: bool = False, **options: Any) -> Any:
    """torch 2.12 and later: groups of heads are asked for."""
    assert enable_gqa
    return varlen_attn(*args, **options)


@pytest.mark.parametrize("function", [varlen_attn, newer])
@pytest.mark.parametrize("sinks", [False, True])
def test_it_is_right_where_it_fits(function: Any, sinks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_test, "SESSIONS", (((40, 1), (0, 1)), ((30, 1), (20, 3), (0, 30), (25, 21))))
    assert VarlenBackend(CPU, function).fits(Signature(HALF, 4, 8, torch.float16, False, sinks, False))


def test_what_is_told_for_some_spans_is_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    step = random_step(
        StepSpec(((30, 2), (20, 9), (0, 5), (40, 7)), False), CPU, HALF, torch.Generator().manual_seed(1)
    )
    query = torch.randn(4, step.tokens, 8, generator=torch.Generator().manual_seed(2)).half()
    out = query.new_full((step.tokens, 4, 8), float("nan"))
    for layer in (FULL, SLIDING):
        plan = VarlenPlan(step, layer, frozenset({3, 1}))
        assert plan.rows.tolist() == [*range(2, 11), *range(16, 23)]
        VarlenBackend(CPU, varlen_attn).attend(plan, step, layer, 0, query, PLAIN, out)
        want = reference(step, layer, query.float(), PLAIN)
        assert (out[plan.rows] - want[plan.rows]).abs().max() < 2e-3 * want.abs().max()
        assert out[:2].isnan().all()
        assert out[11:16].isnan().all()
    assert VarlenPlan(step, SLIDING, frozenset({3})).places.shape == (47 - 23,)  # none before the window


@pytest.mark.parametrize(
    "signature",
    [
        Signature(HALF, 4, 8, torch.float16, False, False, True),
        Signature(HALF, 4, 8, torch.float16, True, False, False),
        Signature(HALF, 3, 8, torch.float16, False, False, False),
        Signature(HALF, 4, 8, torch.bfloat16, False, False, False),
        Signature(HALF._replace(dtype=torch.float32), 4, 8, torch.float32, False, False, False),
        Signature(HALF._replace(value_dim=16), 4, 8, torch.float16, False, False, False),
        Signature(HALF._replace(key_dim=12, value_dim=12), 4, 12, torch.float16, False, False, False),
        Signature(HALF._replace(key_dim=264, value_dim=264), 4, 264, torch.float16, False, False, False),
    ],
)
def test_what_it_cannot_compute_it_is_not_asked_for(signature: Signature) -> None:
    def never(*args: Any, **options: Any) -> None:
        raise AssertionError

    assert not VarlenBackend(CPU, never).fits(signature)


@pytest.mark.parametrize(
    ("capability", "installed", "right", "used"),
    [
        ((9, 0), True, True, True),
        ((9, 0), True, False, False),
        ((9, 0), False, True, False),
        ((8, 0), True, True, False),
        ((10, 0), True, True, False),
    ],
)
def test_flash_attention_3_is_used_where_it_is_installed_and_right(
    capability: tuple[int, int], installed: bool, right: bool, used: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    active: list[str] = []

    def activate(name: str) -> None:
        if not installed:
            raise ImportError("No module named 'flash_attn_interface'")
        active.append(name)

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", activate)
    monkeypatch.setattr(torch.nn.attention, "restore_flash_attention_impl", active.clear)
    asked: list[Signature] = []

    def fits(backend: VarlenBackend, signature: Signature) -> bool:
        asked.append(signature)
        return right or not signature.sinks

    monkeypatch.setattr(VarlenBackend, "fits", fits)
    varlen_backend.cache_clear()
    try:
        assert isinstance(varlen_backend(torch.device("cuda")), VarlenBackend)
        assert active == (["FA3"] if used else [])
        assert bool(asked) is (installed and capability == (9, 0))
    finally:
        varlen_backend.cache_clear()
