"""The types of GGUF tensors: how many elements a block has, how many bytes it takes, and its parts.

Each packed type becomes ``PackedRows``: codes as they are stored, scales and, where the type has them, minima. The
element at place ``i`` is ``scale * (code - zero) - minimum``, or ``scale * table[code]``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from scheduler.weights.code_layout import CodeLayout, Field
from scheduler.weights.packed_source import PackedRows

Unpack = Callable[[torch.Tensor], PackedRows]  # uint8 [rows, blocks, bytes of a block]

_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # twice the value


@dataclass(frozen=True)
class GgufType:
    """A type of tensor. ``dtype`` is None where blocks are packed; then ``unpack`` reads them."""

    name: str
    elements: int
    nbytes: int
    dtype: torch.dtype | None = None
    bits: int = 0
    group: int = 0
    zero: int = 0
    table: tuple[float, ...] | None = None
    unpack: Unpack | None = None


def _half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """The float16 number at byte ``at`` of each block, as float32."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16).float().squeeze(-1)


def _signed_bytes(blocks: torch.Tensor, at: int, count: int) -> torch.Tensor:
    """``count`` signed bytes from byte ``at`` on."""
    return blocks[..., at : at + count].contiguous().view(torch.int8)


def _nibbles(data: torch.Tensor) -> torch.Tensor:
    """The low halves of all bytes, then the high halves."""
    return torch.cat((data & 15, data >> 4), dim=-1)


def _bits(data: torch.Tensor, width: int) -> torch.Tensor:
    """Fields of ``width`` bits: the lowest of all bytes, then the next ones: ``[..., 8 / width, bytes]``."""
    shifts = torch.arange(0, 8, width, dtype=torch.uint8)
    return data[..., None, :] >> shifts[:, None] & ((1 << width) - 1)


def _flat(values: torch.Tensor) -> torch.Tensor:
    """``[rows, blocks, ...]`` as ``[rows, all]``."""
    return values.reshape(values.shape[0], -1)


_Q4_0_LAYOUT = CodeLayout(32, 18, (Field(2, 16, 4),))
_Q4_1_LAYOUT = CodeLayout(32, 20, (Field(4, 16, 4),))
_Q5_0_LAYOUT = CodeLayout(32, 22, (Field(6, 16, 4), Field(2, 4, 1, up=4, across=True)))
_Q5_1_LAYOUT = CodeLayout(32, 24, (Field(8, 16, 4), Field(4, 4, 1, up=4, across=True)))
_Q8_0_LAYOUT = CodeLayout(32, 34, (Field(2, 32, 8),), flipped=128)
_Q2_K_LAYOUT = CodeLayout(256, 84, (Field(16, 32, 2, 2),))
_Q3_K_LAYOUT = CodeLayout(256, 110, (Field(32, 32, 2, 2), Field(0, 32, 1, up=2)))
_Q4_K_LAYOUT = CodeLayout(256, 144, (Field(16, 32, 4, 4),))
_Q5_K_LAYOUT = CodeLayout(256, 176, (Field(48, 32, 4, 4), Field(16, 32, 1, up=4)))
_Q6_K_LAYOUT = CodeLayout(256, 210, (Field(0, 64, 4, 2), Field(128, 32, 2, 2, up=4)))
_IQ4_XS_LAYOUT = CodeLayout(256, 136, (Field(8, 16, 4, 8),))
_MXFP4_LAYOUT = CodeLayout(32, 17, (Field(1, 16, 4),))


def _q4_0(b: torch.Tensor) -> PackedRows:
    return PackedRows(_flat(b), _half(b, 0), layout=_Q4_0_LAYOUT)


def _q4_1(b: torch.Tensor) -> PackedRows:
    return PackedRows(_flat(b), _half(b, 0), -_half(b, 2), layout=_Q4_1_LAYOUT)


def _q5_0(b: torch.Tensor) -> PackedRows:
    return PackedRows(_flat(b), _half(b, 0), layout=_Q5_0_LAYOUT)


def _q5_1(b: torch.Tensor) -> PackedRows:
    return PackedRows(_flat(b), _half(b, 0), -_half(b, 2), layout=_Q5_1_LAYOUT)


def _q8_0(b: torch.Tensor) -> PackedRows:
    return PackedRows(_flat(b), _half(b, 0), layout=_Q8_0_LAYOUT)


def _six_bit_scales(s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The 8 scales and the 8 minima in 12 bytes, int8 each; four bytes are worked on at a time."""
    first, second, rest = s.view(torch.int32).unbind(-1)
    six, four, two = 0x3F3F3F3F, 0x0F0F0F0F, 0x03030303
    scales = torch.stack((first & six, rest & four | (first >> 6 & two) << 4), dim=-1)
    minima = torch.stack((second & six, rest >> 4 & four | (second >> 6 & two) << 4), dim=-1)
    return scales.view(torch.int8), minima.view(torch.int8)


def _two_level(b: torch.Tensor, fine: torch.Tensor, minima: torch.Tensor, at: int, layout: CodeLayout) -> PackedRows:
    """Codes with fine scales and minima, and a float16 number for each of both at byte ``at``."""
    return PackedRows(
        _flat(b),
        coarse_scales=_half(b, at),
        fine_scales=_flat(fine),
        coarse_minima=_half(b, at + 2),
        fine_minima=_flat(minima),
        layout=layout,
    )


def _q4_k(b: torch.Tensor) -> PackedRows:
    return _two_level(b, *_six_bit_scales(b[..., 4:16]), 0, _Q4_K_LAYOUT)


def _q5_k(b: torch.Tensor) -> PackedRows:
    return _two_level(b, *_six_bit_scales(b[..., 4:16]), 0, _Q5_K_LAYOUT)


def _q6_k(b: torch.Tensor) -> PackedRows:
    fine = _flat(_signed_bytes(b, 192, 16))
    return PackedRows(_flat(b), coarse_scales=_half(b, 208), fine_scales=fine, layout=_Q6_K_LAYOUT)


def _q2_k(b: torch.Tensor) -> PackedRows:
    fine, minima = (b[..., :16] & 15).to(torch.int8), (b[..., :16] >> 4).to(torch.int8)
    return _two_level(b, fine, minima, 80, _Q2_K_LAYOUT)


def _q3_k(b: torch.Tensor) -> PackedRows:
    s = b[..., 96:108]
    low = _nibbles(s[..., :8])
    fine = (low | _bits(s[..., 8:], 2).flatten(-2) << 4).to(torch.int8) - 32
    return PackedRows(_flat(b), coarse_scales=_half(b, 108), fine_scales=_flat(fine), layout=_Q3_K_LAYOUT)


def _iq4_xs(b: torch.Tensor) -> PackedRows:
    low = _bits(b[..., 4:8], 4).transpose(-1, -2).flatten(-2)
    high = _bits(b[..., 2:4], 2).transpose(-1, -2).flatten(-2)
    fine = (low | high << 4).to(torch.int8) - 32
    return PackedRows(_flat(b), coarse_scales=_half(b, 0), fine_scales=_flat(fine), layout=_IQ4_XS_LAYOUT)


def _mxfp4(b: torch.Tensor) -> PackedRows:
    scales = torch.ldexp(torch.ones(b.shape[:-1]), b[..., 0].int() - 128)
    return PackedRows(_flat(b), scales, layout=_MXFP4_LAYOUT)


TYPES = {
    0: GgufType("F32", 1, 4, torch.float32),
    1: GgufType("F16", 1, 2, torch.float16),
    30: GgufType("BF16", 1, 2, torch.bfloat16),
    2: GgufType("Q4_0", 32, 18, bits=4, group=32, zero=8, unpack=_q4_0),
    3: GgufType("Q4_1", 32, 20, bits=4, group=32, unpack=_q4_1),
    6: GgufType("Q5_0", 32, 22, bits=5, group=32, zero=16, unpack=_q5_0),
    7: GgufType("Q5_1", 32, 24, bits=5, group=32, unpack=_q5_1),
    8: GgufType("Q8_0", 32, 34, bits=8, group=32, zero=128, unpack=_q8_0),
    10: GgufType("Q2_K", 256, 84, bits=4, group=16, unpack=_q2_k),
    11: GgufType("Q3_K", 256, 110, bits=4, group=16, zero=4, unpack=_q3_k),
    12: GgufType("Q4_K", 256, 144, bits=4, group=32, unpack=_q4_k),
    13: GgufType("Q5_K", 256, 176, bits=5, group=32, unpack=_q5_k),
    14: GgufType("Q6_K", 256, 210, bits=6, group=16, zero=32, unpack=_q6_k),
    20: GgufType("IQ4_NL", 32, 18, bits=4, group=32, table=_IQ4, unpack=_q4_0),
    23: GgufType("IQ4_XS", 256, 136, bits=4, group=32, table=_IQ4, unpack=_iq4_xs),
    39: GgufType("MXFP4", 32, 17, bits=4, group=32, table=_E2M1, unpack=_mxfp4),
}
PLAIN_TYPES = {kind: each.dtype for kind, each in TYPES.items() if each.dtype is not None}
