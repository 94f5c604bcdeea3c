"""Packed weights as they lie on a device, by torch in host memory: their values, their size, products, experts."""

from __future__ import annotations

import pytest
import torch
from device_weights import KINDS, MOST_OF, device_weight, packed_source

from scheduler.accel.gpu import packed_product
from scheduler.accel.gpu.device_form import MOST, DeviceForm
from scheduler.accel.gpu.device_weight import DeviceWeight, device_weight_of
from scheduler.accel.gpu.packed_product import ROWS, block_of, multiply, multiply_routed, tiles_of
from scheduler.model.decode_graphs import DeviceRead, DeviceReadWatch
from scheduler.weights.quantised_weight import QuantisedWeight
from scheduler.weights.stand_in import WeightStandIn

CPU = torch.device("cpu")


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_those_of_the_checkpoint_and_take_no_more(kind: str) -> None:
    source, weight = packed_source(kind, 136, 512), device_weight(kind, 136, 512)
    want = source.dequantise(0, 136)
    assert torch.equal(weight.dense(), want)
    assert torch.equal(weight.dequantise(7, 99), want[7:99])
    ids = torch.tensor([[3, 135], [3, 0]])
    assert torch.equal(weight.take(ids), want[ids])
    assert weight.nbytes <= MOST_OF.get(kind, MOST) * source.nbytes
    most = 128 if weight.form.bits >= 4 else 32
    assert block_of(weight.form) == max(32, min(weight.form.group, most))  # the kernel takes it


@pytest.mark.parametrize("kind", KINDS)
def test_products_are_those_of_the_values(kind: str) -> None:
    weight, x = device_weight(kind, 136, 512), torch.randn(2, 3, 512, generator=torch.Generator().manual_seed(0))
    want = x.double() @ weight.dense().double().t()
    got = multiply(x, weight.parts, weight.form)
    assert got.shape == (2, 3, 136)
    assert (got - want).norm() <= 1e-6 * want.norm()


def test_a_weight_is_decoded_some_rows_after_others(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x, sizes = device_weight("Q4_0", 136, 512), torch.randn(3, 512), list[int]()
    whole = multiply(x, weight.parts, weight.form)
    original = DeviceForm.values

    def values(self: DeviceForm, parts: object, rows: slice) -> torch.Tensor:
        sizes.append(rows.stop - rows.start)
        return original(self, parts, rows)  # type: ignore[arg-type]

    monkeypatch.setattr(DeviceForm, "values", values)
    monkeypatch.setattr(packed_product, "_DECODED", 50 * 512)
    torch.testing.assert_close(multiply(x, weight.parts, weight.form), whole)
    assert sizes == [50, 50, 36]


@pytest.mark.parametrize("most", [0, 1024])
@pytest.mark.parametrize(("kind", "tokens"), [("Q4_0", 1), ("Q4_0", 40), ("MXFP4", 9), ("GPTQ", 5)])
def test_each_row_is_multiplied_by_its_expert(
    kind: str, tokens: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both ways: by tiles, and expert by expert."""
    monkeypatch.setattr(packed_product, "_FEW_ROUTED", most)
    weight, generator = device_weight(kind, 5 * 24, 64, 5), torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, 64, generator=generator)
    chosen = torch.randint(0, 4, (tokens * 3,), generator=generator)
    got = multiply_routed(x, chosen, weight.parts, weight.form)
    want = torch.einsum("ni,noi->no", x.repeat_interleave(3, 0), weight.dense()[chosen])
    assert (got - want).norm() <= 1e-6 * want.norm()


@pytest.mark.parametrize("count", [1, 2, 17, 200])
def test_tiles_have_every_row_once_with_others_of_its_expert(count: int) -> None:
    chosen = torch.randint(0, 7, (count,), generator=torch.Generator().manual_seed(count))
    tiles = tiles_of(chosen, 9)
    owners = tiles.owners.view(-1, ROWS)
    assert sorted(owners[owners >= 0].tolist()) == list(range(count))
    for row, expert in zip(owners, tiles.experts, strict=True):
        assert {int(chosen[n]) for n in row if n >= 0} <= {int(expert)}
        assert (expert < 0) == (row < 0).all()


def test_experts_of_few_rows_and_rows_of_embeddings_do_not_read_the_device() -> None:
    weight, chosen = device_weight("Q4_0", 5 * 24, 64, 5), torch.tensor([3, 1, 1, 0])
    numbers = [*weight.form]
    with DeviceReadWatch():
        weight.take(chosen)
        packed_product._multiply(torch.ones(2, 64), [*weight.parts], numbers)
        packed_product._multiply_routed(torch.ones(2, 64), chosen, [*weight.parts], numbers)
    with packed_product.waitless_products(), DeviceReadWatch():
        many = torch.zeros(2000, dtype=torch.int64)
        packed_product._multiply_routed(torch.ones(1000, 64), many, [*weight.parts], numbers)
    with pytest.raises((DeviceRead, RuntimeError)), DeviceReadWatch():
        int(chosen.sum())  # the watch sees what reads


def test_other_code_reads_the_plain_weight() -> None:
    weight = DeviceWeight(QuantisedWeight(packed_source("Q8_0", 8, 64), torch.bfloat16), CPU)
    stand_in = WeightStandIn(weight, torch.empty(8, 64, dtype=torch.bfloat16, device="meta"), CPU)
    assert device_weight_of(stand_in) is weight
    assert (stand_in.shape, stand_in.dtype, stand_in.device) == ((8, 64), torch.bfloat16, CPU)
    assert torch.equal(stand_in + 0, weight.dense())
    assert weight.touched
    ids = torch.tensor([5, 2])
    assert torch.equal(torch.nn.functional.embedding(ids, stand_in), weight.dense()[ids])
