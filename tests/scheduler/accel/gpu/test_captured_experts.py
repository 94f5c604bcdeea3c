"""Experts that do not wait for the device say what transformers' experts say."""

from __future__ import annotations

import pytest
import torch
from tiny_models import make_model

from scheduler.accel.gpu.captured_experts import NAME, waitless_experts
from scheduler.model.decode_graphs import DeviceRead, DeviceReadWatch


@pytest.mark.parametrize("name", ["gpt_oss", "deepseek_v3"])
@pytest.mark.parametrize("tokens", [1, 2, 9])
def test_they_say_the_same_and_wait_for_nothing(name: str, tokens: int) -> None:
    model = make_model(name)
    model.set_experts_implementation("grouped_mm")
    experts = next(module for module in model.modules() if hasattr(module, "_is_expert_parallel"))
    random = torch.Generator().manual_seed(tokens)
    hidden = torch.randn(tokens, model.config.hidden_size, generator=random)
    weights, chosen = torch.rand(tokens, experts.num_experts, generator=random).topk(2)
    with torch.no_grad():
        want = experts(hidden, chosen, weights)
        with pytest.raises(DeviceRead), DeviceReadWatch():
            experts(hidden, chosen, weights)
        with waitless_experts(model), DeviceReadWatch():
            assert experts.config._experts_implementation == NAME
            got = experts(hidden, chosen, weights)
    assert experts.config._experts_implementation == "grouped_mm"
    assert (got - want).abs().max() <= 1e-5 * want.abs().max()
