"""Keys and values at one byte a number: how far off they may be, and when they are left alone."""

from __future__ import annotations

import pytest
import torch

from cache.memory.codec import Codec
from cache.segments import segment_codec as codecs
from cache.segments.segment_codec import choose_codec, decode, encodable, encode, encoded_bytes

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LOSSY = (Codec.INT8, Codec.FP8)


def round_trip(tensor: torch.Tensor, codec: Codec) -> torch.Tensor:
    encoded = encode(tensor, codec)
    assert encoded.dtype == torch.uint8
    assert encoded.shape == (encoded_bytes(tensor.shape, tensor.dtype, codec),)
    decoded = decode(encoded, tensor.shape, tensor.dtype, codec)
    assert (decoded.shape, decoded.dtype) == (tensor.shape, tensor.dtype)
    return decoded


def allowed(tensor: torch.Tensor, codec: Codec) -> torch.Tensor:
    """How far each number may be off: the codec's own error, then rounding to the dtype."""
    exact = tensor.double().abs()
    peak = exact.amax(-1, keepdim=True)
    own = peak / 254 if codec is Codec.INT8 else torch.maximum(exact / 16, peak / 458752)
    facts = torch.finfo(tensor.dtype)
    return (own + exact * facts.eps) * (1 + 1e-5) + facts.smallest_normal * facts.eps


def numbers(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Rows of very different sizes."""
    rng = torch.Generator().manual_seed(3)
    sizes = torch.exp(4 * torch.randn(*shape[:-1], 1, generator=rng))
    return (torch.randn(*shape, generator=rng) * sizes).clamp(-6e4, 6e4).to(dtype)


@pytest.mark.parametrize("codec", LOSSY)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_round_trip_is_off_by_no_more_than_the_scale_of_its_row_allows(dtype: torch.dtype, codec: Codec) -> None:
    tensor = numbers(dtype, 50, 3, 64)
    assert choose_codec(tensor, codec) is codec
    off = (round_trip(tensor, codec).double() - tensor.double()).abs()
    assert bool((off <= allowed(tensor, codec)).all())
    assert bool(off.any())  # it is lossy: the bound was put to the test


@pytest.mark.parametrize("codec", LOSSY)
def test_one_row_does_not_touch_another(codec: Codec) -> None:
    tensor = numbers(torch.float32, 6, 2, 16)
    before = round_trip(tensor, codec)
    tensor[3, 1] *= 1e30
    after = round_trip(tensor, codec)
    rest = torch.ones(6, 2, dtype=torch.bool)
    rest[3, 1] = False
    assert torch.equal(before[rest], after[rest])


@pytest.mark.parametrize("codec", LOSSY)
@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_and_the_smallest_and_largest_numbers(dtype: torch.dtype, codec: Codec) -> None:
    facts = torch.finfo(dtype)
    largest = min(facts.max, 9e36)
    step = 2.0**-149  # between the smallest float32 numbers: scales of that size are coarse
    rows = [[0.0] * 8, [facts.tiny] * 8, [facts.smallest_normal / 4] * 8, [largest] * 7 + [-largest]]
    rows += [[-1.0] + [0.0] * 7, [190 * step] * 8, [600 * step] * 8]
    tensor = torch.tensor([rows], dtype=torch.float64).to(dtype)
    assert choose_codec(tensor, codec) is codec
    decoded = round_trip(tensor, codec)
    assert not decoded[0, 0].any()
    assert bool(torch.isfinite(decoded).all())
    off = (decoded.double() - tensor.double()).abs()
    coarse = step * (64 if codec is Codec.INT8 else 256)
    assert bool((off <= allowed(tensor, codec) + coarse).all())


@pytest.mark.parametrize("codec", LOSSY)
def test_parts_of_a_tensor_are_scaled_one_after_the_other(monkeypatch: pytest.MonkeyPatch, codec: Codec) -> None:
    tensor = numbers(torch.bfloat16, 7, 3, 16)
    whole, decoded = encode(tensor, codec), round_trip(tensor, codec)
    monkeypatch.setattr(codecs, "_ROWS", 4)
    assert torch.equal(encode(tensor, codec), whole)
    assert torch.equal(round_trip(tensor, codec), decoded)


@pytest.mark.parametrize("codec", LOSSY)
def test_it_does_not_matter_how_a_tensor_lies_in_memory(codec: Codec) -> None:
    tensor = numbers(torch.float32, 5, 4, 12)
    strided = tensor.permute(1, 2, 0).contiguous().permute(2, 0, 1)
    assert not strided.is_contiguous()
    assert torch.equal(encode(strided, codec), encode(tensor, codec))


@pytest.mark.parametrize("codec", LOSSY)
@pytest.mark.parametrize("strange", [float("inf"), float("-inf"), float("nan"), 3e38])
def test_what_has_no_scale_stays_exact(codec: Codec, strange: float) -> None:
    tensor = numbers(torch.float32, 4, 2, 16)
    tensor[2, 1, 5] = strange
    assert choose_codec(tensor, codec) is Codec.EXACT


@pytest.mark.parametrize("codec", LOSSY)
@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(4, 2, 4, dtype=torch.bfloat16),  # a scale takes what the numbers save
        torch.zeros(4, 2, 16, dtype=torch.float8_e4m3fn),
        torch.zeros(4, 2, 16, dtype=torch.int32),
        torch.zeros(4, 2, 16, dtype=torch.float64),
        torch.zeros(16),
        torch.zeros(()),
        torch.zeros(0, 2, 16),
        torch.zeros(4, 2, 0),
    ],
)
def test_what_would_not_be_smaller_stays_exact(codec: Codec, tensor: torch.Tensor) -> None:
    assert choose_codec(tensor, codec) is Codec.EXACT
    assert not encodable(tensor.shape, tensor.dtype, codec)


def test_exact_is_exact_and_copies_nothing() -> None:
    tensor = numbers(torch.float32, 4, 2, 16)
    tensor[0, 0, 0] = float("nan")
    assert choose_codec(tensor, Codec.EXACT) is Codec.EXACT
    encoded = encode(tensor, Codec.EXACT)
    assert encoded.data_ptr() == tensor.data_ptr()
    assert decode(encoded, tensor.shape, tensor.dtype, Codec.EXACT).data_ptr() == tensor.data_ptr()
    assert torch.equal(round_trip(tensor, Codec.EXACT).view(torch.int32), tensor.view(torch.int32))
