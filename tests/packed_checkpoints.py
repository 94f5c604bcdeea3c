"""Checkpoints of packed integers, made on the spot: the weights of a model's linear modules are rounded to codes with
scales and zeros, and written as each library does.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # which column the places of a word hold
Writer = Callable[["Codes"], dict[str, torch.Tensor]]


@dataclass
class Codes:
    """A weight in codes ``[out, inside]`` of ``bits``, scales and zeros ``[out, groups]``; ``groups [inside]``: which
    each input is of.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    groups: torch.Tensor
    bits: int

    @property
    def values(self) -> torch.Tensor:
        """float32 ``[out, inside]``."""
        scales, zeros = self.scales.float()[:, self.groups], self.zeros[:, self.groups]
        return scales * (self.codes - zeros)


def rounded(weight: torch.Tensor, bits: int, group: int, symmetric: bool, shuffled: bool = False) -> Codes:
    """Codes for a weight; ``shuffled``: groups are not of neighbours."""
    out, inside = weight.shape
    groups = torch.arange(inside) // group
    if shuffled:
        groups = groups[torch.randperm(inside, generator=torch.Generator().manual_seed(inside))]
    together = weight[:, torch.argsort(groups, stable=True)].view(out, -1, group)
    low, high, most = together.amin(-1), together.amax(-1), 2**bits - 1
    if symmetric:
        scales = together.abs().amax(-1) * 2 / most
        zeros = torch.full_like(scales, 2 ** (bits - 1))
    else:
        scales = (high - low) / most
        zeros = (-low / scales).round().clamp(1, most)  # GPTQ stores one less
    scales = scales.half()
    codes = (weight / scales.float()[:, groups] + zeros[:, groups]).round().clamp(0, most)
    return Codes(codes.int(), scales, zeros.int(), groups, bits)


def stream(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 ``[rows, ceil(n * bits / 32)]``: bit after bit, the lowest first."""
    ones = (codes[..., None] >> torch.arange(bits) & 1).flatten(1)
    ones = nn.functional.pad(ones, (0, -ones.shape[1] % 32)).view(len(codes), -1, 32).long()
    return (ones << torch.arange(32)).sum(-1).to(torch.int32)


def words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 of which each holds as many whole codes as fit."""
    each = 32 // bits
    padded = nn.functional.pad(codes, (0, -codes.shape[1] % each)).view(len(codes), -1, each).long()
    return (padded << torch.arange(each) * bits).sum(-1).to(torch.int32)


def gptq(of: Codes, first: int = 1) -> dict[str, torch.Tensor]:
    """``first``: what is taken from zeros, 0 in version 2."""
    return {
        "qweight": stream(of.codes, of.bits).t().contiguous(),
        "qzeros": stream(of.zeros.t() - first, of.bits),
        "scales": of.scales.t().contiguous(),
        "g_idx": of.groups.int(),
    }


def gptq_v2(of: Codes) -> dict[str, torch.Tensor]:
    return gptq(of, 0)


def awq(of: Codes) -> dict[str, torch.Tensor]:
    def columns(numbers: torch.Tensor) -> torch.Tensor:
        return words(numbers.view(len(numbers), -1, 8)[..., AWQ_ORDER].flatten(1), 4)

    return {"qweight": columns(of.codes.t()), "qzeros": columns(of.zeros.t()), "scales": of.scales.t().contiguous()}


def compressed(of: Codes, pack: Callable[[torch.Tensor, int], torch.Tensor] = stream) -> dict[str, torch.Tensor]:
    made = {"weight_packed": pack(of.codes, of.bits), "weight_scale": of.scales}
    made["weight_shape"] = torch.tensor(of.codes.shape)
    if not bool((of.zeros == 2 ** (of.bits - 1)).all()):
        made["weight_zero_point"] = pack(of.zeros.t(), of.bits).t().contiguous()
    if not bool((of.groups[1:] >= of.groups[:-1]).all()):
        made["weight_g_idx"] = of.groups.int()
    return made


def compressed_in_words(of: Codes) -> dict[str, torch.Tensor]:
    """As versions before 0.18 write it."""
    return compressed(of, words)


def said_by(write: Writer, bits: int, group: int) -> dict[str, Any]:
    """The ``quantization_config`` that the libraries put beside such tensors."""
    if write in (gptq, gptq_v2):
        layout = "gptq" if write is gptq else "gptq_v2"
        return {"quant_method": "gptq", "bits": bits, "group_size": group, "checkpoint_format": layout}
    if write is awq:
        return {"quant_method": "awq", "bits": bits, "group_size": group, "version": "gemm", "zero_point": True}
    weights = {"num_bits": bits, "type": "int", "strategy": "group", "group_size": group, "symmetric": False}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}


def linears(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """All but the one that gives logits, which libraries leave as it is."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            yield name, module


def write_checkpoint(
    folder: Path,
    model: Any,
    write: Writer,
    bits: int = 4,
    group: int = 32,
    symmetric: bool = False,
    shuffled: bool = False,
) -> None:
    """Write ``model`` to a folder in which its tokenizer is, packed, and give its linear modules the values that the
    codes stand for.
    """
    packed: dict[str, torch.Tensor] = {}
    for name, module in linears(model):
        of = rounded(module.weight.detach().float(), bits, group, symmetric, shuffled)
        packed |= {f"{name}.{leaf}": tensor for leaf, tensor in write(of).items()}
        module.weight = nn.Parameter(of.values.to(module.weight.dtype), False)
    names = {f"{name}.weight" for name, _ in linears(model)}
    plain = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name not in names}
    if model.config.tie_word_embeddings:
        plain.pop("lm_head.weight", None)
    save_file({**packed, **plain}, folder / "model.safetensors", {"format": "pt"})
    config = model.config.to_dict() | {"quantization_config": said_by(write, bits, group)}
    (folder / "config.json").write_text(json.dumps(config))
