"""Formats of whole numbers: GPTQ, AWQ, compressed-tensors, torchao.

GPTQ: https://github.com/ModelCloud/GPTQModel, AWQ: https://github.com/casper-hansen/AutoAWQ, compressed-tensors:
https://github.com/vllm-project/compressed-tensors, torchao: https://github.com/pytorch/ao.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from scheduler.weights.integer_source import IntegerSource, from_stream, from_words
from scheduler.weights.packed_format import MISFIT, NotOurs, PackedFormat, Tensors, require_tensor, size_of
from scheduler.weights.packed_source import PackedSource

_GPTQ_BITS, _COMPRESSED_BITS, _WORD = (2, 3, 4, 8), range(2, 9), 32
_AWQ_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]  # of columns in a word
_GPTQ = (".qweight", ".scales", ".qzeros", ".g_idx")
_COMPRESSED = (".weight_packed", ".weight_scale", ".weight_zero_point", ".weight_g_idx", ".weight_shape")
_TORCHAO = ("._weight_qdata", "._weight_scale", "._weight_zero_point")
_TORCHAO_TYPES = ("Int8WeightOnlyConfig", "IntxWeightOnlyConfig", "Int4WeightOnlyConfig")  # with plain activations


def _ends(names: tuple[str, ...]) -> dict[str, str]:
    return dict.fromkeys(names, ".weight")


def awq_format(said: Mapping[str, Any]) -> PackedFormat | None:
    """AWQ of 4 bits in the order of its "gemm" kernel."""
    plain = str(said.get("version", "gemm")).lower() == "gemm" and said.get("bits", said.get("w_bit", 4)) == 4
    return PackedFormat(_ends(_GPTQ[:3]), _awq) if plain else None


def gptq_format(said: Mapping[str, Any]) -> PackedFormat | None:
    """GPTQ, with zeros that are stored less 1 or not."""
    layout = str(said.get("checkpoint_format") or said.get("format") or "gptq").lower()
    if layout not in ("gptq", "gptq_v2") or said.get("bits") not in _GPTQ_BITS:
        return None
    first = 0 if layout == "gptq_v2" else 1
    return PackedFormat(_ends(_GPTQ), lambda tensors, inside: _gptq(tensors, inside, first))


def _gptq(tensors: Tensors, inside: int, first: int) -> PackedSource:
    """``qweight [inside * bits / 32, out]``, ``scales [groups, out]``, ``qzeros [groups, out * bits / 32]``, ``g_idx
    [inside]``; ``first`` is added to zeros.
    """
    words, scales, stored = (require_tensor(tensors, name) for name in _GPTQ[:3])
    out = words.shape[1]
    bits = words.shape[0] * _WORD // inside
    if bits not in _GPTQ_BITS or words.shape != (inside * bits // _WORD, out) or scales.shape[1] != out:
        raise ValueError(MISFIT)

    def codes(start: int, stop: int) -> torch.Tensor:
        return from_stream(words[:, start:stop].t().contiguous().view(torch.uint8), bits)

    zeros = from_stream(stored.contiguous().view(torch.uint8), bits)[:, :out].short() + first & (1 << bits) - 1
    groups = tensors.get(".g_idx")
    return IntegerSource(
        codes, inside, bits, _turn(scales), _turn(zeros), None if len(scales) == 1 else groups, size_of(tensors)
    )


def _awq(tensors: Tensors, inside: int) -> PackedSource:
    """``qweight [inside, out / 8]``, ``scales [groups, out]``, ``qzeros [groups, out / 8]``."""
    words, scales, stored = (require_tensor(tensors, name) for name in _GPTQ[:3])
    out = words.shape[1] * 8
    if len(words) != inside or scales.shape[1] != out:
        raise ValueError(MISFIT)

    def codes(start: int, stop: int) -> torch.Tensor:
        first = start // 8
        return _awq_columns(words[:, first : -(-stop // 8)])[:, start - 8 * first : stop - 8 * first].t().contiguous()

    return IntegerSource(codes, inside, 4, _turn(scales), _turn(_awq_columns(stored).short()), None, size_of(tensors))


def _awq_columns(words: torch.Tensor) -> torch.Tensor:
    """uint8 ``[n, 8 * m]`` of int32 ``[n, m]``."""
    return from_stream(words.contiguous().view(torch.uint8), 4).view(len(words), -1, 8)[..., _AWQ_PLACES].flatten(1)


def compressed_format(said: Mapping[str, Any]) -> PackedFormat | None:
    """Integers in words, with plain activations and nothing beside that changes what is computed."""
    groups = list((said.get("config_groups") or {}).values())
    layouts = {str(group.get("format") or said.get("format")) for group in groups}
    if layouts != {"pack-quantized"} or said.get("kv_cache_scheme") or said.get("transform_config"):
        return None
    if (said.get("sparsity_config") or {}).get("format", "dense") != "dense":
        return None
    weights = [group.get("weights") or {} for group in groups]
    activated = any(group.get(name) for group in groups for name in ("input_activations", "output_activations"))
    bits = sorted({int(each.get("num_bits") or 0) for each in weights})
    if activated or any(each.get("type", "int") != "int" for each in weights):
        return None
    if any(each not in _COMPRESSED_BITS for each in bits):
        return None
    return PackedFormat(_ends(_COMPRESSED), lambda tensors, inside: _read_compressed(tensors, inside, bits))


def _read_compressed(tensors: Tensors, inside: int, widths: list[int]) -> PackedSource:
    """``weight_packed [out, words]``, ``weight_scale [out, groups]``, ``weight_zero_point [words, groups]``,
    ``weight_g_idx [inside]``.
    """
    words, scales = require_tensor(tensors, ".weight_packed"), require_tensor(tensors, ".weight_scale")
    out = len(words)
    fits = [bits for bits in widths if words.shape in [(out, size) for size in _widths(inside, bits)]]
    if len(fits) != 1 or len(scales) not in (1, out):
        raise ValueError(MISFIT)
    bits, stored, zeros = fits[0], tensors.get(".weight_zero_point"), None

    def codes(start: int, stop: int) -> torch.Tensor:
        return _unpack_words(words[start:stop], bits, inside)

    if stored is not None:
        zeros = _unpack_words(stored.t().contiguous(), bits, out).t().short()
    scales = scales.view(len(scales), -1).expand(out, -1)
    return IntegerSource(codes, inside, bits, scales, zeros, tensors.get(".weight_g_idx"), size_of(tensors))


def _widths(count: int, bits: int) -> tuple[int, int]:
    """How many words hold ``count`` codes: as a stream, as newer versions write them; or as many whole ones as fit."""
    return -(-count * bits // _WORD), -(-count // (_WORD // bits))


def _unpack_words(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """uint8 ``[rows, count]`` of int32 ``[rows, words]``."""
    if words.shape[1] == _widths(count, bits)[0]:
        return from_stream(words.contiguous().view(torch.uint8), bits)[:, :count]
    return from_words(words, bits)[:, :count]


def torchao_format(said: Mapping[str, Any]) -> PackedFormat | None:
    """torchao's safetensors with plain activations, of one type."""
    kinds = said.get("quant_type")
    kind = kinds.get("default") if isinstance(kinds, Mapping) and len(kinds) == 1 else None
    named = isinstance(kind, Mapping) and kind.get("_type") in _TORCHAO_TYPES
    return PackedFormat(_ends(_TORCHAO), _torchao) if named else None


def _torchao(tensors: Tensors, inside: int) -> PackedSource:
    """``qdata [out, inside]`` of int8, of 8 bits or fewer, ``scale`` and ``zero_point [out, groups]``; or ``qdata [out,
    inside / 2]`` of uint8, ``scale [groups, out]`` and what is added, ``zero_point [groups, out]``.
    """
    data, scales, zeros = (require_tensor(tensors, name) for name in _TORCHAO)
    if data.shape == (data.shape[0], inside // 2) and data.dtype in (torch.uint8, torch.int8):
        if zeros.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise NotOurs("torchao's packed weights with whole zeros")
        return _torchao_nibbles(data.view(torch.uint8), inside, _turn(scales), -_turn(zeros), size_of(tensors))
    if data.dtype != torch.int8 or data.shape[1] != inside:
        raise NotOurs("a packed weight of torchao in an order of its own")
    scales, zeros = (each.reshape(len(data), -1) for each in (scales, zeros))
    low, high = (int(each) for each in torch.aminmax(data))
    bits = 4 if low >= -8 and high <= 7 and int(zeros.abs().max()) <= 8 else 8
    middle = 1 << (bits - 1)

    def codes(start: int, stop: int) -> torch.Tensor:
        return (data[start:stop].short() + middle).to(torch.uint8)

    return IntegerSource(codes, inside, bits, scales, zeros.short() + middle, None, size_of(tensors))


def _torchao_nibbles(
    data: torch.Tensor, inside: int, scales: torch.Tensor, minima: torch.Tensor, nbytes: int
) -> PackedSource:
    def codes(start: int, stop: int) -> torch.Tensor:
        return from_stream(data[start:stop], 4) ^ 8  # they have a sign

    return IntegerSource(codes, inside, 4, scales, None, None, nbytes, minima)


def _turn(stored: torch.Tensor) -> torch.Tensor:
    return stored.t().contiguous()
