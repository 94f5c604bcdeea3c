"""The types of GGUF tensors: how many elements a block has, how many bytes it takes, and its parts.

Each packed type becomes ``PackedRows``: codes as they are stored, scales and, where the type has them, minima. The
element at place ``i`` is ``scale * (code - zero) - minimum``, or ``scale * table[code]``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from scheduler.weights.code_layout import ONE_TO_A_BYTE, CodeLayout, Field
from scheduler.weights.gguf.ternary_blocks import ELEMENTS, NBYTES, unpack_ternary
from scheduler.weights.packed_source import PackedRows
from scheduler.weights.scale_layout import Bits, ScaleLayout

_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # twice the value


@dataclass(frozen=True)
class GgufType:
    """A type of tensor. ``dtype`` is None where blocks are packed; then ``codes`` says where their codes are, and
    ``scales`` where scales are, None where they are powers of two of one byte; or ``whole`` reads both.
    """

    name: str
    elements: int
    nbytes: int
    dtype: torch.dtype | None = None
    bits: int = 0
    group: int = 0
    zero: int = 0
    table: tuple[float, ...] | None = None
    codes: CodeLayout = ONE_TO_A_BYTE
    scales: ScaleLayout | None = None
    whole: Callable[[torch.Tensor], PackedRows] | None = None

    def unpack(self, blocks: torch.Tensor) -> PackedRows:
        """The rows of uint8 ``blocks [rows, blocks, nbytes]``."""
        if self.whole is not None:
            return self.whole(blocks)
        if self.scales is not None:
            return self.scales.unpack(blocks, self.codes)
        powers = torch.ldexp(torch.ones(blocks.shape[:-1]), blocks[..., 0].int() - 128)
        return PackedRows(blocks.reshape(len(blocks), -1), powers, layout=self.codes)


def _packed(
    name: str,
    nbytes: int,
    bits: int,
    group: int,
    zero: int,
    fields: tuple[Field, ...],
    scales: ScaleLayout | None,
    *,
    table: tuple[float, ...] | None = None,
    flipped: int = 0,
) -> GgufType:
    """A packed type. Blocks have 256 elements where scales are of two levels, else as many as have a scale, or 32."""
    elements = 256 if scales is not None and scales.fine else max(group, 32)
    codes = CodeLayout(elements, nbytes, fields, flipped)
    return GgufType(name, elements, nbytes, None, bits, group, zero, table, codes, scales)


_ONE, _TWO = ScaleLayout((0,)), ScaleLayout((0, 2), negated=True)
_SIX_BITS = ScaleLayout(
    (0, 2),
    (Bits(4, 4, 0, 6), Bits(12, 4, 0, 4, first=4), Bits(4, 4, 6, 2, up=4, first=4)),
    (Bits(8, 4, 0, 6), Bits(12, 4, 4, 4, first=4), Bits(8, 4, 6, 2, up=4, first=4)),
)
_Q2_K = ScaleLayout((80, 82), (Bits(0, 16, 0, 4),), (Bits(0, 16, 4, 4),))
_Q3_K = ScaleLayout(
    (108,),
    (
        *(Bits(96, 8, 4 * n, 4, first=8 * n) for n in range(2)),
        *(Bits(104, 4, 2 * n, 2, up=4, first=4 * n) for n in range(4)),
    ),
    less=32,
)
_Q6_K = ScaleLayout((208,), (Bits(192, 16, 0, 8),))
_IQ4_XS = ScaleLayout(
    (0,),
    (
        *(Bits(4, 4, 4 * n, 4, first=n, step=2) for n in range(2)),
        *(Bits(2, 2, 2 * n, 2, up=4, first=n, step=4) for n in range(4)),
    ),
    less=32,
)

TYPES = {
    0: GgufType("F32", 1, 4, torch.float32),
    1: GgufType("F16", 1, 2, torch.float16),
    26: GgufType("I32", 1, 4, torch.int32),
    30: GgufType("BF16", 1, 2, torch.bfloat16),
    2: _packed("Q4_0", 18, 4, 32, 8, (Field(2, 16, 4),), _ONE),
    3: _packed("Q4_1", 20, 4, 32, 0, (Field(4, 16, 4),), _TWO),
    6: _packed("Q5_0", 22, 5, 32, 16, (Field(6, 16, 4), Field(2, 4, 1, up=4, across=True)), _ONE),
    7: _packed("Q5_1", 24, 5, 32, 0, (Field(8, 16, 4), Field(4, 4, 1, up=4, across=True)), _TWO),
    8: _packed("Q8_0", 34, 8, 32, 128, (Field(2, 32, 8),), _ONE, flipped=128),
    10: _packed("Q2_K", 84, 4, 16, 0, (Field(16, 32, 2, 2),), _Q2_K),
    11: _packed("Q3_K", 110, 4, 16, 4, (Field(32, 32, 2, 2), Field(0, 32, 1, up=2)), _Q3_K),
    12: _packed("Q4_K", 144, 4, 32, 0, (Field(16, 32, 4, 4),), _SIX_BITS),
    13: _packed("Q5_K", 176, 5, 32, 0, (Field(48, 32, 4, 4), Field(16, 32, 1, up=4)), _SIX_BITS),
    14: _packed("Q6_K", 210, 6, 16, 32, (Field(0, 64, 4, 2), Field(128, 32, 2, 2, up=4)), _Q6_K),
    20: _packed("IQ4_NL", 18, 4, 32, 0, (Field(2, 16, 4),), _ONE, table=_IQ4),
    23: _packed("IQ4_XS", 136, 4, 32, 0, (Field(8, 16, 4, 8),), _IQ4_XS, table=_IQ4),
    34: GgufType("TQ1_0", ELEMENTS, NBYTES, None, 2, ELEMENTS, 1, whole=unpack_ternary),
    35: _packed("TQ2_0", 66, 2, 256, 1, (Field(0, 32, 2, 2),), ScaleLayout((64,))),
    39: _packed("MXFP4", 17, 4, 32, 0, (Field(1, 16, 4),), None, table=_E2M1),
}
PLAIN_TYPES = {kind: each.dtype for kind, each in TYPES.items() if each.dtype is not None}
