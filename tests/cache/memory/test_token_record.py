"""Records: what a byte a number and a scale a head keep of keys and values."""

from __future__ import annotations

import pytest
import torch

from cache.memory.codec import Codec
from cache.memory.frames import UNDIVIDED
from cache.memory.memory_tier import MemoryTier, PageShape, divide
from cache.memory.token_record import TokenRecord

CPU = torch.device("cpu")
ROUNDED = (Codec.INT8, Codec.FP8)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def numbers(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Rows of very different sizes, and one of zeros."""
    random = torch.Generator().manual_seed(3)
    sizes = torch.exp(4 * torch.randn(*shape[:-1], 1, generator=random))
    found = (torch.randn(*shape, generator=random) * sizes).clamp(-6e4, 6e4)
    found[0, 0] = 0.0
    return found.to(dtype)


@pytest.mark.parametrize("codec", ROUNDED)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "dim"), [(3, 64), (1, 5), (8, 128)])
def test_a_number_is_off_by_no_more_than_its_head_s_scale_allows(
    heads: int, dim: int, dtype: torch.dtype, codec: Codec
) -> None:
    record, tokens = TokenRecord(heads, dim, codec), numbers(dtype, 40, heads, dim)
    packed = record.pack(tokens)
    assert (packed.dtype, packed.shape) == (torch.uint8, (40, record.nbytes))
    assert record.nbytes % 16 == 0
    exact, found = tokens.double().abs(), record.unpack(packed, dtype)
    assert (found.dtype, found.shape) == (dtype, tokens.shape)
    peak, facts = exact.amax(-1, keepdim=True), torch.finfo(dtype)
    own = peak / 254 if codec is Codec.INT8 else torch.maximum(exact / 16, peak / 458752)
    allowed = (own + exact * facts.eps) * (1 + 1e-5) + facts.smallest_normal * facts.eps
    assert ((found.double() - tokens.double()).abs() <= allowed).all()
    assert torch.equal(found[0, 0], torch.zeros(dim, dtype=dtype))


@pytest.mark.parametrize("codec", ROUNDED)
def test_bytes_are_half_of_two_byte_kv_and_a_scale_for_each_head(codec: Codec) -> None:
    exact = PageShape(8, 128, 8, 128, torch.bfloat16)
    assert exact._replace(codec=codec).nbytes == 2 * (8 * 4 + 8 * 128)
    assert exact.nbytes == 2 * 8 * 128 * 2


@pytest.mark.parametrize("codec", ROUNDED)
@pytest.mark.parametrize("parts", [False, True])
def test_a_tier_stores_copies_and_hands_out_records(codec: Codec, parts: bool) -> None:
    shapes = {
        0: PageShape(2, 8, 2, 8, torch.float32, codec=codec),
        1: PageShape(2, 8, 2, 8, torch.float32, codec=codec),
    }
    division = divide(shapes, {1}, 4) if parts else UNDIVIDED
    assert bool(division.near) is parts
    device, host = (MemoryTier(6, 4, CPU, shapes, division=division) for _ in range(2))
    random = torch.Generator().manual_seed(1)
    for layer in (0, 1):
        near = parts and layer == 1
        mine, theirs = ([tier.alloc(near), tier.alloc(near)] for tier in (device, host))
        index = torch.tensor([mine[1] * 4 + 2, mine[0] * 4 + 1])
        key, value = (torch.randn(1, 2, 2, 8, generator=random) for _ in range(2))
        device.write(layer, index, key, value)
        record = shapes[layer].key
        assert record is not None
        wanted = [record.unpack(record.pack(new[0].transpose(0, 1)), torch.float32) for new in (key, value)]
        assert all(map(torch.equal, device.tokens(layer, index), wanted))
        host.copy_from(device, mine, theirs, near)
        keys, _ = host.read(layer, torch.tensor(theirs))
        assert torch.equal(keys[[6, 1]], wanted[0])
        other = torch.tensor([theirs[0] * 4, theirs[0] * 4 + 3])
        gathered = device.gather(index, index if near else None)
        assert {(tuple(tensor.shape), tensor.dtype) for tensor in gathered.values()} == {((2, 32), torch.uint8)}
        for kind in ("key", "value"):
            host.scatter(other, f"{layer}.{kind}", gathered[f"{layer}.{kind}"])
        assert all(map(torch.equal, host.tokens(layer, other), wanted))
