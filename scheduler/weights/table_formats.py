"""Formats whose values are those of a table: fp8 in blocks, mxfp4, and the 4 bits of bitsandbytes.

fp8: https://github.com/deepseek-ai/DeepSeek-V3, mxfp4: https://github.com/openai/gpt-oss and the Open Compute Project's
specification, bitsandbytes: https://github.com/bitsandbytes-foundation/bitsandbytes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import torch

from scheduler.weights.integer_source import from_stream
from scheduler.weights.packed_format import ITSELF, MISFIT, NotOurs, PackedFormat, Tensors, require_tensor, size_of
from scheduler.weights.packed_source import PackedSource
from scheduler.weights.packed_values import E4M3
from scheduler.weights.table_source import TableSource

_MXFP4 = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, -0.0, -1.0, -2.0, -3.0, -4.0, -6.0, -8.0, -12.0)  # twice e2m1
_MXFP4_GROUP, _MXFP4_BIAS = 32, 128  # one more than the exponent's, as the table is twice the values
_EXPONENT_BIAS, _NO_NUMBER = 127, 127  # of a scale that is a power of two; e4m3 without its sign
_STATES = {f".quant_state.bitsandbytes__{name}": "" for name in ("nf4", "fp4")}
_NESTED = {".absmax": "", ".quant_map": "", ".nested_absmax": "", ".nested_quant_map": ""}


def fp8_format(said: Mapping[str, Any]) -> PackedFormat | None:
    """Values of e4m3 with a scale for each block of rows and columns, or one for all. Activations stay plain."""
    block = said.get("weight_block_size")
    if str(said.get("fmt") or "e4m3").lower() != "e4m3":
        return None
    if block is not None and not (isinstance(block, list) and len(block) == 2 and all(_is_size(n) for n in block)):
        return None
    return PackedFormat({"_scale_inv": ""}, lambda tensors, inside: _fp8(tensors, inside, block))


def _is_size(number: Any) -> bool:
    return isinstance(number, int) and number > 0


def _fp8(tensors: Tensors, inside: int, block: list[int] | None) -> PackedSource:
    """``weight [.., out, inside]``, ``weight_scale_inv [.., ceil(out / rows), ceil(inside / columns)]``."""
    values, scales = require_tensor(tensors, ITSELF), require_tensor(tensors, "_scale_inv")
    if values.dtype != torch.float8_e4m3fn:
        raise NotOurs("an fp8 checkpoint with values of another type")
    out, count = values.shape[-2], math.prod(values.shape[:-2])
    high, wide = (out, inside) if block is None or scales.numel() == count else block
    expected = (count, -(-out // high), -(-inside // wide))
    if values.shape[-1] != inside or scales.numel() != math.prod(expected):
        raise ValueError(MISFIT)
    codes, scales = values.reshape(-1, inside).view(torch.uint8), _numbers(scales).view(expected)
    group = math.gcd(wide, inside)
    if group < inside and group % 32:
        raise NotOurs("an fp8 checkpoint with blocks that are no multiples of 32")
    first = torch.arange(0, inside, group) // wide  # the block that a group is in

    def some_codes(start: int, stop: int) -> torch.Tensor:
        found = codes[start:stop]
        if bool((found & _NO_NUMBER == _NO_NUMBER).any()):
            raise ValueError("a packed weight has values that are no numbers")
        return found

    def some_scales(start: int, stop: int) -> torch.Tensor:
        rows = torch.arange(start, stop)
        return scales[rows // out, rows % out // high][:, first]

    return TableSource(some_codes, some_scales, (len(codes), inside), 8, group, E4M3, size_of(tensors))


def _numbers(scales: torch.Tensor) -> torch.Tensor:
    """float32 of any type of scale; of whole numbers they are exponents."""
    if scales.dtype == torch.uint8:
        return torch.exp2(scales.float() - _EXPONENT_BIAS)
    return scales.float()


def mxfp4_format(said: Mapping[str, Any]) -> PackedFormat | None:
    """Values of e2m1 with a power of two for each 32 of them."""
    return PackedFormat({"_blocks": "", "_scales": ""}, _mxfp4)


def _mxfp4(tensors: Tensors, inside: int) -> PackedSource:
    """``blocks [.., out, inside / 32, 16]``, two neighbours in a byte, the low half first; ``scales [.., out, inside /
    32]``.
    """
    blocks, scales = require_tensor(tensors, "_blocks"), require_tensor(tensors, "_scales")
    if blocks.shape[-2:] != (inside // _MXFP4_GROUP, _MXFP4_GROUP // 2) or scales.shape != blocks.shape[:-1]:
        raise ValueError(MISFIT)
    each = blocks.reshape(-1, *blocks.shape[-2:])
    data, exponents = each.flatten(1), scales.reshape(-1, inside // _MXFP4_GROUP)

    def codes(start: int, stop: int) -> torch.Tensor:
        return from_stream(data[start:stop], 4)

    def some_scales(start: int, stop: int) -> torch.Tensor:
        found = torch.exp2(exponents[start:stop].float() - _MXFP4_BIAS)
        filled = (each[start:stop] & 0x77 != 0).any(-1)
        return found.masked_fill(~filled, 0)  # where all values are 0 the scale says nothing, and may be any

    return TableSource(codes, some_scales, (len(data), inside), 4, _MXFP4_GROUP, _MXFP4, size_of(tensors))


def bitsandbytes_format(said: Mapping[str, Any]) -> PackedFormat | None:
    """nf4 and fp4 in bytes, whose scales may be packed in turn."""
    four = said.get("load_in_4bit", said.get("_load_in_4bit"))
    if not four or said.get("bnb_4bit_quant_storage", "uint8") != "uint8":
        return None
    return PackedFormat({**_NESTED, **_STATES}, _bitsandbytes)


def _bitsandbytes(tensors: Tensors, inside: int) -> PackedSource:
    """``weight [out * inside / 2, 1]``, two neighbours in a byte, the high half first; ``absmax``: the scale of each
    block of values; ``quant_map``: the table.
    """
    values, scales, table = (require_tensor(tensors, end) for end in (ITSELF, ".absmax", ".quant_map"))
    stated = next((tensors[end] for end in _STATES if end in tensors), None)
    if stated is None or values.dtype != torch.uint8:
        raise ValueError(MISFIT)
    state = json.loads(bytes(stated.tolist()))
    group, shape = int(state["blocksize"]), state["shape"]
    if len(shape) != 2 or shape[1] != inside or values.numel() * 2 != math.prod(shape):
        raise ValueError(MISFIT)
    if inside % group:
        raise NotOurs("a checkpoint of bitsandbytes with blocks of more than one row")
    if ".nested_absmax" in tensors:
        each = require_tensor(tensors, ".nested_absmax").repeat_interleave(int(state["nested_blocksize"]))[
            : len(scales)
        ]
        scales = require_tensor(tensors, ".nested_quant_map")[scales.int()] * each + float(state["nested_offset"])
    data, each_row = values.view(-1, inside // 2), scales.float().view(-1, inside // group)

    def codes(start: int, stop: int) -> torch.Tensor:
        found = data[start:stop]
        return torch.stack([found >> 4, found & 15], -1).flatten(1)

    numbers = tuple(float(value) for value in table)
    return TableSource(
        codes, lambda start, stop: each_row[start:stop], (shape[0], inside), 4, group, numbers, size_of(tensors)
    )
