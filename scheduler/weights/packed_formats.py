"""`PackedFormat`: how checkpoints of packed integers name and lay out the tensors of a weight.

GPTQ: https://github.com/ModelCloud/GPTQModel, AWQ: https://github.com/casper-hansen/AutoAWQ, compressed-tensors:
https://github.com/vllm-project/compressed-tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from scheduler.weights.integer_source import IntegerSource, from_stream, from_words
from scheduler.weights.packed_source import PackedSource

Tensors = Mapping[str, torch.Tensor]  # of one weight, by the last part of their names
_GPTQ_BITS, _COMPRESSED_BITS, _WORD = (2, 3, 4, 8), range(2, 9), 32
_AWQ_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]  # of columns in a word


@dataclass(frozen=True)
class PackedFormat:
    """One format. ``marker``: the name of the tensor that every packed weight has. ``source`` makes a weight ``[out,
    inside]`` of its tensors; it raises ``ValueError`` where they do not fit.
    """

    marker: str
    source: Callable[[Tensors, int, int], PackedSource]


def format_of(said: Any) -> PackedFormat | None:
    """The format that the ``quantization_config`` of a checkpoint declares; None where we do not read it."""
    if not isinstance(said, Mapping):
        return None
    method = str(said.get("quant_method", "")).lower()
    if method == "gptq":
        return _gptq_format(said)
    if method == "awq":
        plain = str(said.get("version", "gemm")).lower() == "gemm" and said.get("bits", said.get("w_bit", 4)) == 4
        return PackedFormat("qweight", _awq) if plain else None
    if method == "compressed-tensors":
        return _compressed_format(said)
    return None


def _gptq_format(said: Mapping[str, Any]) -> PackedFormat | None:
    layout = str(said.get("checkpoint_format") or said.get("format") or "gptq").lower()
    if layout not in ("gptq", "gptq_v2") or said.get("bits") not in _GPTQ_BITS:
        return None
    first = 0 if layout == "gptq_v2" else 1
    return PackedFormat("qweight", lambda tensors, out, inside: _gptq(tensors, out, inside, first))


def _gptq(tensors: Tensors, out: int, inside: int, first: int) -> PackedSource:
    """``qweight [inside * bits / 32, out]``, ``scales [groups, out]``, ``qzeros [groups, out * bits / 32]``, ``g_idx
    [inside]``; ``first`` is added to zeros.
    """
    words, scales, stored = (_known(tensors, name) for name in ("qweight", "scales", "qzeros"))
    bits = words.shape[0] * _WORD // inside
    if bits not in _GPTQ_BITS or words.shape != (inside * bits // _WORD, out) or scales.shape[1] != out:
        raise ValueError(_MISFIT)

    def codes(start: int, stop: int) -> torch.Tensor:
        return from_stream(words[:, start:stop].t().contiguous().view(torch.uint8), bits)

    zeros = from_stream(stored.contiguous().view(torch.uint8), bits)[:, :out].short() + first & (1 << bits) - 1
    groups = tensors.get("g_idx")
    return IntegerSource(
        codes, inside, bits, _turned(scales), _turned(zeros), None if len(scales) == 1 else groups, _size(tensors)
    )


def _awq(tensors: Tensors, out: int, inside: int) -> PackedSource:
    """``qweight [inside, out / 8]``, ``scales [groups, out]``, ``qzeros [groups, out / 8]``."""
    words, scales, stored = (_known(tensors, name) for name in ("qweight", "scales", "qzeros"))
    if words.shape != (inside, out // 8) or out % 8 or scales.shape[1] != out:
        raise ValueError(_MISFIT)

    def codes(start: int, stop: int) -> torch.Tensor:
        first = start // 8
        return _awq_columns(words[:, first : -(-stop // 8)])[:, start - 8 * first : stop - 8 * first].t().contiguous()

    return IntegerSource(codes, inside, 4, _turned(scales), _turned(_awq_columns(stored).short()), None, _size(tensors))


def _awq_columns(words: torch.Tensor) -> torch.Tensor:
    """uint8 ``[n, 8 * m]`` of int32 ``[n, m]``."""
    return from_stream(words.contiguous().view(torch.uint8), 4).view(len(words), -1, 8)[..., _AWQ_PLACES].flatten(1)


def _compressed_format(said: Mapping[str, Any]) -> PackedFormat | None:
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
    return PackedFormat("weight_packed", lambda tensors, out, inside: _compressed(tensors, out, inside, bits))


def _compressed(tensors: Tensors, out: int, inside: int, known: list[int]) -> PackedSource:
    """``weight_packed [out, words]``, ``weight_scale [out, groups]``, ``weight_zero_point [words, groups]``,
    ``weight_g_idx [inside]``.
    """
    words, scales = _known(tensors, "weight_packed"), _known(tensors, "weight_scale")
    fits = [bits for bits in known if words.shape in [(out, size) for size in _widths(inside, bits)]]
    if len(fits) != 1 or len(scales) not in (1, out):
        raise ValueError(_MISFIT)
    bits, stored, zeros = fits[0], tensors.get("weight_zero_point"), None

    def codes(start: int, stop: int) -> torch.Tensor:
        return _unpacked(words[start:stop], bits, inside)

    if stored is not None:
        zeros = _unpacked(stored.t().contiguous(), bits, out).t().short()
    scales = scales.view(len(scales), -1).expand(out, -1)
    return IntegerSource(codes, inside, bits, scales, zeros, tensors.get("weight_g_idx"), _size(tensors))


def _widths(count: int, bits: int) -> tuple[int, int]:
    """How many words hold ``count`` codes: as a stream, as newer versions write them; or as many whole ones as fit."""
    return -(-count * bits // _WORD), -(-count // (_WORD // bits))


def _unpacked(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """uint8 ``[rows, count]`` of int32 ``[rows, words]``."""
    if words.shape[1] == _widths(count, bits)[0]:
        return from_stream(words.contiguous().view(torch.uint8), bits)[:, :count]
    return from_words(words, bits)[:, :count]


_MISFIT = "the tensors of a packed weight do not fit the model"


def _known(tensors: Tensors, name: str) -> torch.Tensor:
    if name not in tensors:
        raise ValueError(f"a packed weight has no {name}")
    return tensors[name]


def _turned(stored: torch.Tensor) -> torch.Tensor:
    return stored.t().contiguous()


def _size(tensors: Tensors) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())
