"""Layers over latents are found by what they make of a basis."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_kit import PAGE, probed
from tiny_models import make_model

from cache.attention.absorbed import NotLinear
from cache.attention.backend import Signature
from cache.memory.memory_tier import PageShape
from cache.pages.layers import read_layers
from cache.pages.packed import PackedCache
from scheduler.forward import latents
from scheduler.forward.latents import LatentFinder
from scheduler.forward.mode import installed
from scheduler.forward.modes import PackedMode
from scheduler.model.measurement import Measurement


def find(model: Any) -> LatentFinder:
    measurement = Measurement(model, read_layers(model.config), PAGE, None)
    mode: Any = next(measurement.candidates((PackedMode,)))
    finder = LatentFinder(mode.attention)
    with installed(mode):
        try:
            with finder.watching():
                next(iter(measurement.steps(mode, False)))
        finally:
            mode.remove()
    return finder


def test_the_weights_are_those_of_the_projection() -> None:
    model = make_model("deepseek_v3")
    found = find(model).found
    assert sorted(found) == [0, 1]
    for number, absorbed in found.items():
        weight = model.model.layers[number].self_attn.kv_b_proj.weight.view(4, 32, 16)
        assert torch.allclose(absorbed.keys.transpose(1, 2), weight[:, :16], atol=1e-6)
        assert torch.allclose(absorbed.values, weight[:, 16:], atol=1e-6)


def test_layers_that_store_their_heads_are_left_alone() -> None:
    before = PackedCache.update
    assert not find(make_model("llama")).found
    assert PackedCache.update is before


def _add(module: Any, args: Any, out: torch.Tensor) -> torch.Tensor:
    return out + 0.1


def _bend(module: Any, args: Any, out: torch.Tensor) -> torch.Tensor:
    return out.tanh()


@pytest.mark.parametrize("change", [_add, _bend])
def test_a_projection_that_is_not_linear_is_left_to_the_model(change: Callable[..., torch.Tensor]) -> None:
    model = make_model("deepseek_v3")
    model.model.layers[1].self_attn.kv_b_proj.register_forward_hook(partial(change))
    with pytest.raises(NotLinear):
        find(model)
    verdict = probed(model)
    assert verdict.mode.name == "packed"
    assert not any(shape.joined for shape in verdict.shapes.values())
    assert verdict.error < 1e-4


def test_on_a_gpu_layers_are_taken_whose_rows_a_kernel_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("deepseek_v3")
    finder, asked = find(model), list[Signature]()

    def fits(signature: Signature) -> bool:
        asked.append(signature)
        return len(asked) != 2

    monkeypatch.setattr(latents, "backends", lambda device: [SimpleNamespace(fits=fits)])
    assert [*finder.taken(torch.device("cuda"))] == [0]
    assert [*finder.taken(torch.device("cpu"))] == [0, 1]
    rows = PageShape(1, 24, 1, 16, torch.float32, joined=True)
    assert asked == 2 * [Signature(rows, 4, 24, torch.float32, False, False, False)]
    # A step asks for the same.
    mode: Any = probed(model).mode
    assert [one for one in mode.attention._backends if one.shape.joined] == asked[:1]


def test_rows_that_no_kernel_takes_leave_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LatentFinder, "taken", lambda finder, device: {})
    model = make_model("deepseek_v3")
    verdict = probed(model)
    assert verdict.mode.graphed is not None
    assert verdict.mode.graphed.name == "rows"
    assert not any(shape.joined for shape in verdict.shapes.values())
    assert verdict.error < 1e-4
