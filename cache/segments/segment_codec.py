"""Keys and values as the bytes of a segment file, by their ``Codec``."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from cache.memory.codec import FORMS, Codec, quantise

_ROWS = 1 << 14  # scaled at a time: bounds the float32 copies
_LARGEST = 1e37  # beyond it a scale times its number could overflow
_SCALE = 4  # bytes: float32
_NUMBERS = (torch.float32, torch.float16, torch.bfloat16)


def choose_codec(tensor: torch.Tensor, codec: Codec) -> Codec:
    """``codec``, or EXACT if that would save nothing for a tensor of this shape or a number in it is not finite."""
    if codec is Codec.EXACT or not encodable(tensor.shape, tensor.dtype, codec):
        return Codec.EXACT
    low, high = tensor.aminmax()
    return codec if float(low) > -_LARGEST and float(high) < _LARGEST else Codec.EXACT


def encodable(shape: Sequence[int], dtype: torch.dtype, codec: Codec) -> bool:
    """Whether ``codec`` applies to tensors of this shape and dtype, and makes them smaller."""
    return dtype in _NUMBERS and len(shape) > 1 and encoded_bytes(shape, dtype, codec) < prod(shape) * dtype.itemsize


def encoded_bytes(shape: Sequence[int], dtype: torch.dtype, codec: Codec) -> int:
    """The size in bytes of what ``encode`` returns for such a tensor."""
    if codec is Codec.EXACT:
        return prod(shape) * dtype.itemsize
    return prod(shape[:-1]) * (_SCALE + shape[-1])


def encode(tensor: torch.Tensor, codec: Codec) -> torch.Tensor:
    """``tensor [..., dim]`` as uint8 bytes: one float32 scale per row of ``dim`` numbers, then one byte per number.
    With EXACT its own bytes, not copied if it is contiguous.
    """
    if codec is Codec.EXACT:
        return tensor.detach().contiguous().view(-1).view(torch.uint8)
    rows = tensor.detach().reshape(-1, tensor.shape[-1])
    encoded = torch.empty(encoded_bytes(tensor.shape, tensor.dtype, codec), dtype=torch.uint8)
    scales, numbers = _parts(encoded, len(rows), FORMS[codec][0])
    for at in range(0, len(rows), _ROWS):
        numbers[at : at + _ROWS], scales[at : at + _ROWS] = quantise(rows[at : at + _ROWS], codec)
    return encoded


def decode(encoded: torch.Tensor, shape: Sequence[int], dtype: torch.dtype, codec: Codec) -> torch.Tensor:
    """The tensor of ``shape`` and ``dtype`` from the uint8 bytes that ``encode`` returned; with EXACT in the same
    memory.
    """
    if codec is Codec.EXACT:
        return encoded.view(dtype).view(tuple(shape))
    scales, numbers = _parts(encoded, prod(shape[:-1]), FORMS[codec][0])
    rows = torch.empty(numbers.shape, dtype=dtype)
    for at in range(0, len(rows), _ROWS):
        rows[at : at + _ROWS] = numbers[at : at + _ROWS].float() * scales[at : at + _ROWS]
    return rows.view(tuple(shape))


def _parts(encoded: torch.Tensor, rows: int, form: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of the scales ``[rows, 1]`` and the numbers ``[rows, dim]`` in ``encoded``."""
    scales, numbers = encoded[: rows * _SCALE], encoded[rows * _SCALE :]
    return scales.view(torch.float32).view(rows, 1), numbers.view(form).view(rows, -1)
