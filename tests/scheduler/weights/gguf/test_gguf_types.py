"""Each block type of GGUF against a reference that reads one element at a time, as the format's description says."""

from __future__ import annotations

import struct
from collections.abc import Callable

import numpy as np
import pytest
import torch

from scheduler.weights.gguf.file import GgufTensor
from scheduler.weights.gguf.source import GgufSource, all_values
from scheduler.weights.gguf.types import TYPES

IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
MXFP4 = (0, 0.5, 1, 1.5, 2, 3, 4, 6)
PACKED = {each.name: kind for kind, each in TYPES.items() if each.dtype is None}


def half(block: bytes, at: int) -> float:
    return float(struct.unpack_from("<e", block, at)[0])


def nibble(data: bytes, i: int) -> int:
    """Of 32 elements in 16 bytes: the low halves first."""
    return data[i] & 15 if i < 16 else data[i - 16] >> 4


def fifth(block: bytes, at: int, i: int) -> int:
    return (int.from_bytes(block[at : at + 4], "little") >> i & 1) << 4


def six_bits(s: bytes, k: int) -> tuple[int, int]:
    if k < 4:
        return s[k] & 63, s[k + 4] & 63
    return s[k + 4] & 15 | s[k - 4] >> 6 << 4, s[k + 4] >> 4 | s[k] >> 6 << 4


def q4_k(b: bytes, i: int) -> float:
    scale, low = six_bits(b[4:16], i // 32)
    byte = b[16 + i // 64 * 32 + i % 32]
    return half(b, 0) * scale * (byte & 15 if i % 64 < 32 else byte >> 4) - half(b, 2) * low


def q5_k(b: bytes, i: int) -> float:
    scale, low = six_bits(b[4:16], i // 32)
    byte = b[48 + i // 64 * 32 + i % 32]
    code = (byte & 15 if i % 64 < 32 else byte >> 4) + 16 * (b[16 + i % 32] >> i // 32 & 1)
    return half(b, 0) * scale * code - half(b, 2) * low


def q6_k(b: bytes, i: int) -> float:
    part, j = divmod(i, 128)
    byte = b[part * 64 + j % 64]
    code = (byte & 15 if j < 64 else byte >> 4) + 16 * (b[128 + part * 32 + j % 32] >> 2 * (j // 32) & 3)
    scale: int = struct.unpack_from("b", b, 192 + i // 16)[0]
    return half(b, 208) * scale * (code - 32)


def q2_k(b: bytes, i: int) -> float:
    part, j = divmod(i, 128)
    code = b[16 + part * 32 + j % 32] >> 2 * (j // 32) & 3
    return half(b, 80) * (b[i // 16] & 15) * code - half(b, 82) * (b[i // 16] >> 4)


def q3_k(b: bytes, i: int) -> float:
    part, j = divmod(i, 128)
    code = (b[32 + part * 32 + j % 32] >> 2 * (j // 32) & 3) - 4 * (1 - (b[i % 32] >> i // 32 & 1))
    k = i // 16
    scale = (b[96 + k % 8] >> 4 * (k // 8) & 15) + 16 * (b[104 + k % 4] >> 2 * (k // 4) & 3)
    return half(b, 108) * (scale - 32) * code


def iq4_xs(b: bytes, i: int) -> float:
    k = i // 32
    scale = (b[4 + k // 2] >> 4 * (k % 2) & 15) + 16 * (int.from_bytes(b[2:4], "little") >> 2 * k & 3)
    return half(b, 0) * (scale - 32) * IQ4[nibble(b[8 + 16 * k : 24 + 16 * k], i % 32)]


def tq1_0(b: bytes, i: int) -> float:
    if i < 160:
        at, power = i % 32, i // 32
    elif i < 240:
        at, power = 32 + i % 16, (i - 160) // 16
    else:
        at, power = 48 + i % 4, (i - 240) // 4
    code: int = (b[at] * 3**power % 256) * 3 // 256
    return half(b, 52) * (code - 1)


def tq2_0(b: bytes, i: int) -> float:
    part, j = divmod(i, 128)
    return half(b, 64) * ((b[part * 32 + j % 32] >> 2 * (j // 32) & 3) - 1)


def mxfp4(b: bytes, i: int) -> float:
    code = nibble(b[1:], i)
    return float(2.0 ** (b[0] - 127) * MXFP4[code & 7] * (-1 if code & 8 else 1))


ELEMENT: dict[str, Callable[[bytes, int], float]] = {
    "Q4_0": lambda b, i: half(b, 0) * (nibble(b[2:], i) - 8),
    "Q4_1": lambda b, i: half(b, 0) * nibble(b[4:], i) + half(b, 2),
    "Q5_0": lambda b, i: half(b, 0) * (nibble(b[6:], i) + fifth(b, 2, i) - 16),
    "Q5_1": lambda b, i: half(b, 0) * (nibble(b[8:], i) + fifth(b, 4, i)) + half(b, 2),
    "Q8_0": lambda b, i: half(b, 0) * struct.unpack_from("b", b, 2 + i)[0],
    "Q2_K": q2_k,
    "Q3_K": q3_k,
    "Q4_K": q4_k,
    "Q5_K": q5_k,
    "Q6_K": q6_k,
    "IQ4_NL": lambda b, i: half(b, 0) * IQ4[nibble(b[2:], i)],
    "IQ4_XS": iq4_xs,
    "TQ1_0": tq1_0,
    "TQ2_0": tq2_0,
    "MXFP4": mxfp4,
}


def made_up(name: str, rows: int = 3) -> GgufTensor:
    """Random bytes, with small numbers for float16 where a block has them."""
    kind = TYPES[PACKED[name]]
    data = np.random.default_rng(7).integers(0, 256, (rows, 512 // kind.elements, kind.nbytes), dtype=np.uint8)
    others = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "TQ1_0": (52,), "TQ2_0": (64,), "MXFP4": ()}
    for at in others.get(name, (0, 2)):
        if at == 0 or name in {"Q4_1", "Q5_1", "Q4_K", "Q5_K", *others}:
            data[..., at + 1] &= 0b10111011
    if name == "MXFP4":
        data[..., 0] = 120 + data[..., 0] % 16
    return GgufTensor("x", (rows, 512), PACKED[name], torch.from_numpy(data.reshape(rows, -1)))


def test_each_packed_type_has_a_reference() -> None:
    assert set(ELEMENT) == set(PACKED)


@pytest.mark.parametrize("name", PACKED)
def test_a_type_is_read_as_its_description_says(name: str) -> None:
    tensor, kind = made_up(name), TYPES[PACKED[name]]
    want = [
        [ELEMENT[name](bytes(block), i) for block in row.view(-1, kind.nbytes).numpy() for i in range(kind.elements)]
        for row in tensor.data
    ]
    source = GgufSource([tensor])
    got = source.dequantise(0, source.out)
    assert got.dtype is torch.float32
    torch.testing.assert_close(got, torch.tensor(want, dtype=torch.float64).float(), rtol=1e-6, atol=0)
    assert torch.equal(all_values(tensor, torch.float32), got)
    assert torch.equal(source.dequantise(1, 2), got[1:2])
    rows = source.rows(0, 3)
    assert rows.codes.dtype is torch.uint8
    assert int(rows.codes.max()) < 1 << source.bits


@pytest.mark.parametrize("name", PACKED)
def test_a_type_is_read_as_its_own_library_reads_it(name: str) -> None:
    gguf = pytest.importorskip("gguf")
    tensor = made_up(name)
    want = gguf.dequantize(tensor.data.numpy(), gguf.GGMLQuantizationType(tensor.kind))
    assert np.array_equal(GgufSource([tensor]).dequantise(0, 3).numpy(), want)


@pytest.mark.parametrize("name", PACKED)
def test_rows_in_another_order_are_rows_of_blocks_in_another_order(name: str) -> None:
    tensor, order = made_up(name), torch.tensor([2, 0, 1])
    assert torch.equal(GgufSource([tensor], order).dequantise(0, 3), GgufSource([tensor]).dequantise(0, 3)[order])
