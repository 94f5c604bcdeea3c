"""Numbers that become tensors in a step: the same tensors, and no copy."""

from __future__ import annotations

import pytest
import torch
from torch.distributions import Distribution, Normal

from scheduler.accel.gpu.constants import waitless_constants
from scheduler.model.decode_graphs import DeviceRead, DeviceReadWatch

CPU, META = torch.device("cpu"), torch.device("meta")


@pytest.mark.parametrize("number", [0.95, 3, True, float("inf")])
def test_a_number_is_filled_in_as_torch_would_have_copied_it(number: float) -> None:
    wanted = [torch.tensor(number), torch.tensor(number, dtype=torch.float16)]
    with waitless_constants(CPU):
        found = [torch.tensor(number, device="cpu"), torch.tensor(number, dtype=torch.float16, device="cpu")]
        others = torch.tensor([1.0, 2.0], device="cpu")
    assert [(t.dtype, t.shape, t.item()) for t in found] == [(t.dtype, t.shape, t.item()) for t in wanted]
    assert others.tolist() == [1.0, 2.0]


def test_a_range_is_made_on_the_device_unless_another_is_named() -> None:
    with waitless_constants(META):
        made, named = torch.arange(0, 8, 2, dtype=torch.float32), torch.arange(3, device="cpu")
    assert (made.device.type, made.dtype, made.shape) == ("meta", torch.float32, (4,))
    assert named.tolist() == [0, 1, 2]
    assert torch.arange(2).tolist() == [0, 1]


def quantile(device: str) -> torch.Tensor:
    """As a model does that keeps the largest part of its activations."""
    point = torch.tensor(0.95, dtype=torch.float32, device=device)
    found: torch.Tensor = Normal(0, 1).icdf(point)  # type: ignore[no-untyped-call]
    return found


def test_a_distribution_reads_nothing_from_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Distribution, "_validate_args", True)  # torch.compile turns it off for good
    with pytest.raises(DeviceRead), torch.no_grad(), DeviceReadWatch():
        quantile("meta")
    with waitless_constants(META), torch.no_grad(), DeviceReadWatch():
        assert quantile("meta").shape == ()
    with waitless_constants(CPU):
        found = quantile("cpu")
    assert torch.equal(found, quantile("cpu"))
    assert Distribution._validate_args
