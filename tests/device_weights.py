"""Random packed weights of every format that our readers have, and copies of them in a device's memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from packed_checkpoints import awq, compressed, gptq, gptq_v2, said_by
from packed_models import FP8, NF4, integers, mxfp4, nf4, torchao, torchao_int4, torchao_said
from packed_models import fp8 as fp8_of

from scheduler.accel.gpu.device_weight import DeviceWeight
from scheduler.weights.gguf.file import GgufTensor
from scheduler.weights.gguf.source import GgufSource
from scheduler.weights.gguf.types import TYPES
from scheduler.weights.packed_formats import format_of
from scheduler.weights.packed_source import PackedSource
from scheduler.weights.quantised_weight import QuantisedWeight

CPU = torch.device("cpu")
TYPE_NUMBERS = {each.name: number for number, each in TYPES.items() if each.dtype is None}
_HALVES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "TQ1_0": (52,), "TQ2_0": (64,), "MXFP4": ()}
_TWO = ("Q4_1", "Q5_1", "Q4_K", "Q5_K")
STORED: dict[str, tuple[Any, dict[str, Any]]] = {
    "GPTQ": (integers(gptq, 4), said_by(gptq, 4, 32)),
    "GPTQ of 3 bits": (integers(gptq_v2, 3), said_by(gptq_v2, 3, 32)),
    "GPTQ of 2 bits": (integers(gptq, 2), said_by(gptq, 2, 32)),
    "GPTQ of 8 bits": (integers(gptq, 8), said_by(gptq, 8, 32)),
    "GPTQ in the order of activations": (integers(gptq, 4, shuffled=True), said_by(gptq, 4, 32)),
    "AWQ": (integers(awq, 4), said_by(awq, 4, 32)),
    "compressed-tensors of 6 bits": (integers(compressed, 6), said_by(compressed, 6, 32)),
    "compressed-tensors of 7 bits": (integers(compressed, 7, symmetric=True), said_by(compressed, 7, 32)),
    "torchao": (torchao, torchao_said("IntxWeightOnlyConfig")),
    "torchao of 4 bits": (torchao_int4, torchao_said("Int4WeightOnlyConfig")),
    "fp8": (fp8_of, FP8),
    "mxfp4": (mxfp4, {"quant_method": "mxfp4"}),
    "nf4": (nf4, NF4),
}
KINDS = (*TYPE_NUMBERS, *STORED)
MOST_OF = {"TQ1_0": 66 / 54}  # a file has five of its values in a byte, a device four; of others at most MOST


def packed_source(kind: str, out: int, inside: int) -> PackedSource:
    """A random weight of one of ``KINDS``."""
    if kind in TYPE_NUMBERS:
        return _blocks(kind, out, inside)
    pack, said = STORED[kind]
    weight = torch.randn(out, inside, generator=torch.Generator().manual_seed(out + inside)) / 8
    given = weight.t()[None] if pack is mxfp4 else weight
    tensors, _ = pack("a.weight", given.contiguous())
    form = format_of(said)
    assert form is not None
    ((_, parts),) = form.find(tensors).items()
    return form.source({end: tensors[name] for end, name in parts.items()}, inside)


def _blocks(name: str, out: int, inside: int) -> PackedSource:
    """Random bytes, with small numbers where a block has float16."""
    kind = TYPES[TYPE_NUMBERS[name]]
    shape = out, inside // kind.elements, kind.nbytes
    data = np.random.default_rng(out).integers(0, 256, shape, dtype=np.uint8)
    for at in _HALVES.get(name, (0, 2) if name in _TWO else (0,)):
        data[..., at + 1] = data[..., at + 1] & 0b10000011 | 0b00101000
    if name == "MXFP4":
        data[..., 0] = 120 + data[..., 0] % 16
    tensor = GgufTensor("x", (out, inside), TYPE_NUMBERS[name], torch.from_numpy(data.reshape(out, -1)))
    return GgufSource([tensor])


def device_weight(kind: str, out: int, inside: int, count: int = 1, dtype: torch.dtype = torch.float32) -> DeviceWeight:
    """Such a weight as it lies on a device, here in host memory; ``count`` of experts."""
    return DeviceWeight(QuantisedWeight(packed_source(kind, out, inside), dtype, count), CPU)
