"""What products with packed weights change: ``python -m tools.weight_drift [--activations int8]``.

Weights of the demo model, which is trained, and of random models are packed in every form that the kernel has. The
logits of 2,000 tokens are compared with those of the same model in float32 with the values that the packed weights
stand for: the error of the products alone, not of rounding weights. With int8 their inputs have one byte.
"""

from __future__ import annotations

import argparse
import copy
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, Qwen3MoeConfig

from scheduler.accel.cpu.experts import is_experts, pack_experts
from scheduler.accel.cpu.packing import Packing
from scheduler.accel.cpu.program_kernel import kernel
from scheduler.accel.cpu.quantised import keep_packed
from scheduler.model.measurement import relative_error
from scheduler.weights.packed_source import PackedRows
from scheduler.weights.packed_values import E4M3
from scheduler.weights.quantised_weight import QuantisedWeight
from scheduler.weights.stand_in import WeightStandIn
from tools.held_source import HeldSource
from tools.random_model import DEMO
from tools.tables import table

_TOKENS, _TIMELINE = 2000, 500
_COARSE = 256
_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_NF4 = tuple(float(level) for level in torch.linspace(-1, 1, 16) ** 3)  # no whole numbers


class Form(NamedTuple):
    """A form of packed weights."""

    bits: int
    group: int = 32
    minima: bool = False
    fine: bool = False
    table: tuple[float, ...] | None = None


FORMS = {
    "8 bits (Q8_0)": Form(8),
    "8 bits, groups of 128 (compressed-tensors)": Form(8, 128),
    "4 bits (Q4_0)": Form(4),
    "4 bits with minima (Q4_1, torchao)": Form(4, minima=True),
    "4 bits, groups of 128 (GPTQ)": Form(4, 128),
    "5 bits (Q5_0)": Form(5),
    "4 bits, two levels, minima (Q4_K)": Form(4, minima=True, fine=True),
    "5 bits, two levels, minima (Q5_K)": Form(5, minima=True, fine=True),
    "6 bits, two levels, groups of 16 (Q6_K)": Form(6, 16, fine=True),
    "table of whole numbers (IQ4_NL, MXFP4)": Form(4, table=_IQ4),
    "table of floats (nf4)": Form(4, 64, table=_NF4),
    "floats of 8 bits (fp8)": Form(8, 128, table=E4M3),
}


@dataclass
class Packed(HeldSource):
    """A weight in a form, a `PackedSource`."""

    all: PackedRows
    form: Form
    order: torch.Tensor | None = None

    def __post_init__(self) -> None:
        self.out, self.inside = self.all.values.shape
        self.bits, self.group, self.table = self.form.bits, self.form.group, self.form.table
        self.zero = 0 if self.form.minima or self.table else 1 << (self.bits - 1)


def packed(weight: torch.Tensor, form: Form) -> Packed:
    """A weight ``[out, inside]`` rounded to a form."""
    groups = weight.float().view(len(weight), -1, form.group)
    if form.table is not None:
        levels = torch.tensor(form.table)
        scales = (groups.abs().amax(-1) / levels.nan_to_num().abs().max()).half().float()
        near = groups / scales.clamp_min(1e-9)[..., None]
        if form.bits == 8:
            codes = near.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
        else:
            codes = (near[..., None] - levels).abs().argmin(-1).to(torch.uint8)
        return Packed(PackedRows(codes.flatten(1), scales), form)
    most = (1 << form.bits) - 1
    low, high = groups.aminmax(dim=-1)
    scales = (high - low) / most if form.minima else groups.abs().amax(-1) / (most // 2)
    minima = -low if form.minima else torch.zeros_like(low)
    parts: dict[str, Any] = {}
    for name, numbers in (("scales", scales), ("minima", minima)):
        if name == "minima" and not form.minima:
            continue
        if form.fine:
            of_block = numbers.view(len(weight), -1, _COARSE // form.group)
            coarse = (of_block.abs().amax(-1) / 63).half().float()
            fine = (of_block / coarse.clamp_min(1e-9)[..., None]).round().to(torch.int8).flatten(1)
            parts |= {f"coarse_{name}": coarse, f"fine_{name}": fine}
            numbers = coarse.repeat_interleave(_COARSE // form.group, 1) * fine
        else:
            numbers = numbers.half().float()
            parts[name] = numbers
        scales, minima = (numbers, minima) if name == "scales" else (scales, numbers)
    zero = 0 if form.minima else 1 << (form.bits - 1)
    codes = ((groups + minima[..., None]) / scales.clamp_min(1e-9)[..., None]).round() + zero
    return Packed(PackedRows(codes.clamp(0, most).flatten(1).to(torch.uint8), **parts), form)


def weights_of(model: Any) -> Iterator[tuple[torch.nn.Module, str, torch.Tensor]]:
    """The weights of linear modules and of experts, except routers and the product that gives logits."""
    for module in model.modules():
        for name, weight in list(module._parameters.items()):
            linear = isinstance(module, torch.nn.Linear) and name == "weight" and module is not model.lm_head
            if linear or (is_experts(module) and weight.dim() == 3):
                yield module, name, weight.detach()


def drift(model: Any, timelines: torch.Tensor, form: Form, activation_bytes: int = 2) -> tuple[float, float] | None:
    """The error of the logits, and how many of the likeliest tokens are the same; None where the form does not fit."""
    compiled = kernel()
    assert compiled is not None, "there is no C++ compiler"
    few, plain = copy.deepcopy(model), copy.deepcopy(model)
    pairs = zip(list(weights_of(few)), list(weights_of(plain)), strict=True)
    for (module, name, weight), (other, _, _) in pairs:
        inside = weight.shape[-1]
        if inside % (_COARSE if form.fine else form.group):
            return None
        source = packed(weight.reshape(-1, inside), form)
        count = len(weight) if weight.dim() == 3 else 1
        module._parameters[name] = WeightStandIn(QuantisedWeight(source, weight.dtype, count), weight)  # type: ignore[assignment]
        other._parameters[name] = torch.nn.Parameter(source.dequantise(0, source.out).view(weight.shape), False)
    packing = Packing({})
    pack_experts(few, packing)
    keep_packed(few, packing)
    packing.settle()
    compiled.activation_bytes = activation_bytes
    got, want = (torch.cat([one(input_ids=ids[None]).logits[0] for ids in timelines]) for one in (few, plain))
    compiled.activation_bytes = 2
    return relative_error(got, want), float((got.argmax(-1) == want.argmax(-1)).float().mean())


def models() -> Iterator[tuple[str, Any, torch.Tensor]]:
    """Models in float32, and tokens for them, ``[timelines, 500]``."""
    tokenizer = AutoTokenizer.from_pretrained(str(DEMO))
    folder = Path(__file__).parent.parent
    text = "".join((folder / name).read_text(encoding="utf-8") for name in ("README.md", "docs/operators.md"))
    words = torch.tensor(tokenizer(text).input_ids[:_TOKENS]).view(-1, _TIMELINE)
    yield "demo (trained)", AutoModelForCausalLM.from_pretrained(str(DEMO), dtype=torch.float32).eval(), words
    shape: dict[str, Any] = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    shape |= {"vocab_size": 1024, "num_hidden_layers": 8}
    made = {
        "llama (random)": LlamaConfig(**shape, intermediate_size=768),
        "qwen3_moe (random)": Qwen3MoeConfig(
            **shape, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=256, intermediate_size=768
        ),
    }
    drawn = random.Random(1)
    for name, config in made.items():
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        ids = torch.tensor([drawn.randrange(10, 1000) for _ in range(_TOKENS)]).view(-1, _TIMELINE)
        yield name, model, ids


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--activations", choices=("auto", "int8"), default="auto")
    activation_bytes = 1 if parser.parse_args().activations == "int8" else 2
    found: dict[str, list[str]] = {name: [] for name in FORMS}
    names = []
    for name, model, ids in models():
        names.append(name)
        for form, cells in found.items():
            made = drift(model, ids, FORMS[form], activation_bytes)
            cells.append("" if made is None else f"{made[0]:.1e}, {made[1]:.2%}")
    print(table(f"form | {' | '.join(names)}", [[form, *cells] for form, cells in found.items()]))


if __name__ == "__main__":
    main()
