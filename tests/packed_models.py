"""Packed checkpoints of random models, written as each library writes them: experts among them, and formats
whose values are those of a table.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from packed_checkpoints import awq, compressed, gptq, rounded, said_by
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DeepseekV3Config,
    GptOssConfig,
    LlamaConfig,
    MixtralConfig,
    Qwen3MoeConfig,
)

DEMO = Path(__file__).resolve().parents[1] / "server" / "demo"
SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 1024,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
}
DEEPSEEK = {"num_key_value_heads": 4, "n_group": 1, "topk_group": 1, "q_lora_rank": 32, "kv_lora_rank": 32}
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaConfig(**SHAPE),
    "qwen3_moe": lambda: Qwen3MoeConfig(**SHAPE),
    "mixtral": lambda: MixtralConfig(**SHAPE),
    "deepseek_v3": lambda: DeepseekV3Config(
        **SHAPE | DEEPSEEK, first_k_dense_replace=1, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16
    ),
    "gpt_oss": lambda: GptOssConfig(**SHAPE | {"intermediate_size": 64}, layer_types=["full_attention"] * 2),
}
E2M1 = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
Packer = Callable[[str, torch.Tensor], tuple[dict[str, torch.Tensor], torch.Tensor]]  # its tensors, and its values


def integers(write: Any, bits: int, **more: Any) -> Packer:
    def pack(name: str, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        of = rounded(weight, bits, 32, **{"symmetric": False, **more})
        return {f"{name.removesuffix('weight')}{leaf}": tensor for leaf, tensor in write(of).items()}, of.values

    return pack


def fp8(
    name: str, weight: torch.Tensor, rows: int = 48, columns: int = 32
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Blocks of ``rows`` x ``columns``, the last of which may be smaller."""
    out, inside = weight.shape
    high = -(-out // rows)
    padded = torch.zeros(high * rows, inside)
    padded[:out] = weight
    scales = padded.view(high, rows, inside // columns, columns).abs().amax((1, 3)) / 448
    each = scales.repeat_interleave(rows, 0).repeat_interleave(columns, 1)[:out]
    codes = (weight / each).to(torch.float8_e4m3fn)
    return {name: codes, f"{name}_scale_inv": scales}, codes.float() * each


def mxfp4(name: str, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """``weight [experts, inside, out]``; the first block of each is of zeros, with the least scale."""
    rows = weight.transpose(1, 2)
    groups = rows.reshape(*rows.shape[:2], -1, 32)
    exponents = (groups.abs().amax(-1, keepdim=True) / 6).log2().ceil()
    exponents[:, 0, 0] = -127
    codes = (groups[..., None] / exponents[..., None].exp2() - E2M1).abs().argmin(-1)
    codes[:, 0, 0] = 0
    values = (E2M1[codes] * exponents.exp2()).view(rows.shape).transpose(1, 2).contiguous()
    blocks = (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8)
    return {f"{name}_blocks": blocks, f"{name}_scales": (exponents[..., 0] + 127).to(torch.uint8)}, values


def nf4(name: str, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Blocks of 32 values, whose scales are packed in turn, in blocks of 256."""
    table = torch.linspace(-1, 1, 16) ** 3
    groups = weight.reshape(-1, 32)
    wanted = groups.abs().amax(-1)
    offset, steps = float(wanted.mean()), torch.linspace(-1, 1, 256)
    nested = torch.stack([part.abs().amax() for part in torch.split(wanted - offset, 256)])
    each = nested.repeat_interleave(256)[: len(wanted)]
    absmax = ((wanted - offset) / each - steps[:, None]).abs().argmin(0)
    scales = steps[absmax] * each + offset
    codes = (groups[..., None] / scales[:, None, None] - table).abs().argmin(-1)
    pairs = codes.view(-1, 2)
    said = {"quant_type": "nf4", "blocksize": 32, "dtype": "float32", "shape": list(weight.shape)}
    said |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
    return {
        name: (pairs[:, :1] << 4 | pairs[:, 1:]).to(torch.uint8),
        f"{name}.absmax": absmax.to(torch.uint8),
        f"{name}.quant_map": table,
        f"{name}.nested_absmax": nested,
        f"{name}.nested_quant_map": steps,
        f"{name}.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(said).encode()), dtype=torch.uint8),
    }, (table[codes] * scales[:, None]).view(weight.shape)


def torchao(name: str, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Of 4 bits in bytes, with zeros."""
    of = rounded(weight, 4, 32, symmetric=False)
    stem = name.removesuffix("weight") + "_weight_"
    tensors = {"qdata": of.codes - 8, "zero_point": of.zeros - 8}
    made = {stem + leaf: tensor.to(torch.int8) for leaf, tensor in tensors.items()}
    return made | {stem + "scale": of.scales.float()}, of.values


def torchao_int4(name: str, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Two codes with a sign in a byte, with what is added to a group as a float."""
    of = rounded(weight, 4, 32, symmetric=False)
    stem, codes = name.removesuffix("weight") + "_weight_", of.codes - 8
    scales, added = of.scales.float(), (8 - of.zeros) * of.scales.float()
    data = (codes[:, ::2] & 15 | (codes[:, 1::2] & 15) << 4).to(torch.uint8)
    tensors = {"qdata": data, "scale": scales.t().contiguous(), "zero_point": added.t().contiguous()}
    values = codes * scales[:, of.groups] + added[:, of.groups]
    return {stem + leaf: tensor for leaf, tensor in tensors.items()}, values


def torchao_said(kind: str) -> dict[str, Any]:
    return {"quant_method": "torchao", "quant_type": {"default": {"_type": kind, "_version": 2, "_data": {}}}}


AUTOROUND = {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "bits": 4, "group_size": 32}
FP8 = {"quant_method": "fp8", "weight_block_size": [48, 32], "activation_scheme": "dynamic"}
NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
CASES: dict[str, tuple[str, Packer, dict[str, Any]]] = {
    "GPTQ": ("qwen3_moe", integers(gptq, 4), said_by(gptq, 4, 32)),
    "GPTQ of 8 bits": ("qwen3_moe", integers(gptq, 8), said_by(gptq, 8, 32)),
    "AWQ": ("qwen3_moe", integers(awq, 4), said_by(awq, 4, 32)),
    "AWQ of mixtral": ("mixtral", integers(awq, 4), said_by(awq, 4, 32)),
    "compressed-tensors": ("qwen3_moe", integers(compressed, 4), said_by(compressed, 4, 32)),
    "AutoRound": ("llama", integers(gptq, 4, symmetric=True), AUTOROUND),
    "fp8": ("llama", fp8, FP8),
    "fp8 of deepseek": ("deepseek_v3", fp8, FP8),
    "fp8 of qwen": ("qwen3_moe", fp8, FP8),
    "mxfp4": ("gpt_oss", mxfp4, {"quant_method": "mxfp4"}),
    "nf4": ("llama", nf4, NF4),
    "torchao of 4 bits in bytes": ("llama", torchao, torchao_said("IntxWeightOnlyConfig")),
    "torchao of 4 bits": ("llama", torchao_int4, torchao_said("Int4WeightOnlyConfig")),
}


def write_case(folder: Path, name: str, config: Any = None) -> None:
    """A random model as a checkpoint in ``folder / "packed"``, and the values that its codes stand for as one in
    ``folder / "plain"``. ``config``: of another size.
    """
    architecture, pack, said = CASES[name]
    torch.manual_seed(0)
    config = CONFIGS[architecture]() if config is None else config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for embedding in (model.get_input_embeddings(), model.get_output_embeddings()):
        embedding.weight.data.mul_(3)  # so that tokens differ; with larger layers rounding would choose other experts
    plain, packed = folder / "plain", folder / "packed"
    model.save_pretrained(plain)
    tensors = load_file(plain / "model.safetensors")
    stored = dict(tensors)
    for key, weight in tensors.items():
        if _is_packed(key, pack):
            made, values = pack(key, weight)
            del stored[key]
            stored |= made
            tensors[key] = values.contiguous()
    save_file(tensors, plain / "model.safetensors", {"format": "pt"})
    AutoTokenizer.from_pretrained(DEMO).save_pretrained(packed)
    save_file(stored, packed / "model.safetensors", {"format": "pt"})
    settings = json.loads((plain / "config.json").read_text()) | {"quantization_config": said}
    (packed / "config.json").write_text(json.dumps(settings))


def _is_packed(key: str, pack: Packer) -> bool:
    if pack is mxfp4:
        return key.endswith(("experts.gate_up_proj", "experts.down_proj"))
    inner = ".mlp." in key or ".self_attn." in key or ".block_sparse_moe." in key
    return inner and key.endswith(".weight") and "gate.weight" not in key and "norm" not in key
