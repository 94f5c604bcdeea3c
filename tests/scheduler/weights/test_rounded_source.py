"""Plain weights that are rounded: within half a step of every value, in one way whatever rows are asked for."""

from __future__ import annotations

import pytest
import torch

from scheduler.weights.rounded_source import RoundedSource

GAUSSIAN = torch.randn(70, 96, generator=torch.Generator().manual_seed(1)) / 50


@pytest.mark.parametrize(("bits", "most"), [(8, 0.006), (4, 0.08)])
@pytest.mark.parametrize("factor", [1.0, 1e-6, 1e6])
def test_the_error_is_what_so_many_bits_leave(bits: int, most: float, factor: float) -> None:
    weight = GAUSSIAN * factor
    source = RoundedSource(weight, bits)
    got = source.dequantise(0, 70)
    assert (got - weight).norm() / weight.norm() < most
    scales = source.rows(0, 70).scales
    assert scales is not None
    assert bool(((got - weight).abs().view(70, 3, 32) <= scales[..., None] * 1.2).all())
    assert source.nbytes == 70 * 3 * (32 * bits // 8 + (1 if bits == 8 else 2) * (2 if factor == 1 else 4))


@pytest.mark.parametrize("bits", [8, 4])
def test_rows_are_the_same_however_they_are_asked_for(bits: int) -> None:
    source = RoundedSource(GAUSSIAN, bits)
    whole = source.dequantise(0, 70)
    assert torch.equal(source.dequantise(11, 40), whole[11:40])
    assert torch.equal(source.take(torch.tensor([69, 3, 3])), whole[[69, 3, 3]])


@pytest.mark.parametrize("bits", [8, 4])
def test_experts_follow_each_other(bits: int) -> None:
    weight = GAUSSIAN.view(2, 35, 96)
    assert torch.equal(RoundedSource(weight, bits).dequantise(0, 70), RoundedSource(GAUSSIAN, bits).dequantise(0, 70))
    turned = weight.transpose(1, 2).contiguous().transpose(1, 2)  # as a module has it that stores it the other way
    assert torch.equal(RoundedSource(turned, bits).dequantise(0, 70), RoundedSource(GAUSSIAN, bits).dequantise(0, 70))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("value", [0.0, 0.25, -3.0])
def test_what_is_constant_stays_so(bits: int, value: float) -> None:
    weight = torch.full((2, 64), value)
    torch.testing.assert_close(RoundedSource(weight, bits).dequantise(0, 2), weight, rtol=1e-3, atol=0.0)


def test_bfloat16_is_read_as_it_is() -> None:
    weight = GAUSSIAN.bfloat16()
    assert torch.equal(RoundedSource(weight, 8).dequantise(0, 70), RoundedSource(weight.float(), 8).dequantise(0, 70))
