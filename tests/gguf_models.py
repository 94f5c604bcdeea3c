"""Tiny random models of many architectures as GGUF files, as llama.cpp's converter would write them.

``scheduler/weights/gguf/names.json`` has the names that the ``gguf`` package gives to the parameters of each of them.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
import transformers
from gguf_kit import F32, I32, Q4_0, Q8_0, Stored, interleaved, store, write_file
from gguf_layers import MULTIPLIERS, head_groups
from gguf_loaded import class_of
from gguf_metadata import HYBRID, IN_TURNS, config_of, metadata_of

NAMES: dict[str, dict[str, str]] = json.loads((Path(__file__).parent / "scheduler/weights/gguf/names.json").read_text())
_PERMUTED = (
    "llama",
    "arcee",
    "granite",
    "granite_swa",
    "granitehybrid",
    "granitemoe",
    "internlm2",
    "minicpm",
    "mistral3",
    "olmo",
    "smollm3",
    "baichuan",
    "xverse",
    *HYBRID,
)
_ADDED = (
    "gemma",
    "gemma2",
    "gemma3",
    "gemma-embedding",
    "minimax-m3",
    "nemotron",
    "qwen3next",
    "qwen35",
    "qwen35moe",
    "qwen4exp",
)  # whose norms are stored as w + 1
_TRANSPOSED = ("gpt-oss", "llama4")  # whose experts are stored as [out, in]
_SCALES_IN_LAYERS = {
    ".correct_output_scale": "altup_correct_scale.weight",
    ".forget_gate.dt_bias": "ssm_dt.bias",
    ".mamba.dt_bias": "ssm_dt.bias",
    ".mixer.dt_bias": "ssm_dt.bias",
    ".pre_ff_layernorm.weight": "ffn_norm",
    ".layer_scalar": "layer_output_scale.weight",
    ".router.scale": "ffn_gate_inp.scale",
    ".router.per_expert_scale": "ffn_down_exps.scale",
}
_NORM = re.compile(r"norm(_key|_query|_conv)?\.weight$")
_HASHED = ("layer_multipliers", "ngram_heads_offsets", "ngram_heads_vocab_sizes")
_STREAMS = {"model.hc_head.": "output_", ".attn_hc.": "hc_attn_", ".ffn_hc.": "hc_ffn_"}
_STACKS = {"altup_projections": "altup_proj.weight", "altup_unembed_projections": "altup_unembd_proj.weight"}


def _unturned(config: Any) -> torch.Tensor:
    """The factors that leave nothing of the frequencies of the part of a head that is not turned."""
    turned = int(16 * config.rope_parameters["full_attention"]["partial_rotary_factor"])
    return torch.tensor([1.0] * turned + [1e30] * (16 - turned))


def random_model(label: str) -> Any:
    """A model whose every parameter matters."""
    torch.manual_seed(3)
    config = config_of(label)
    model = class_of(config).from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".A_log"):
                continue
            if parameter.dim() > 1:
                parameter.normal_(0, 0.2)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.05)
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", ".expert_bias")):
                buffer.normal_(0, 0.1)
            if name.endswith("layer_multipliers"):
                buffer.copy_(torch.tensor(MULTIPLIERS))
            if name.endswith("tid2eid"):
                buffer.copy_(torch.rand(len(buffer), 8).argsort(1)[:, :2])
            if name.endswith("layer_scalar"):
                buffer.uniform_(0.5, 1.5)
    return model


@torch.no_grad()
def written(path: Path, label: str, kind: int) -> tuple[Path, Any]:
    """One of ``MODELS`` as a file with blocks of ``kind``, and the model with the dequantised weights."""
    model, architecture = random_model(label), label.partition(" ")[0]
    tensors: dict[str, Stored] = {}
    stacks: dict[str, list[torch.Tensor]] = {}
    numbers: dict[str, list[float]] = {}
    for name, weight in model.state_dict().items():
        if (found := re.search(r"(altup_\w+)\.\d+\.weight", name)) is not None:
            stacks.setdefault(_STACKS[found[1]], []).append(weight)
        elif ".act_fn." in name:
            numbers.setdefault("xielu." + name.rpartition(".")[2], []).append(float(weight))
        elif not name.endswith(_HASHED) and not (name.startswith("lm_head") and model.config.tie_word_embeddings):
            tensors |= _stored(architecture, model, name, weight, kind)
    for name, weights in stacks.items():
        tensors[name] = store(torch.stack(weights), kind)
        for weight, values in zip(weights, tensors[name].values, strict=True):
            weight.copy_(values)
    if architecture == "gemma4":
        tensors["rope_freqs.weight"] = store(_unturned(model.config))
    return write_file(path, {**metadata_of(label), **numbers}, tensors), model


def _stored(architecture: str, model: Any, name: str, weight: torch.Tensor, kind: int) -> dict[str, Stored]:
    """The tensors of one parameter, which gets the values that they stand for."""
    if ".experts.mlp." in name:
        return _flat_experts(model.config.ffn_config, name, weight, kind)
    if ".experts." in name:
        return _experts(architecture, name, weight, kind)
    if name.endswith(tuple(_SCALES_IN_LAYERS)):
        leaf = next(made for end, made in _SCALES_IN_LAYERS.items() if name.endswith(end))
        leaf += ".weight" if leaf == "ffn_norm" and architecture != "falcon-h1" else ""
        return {f"blk.{_number(name)}.{leaf}": store(weight)}
    if name.endswith((".router.weight", "e_score_correction_bias", ".expert_bias")) and "mlp.router" not in name:
        bias = "exp_probs_b" if architecture == "hy_v3" else "exp_probs_b.bias"
        leaf = "ffn_gate_inp.weight" if name.endswith("weight") else bias
        return {f"blk.{_number(name)}.{leaf}": _kept(weight, kind)}
    if "kv_b_proj" in name and architecture != "minicpm3":
        config = model.config.per_layer_config[int(_number(name))] if architecture == "dots3note" else model.config
        return _of_latents(config, f"blk.{_number(name)}", weight, kind)
    if ".ngram_embedding." in name:
        return {"per_layer_token_embd.weight": _kept(weight, kind)}
    if ".index_qk_proj." in name:
        return _of_index(model.config, f"blk.{_number(name)}", weight, kind)
    if (".indexer." in name and architecture == "minimax-m3") or (
        "gate_up_proj.weight" in name and architecture == "minimax-m3"
    ):
        return _apart(name, weight, kind)
    if (stream := next((made for part, made in _STREAMS.items() if part in name), "")) != "":
        leaf = f"{stream}{name.rpartition('.')[2]}.weight"
        return {leaf if stream == "output_" else f"blk.{_number(name)}.{leaf}": store(weight)}
    if "shared_mlp" in name and "_linear" in name:
        return _shared(architecture, model.config, f"blk.{_number(name)}", name, weight, kind)
    if "in_proj_qkvz" in name:
        return _gated(model.config, f"blk.{_number(name)}", weight, kind)
    if ".self_attn.g_proj." in name and model.config.layer_types[int(_number(name))] == "linear_attention":
        return {f"blk.{_number(name)}.ssm_g_a.weight": _kept(weight, kind)}
    if ".self_attn.conv1d." in name:
        return _convolutions(f"blk.{_number(name)}", weight)
    base, ending = re.sub(r"\.(weight|bias)$", "", name), re.search(r"\.(weight|bias)$", name)
    before = model.config.num_layers_per_stack if ".H_module." in name else 0  # layers of another stack
    found = NAMES[architecture][re.sub(r"\.\d+\.", ".N.", base, count=1)]
    found = found.replace(".N.", f".{int(_number(name) or 0) + before}.")
    alone = base.endswith("sinks") or architecture == "deepseek4"
    found += ending[0] if ending else ".weight" if alone else ""
    if architecture in IN_TURNS and "linear_attn" in name and not name.endswith("norm.weight"):
        return {found: _in_turns(model.config, name, weight, kind)}
    if name.endswith("A_log"):
        return {found: store(torch.exp(weight)[:, None] if architecture == "bailingmoe3" else -torch.exp(weight))}
    if weight.dim() == 1 and architecture in _ADDED and _NORM.search(name) and "linear_attn" not in name:
        return {found: store(weight + 1)}
    if architecture == "deepseek4" and not ending:
        return {found: _kept(weight, I32 if name.endswith("tid2eid") else F32)}
    if architecture == "dots3note" and name.endswith(("q_a_layernorm.weight", "kv_a_layernorm.weight")):
        return {found: store(weight * (model.config.hidden_size / len(weight)) ** 0.5)}
    if weight.dim() == 2 and isinstance(model.get_submodule(base), transformers.pytorch_utils.Conv1D):
        return {found: _kept(weight.t(), kind)}
    if architecture in _PERMUTED and ("q_proj" in name or "k_proj" in name):
        heads = model.config.num_attention_heads if "q_proj" in name else model.config.num_key_value_heads
        return {found: _kept(weight, kind).rows(interleaved(len(weight), heads))}
    if architecture == "hy_v4" and (width := _turned_width(model.config, name)):
        turned, order = model.config.qk_rope_head_dim, torch.arange(len(weight)).view(-1, width)
        ends = order[:, -turned:].reshape(len(order), 2, -1).transpose(1, 2)
        order[:, -turned:] = ends.flatten(1)
        return {found: _kept(weight, kind).rows(order.flatten())}
    if "query_key_value" in name:
        rows = torch.arange(len(weight)).view(head_groups(model.config), -1, 16)
        order = torch.cat([rows[:, :-2].flatten(), rows[:, -2].flatten(), rows[:, -1].flatten()])
        return {found: _kept(weight, kind).rows(order)}
    if weight.dim() == 3:
        return {found: store(weight.squeeze(1))}
    if name.endswith(("mamba.D", "mamba.norm.weight", "mixer.norm.weight")) and architecture != "jamba":  # in groups
        in_groups = getattr(model.config, "mamba_n_groups", None) or model.config.n_groups
        return {found: store(weight.view(in_groups, -1) if "norm" in name else weight[:, None])}
    return {found: _kept(weight[0] if "shared_expert_gate" in name else weight, kind)}


def _turned_width(config: Any, name: str) -> int:
    """Of heads whose ends are turned, and stored in pairs; 0 for other parameters."""
    turned = config.qk_rope_head_dim
    if ".indexer." in name and "weights_proj" not in name:
        return int(config.index_head_dim)
    if "q_b_proj" in name:
        return int(config.qk_nope_head_dim + turned)
    return int(config.kv_lora_rank + turned) if "kv_a_proj" in name else 0


def _in_turns(config: Any, name: str, weight: torch.Tensor, kind: int) -> Stored:
    """A tensor of linear attention with the first head of values of each head of keys, then the second of each."""
    keys, width = config.linear_num_key_heads, config.linear_value_head_dim
    each = config.linear_num_value_heads // keys

    def turns(width: int) -> torch.Tensor:
        return torch.arange(keys * each * width).view(keys, each, width).transpose(0, 1).flatten()

    if "out_proj" in name:
        stored = store(weight[:, turns(width)], kind)
        weight[:, turns(width)] = stored.values
        return stored
    if name.endswith(("A_log", "dt_bias")):
        return store(-torch.exp(weight) if name.endswith("A_log") else weight).rows(turns(1))
    if "in_proj_a" in name or "in_proj_b" in name:
        return _kept(weight, kind).rows(turns(1))
    if "in_proj_z" in name:
        return _kept(weight, kind).rows(turns(width))
    before = 2 * keys * config.linear_key_head_dim
    order = torch.cat([torch.arange(before), before + turns(width)])
    return (store(weight.squeeze(1)) if "conv1d" in name else _kept(weight, kind)).rows(order)


def _shared(
    architecture: str, config: Any, layer: str, name: str, weight: torch.Tensor, kind: int
) -> dict[str, Stored]:
    """The multilayer perceptron that all layers have, beside experts or alone."""
    beside = "_shexp" if config.num_local_experts else ""
    if "output" in name:
        return {f"{layer}.ffn_down{beside}.weight": _kept(weight, kind)}
    if architecture == "granite_swa":
        return {f"{layer}.ffn_up{beside}.weight": _kept(weight, kind)}
    gate, up = weight.chunk(2)
    return {f"{layer}.ffn_gate{beside}.weight": _kept(gate, kind), f"{layer}.ffn_up{beside}.weight": _kept(up, kind)}


def _gated(config: Any, layer: str, weight: torch.Tensor, kind: int) -> dict[str, Stored]:
    """Queries, keys and values of all heads, and their gates: as files of several types have them, of another type if
    the others are of 8 bits.
    """
    heads, key = config.linear_num_key_heads, config.linear_key_head_dim
    value = config.linear_num_value_heads // heads * config.linear_value_head_dim
    kinds = torch.split(torch.arange(len(weight)).view(heads, -1), [key, key, value, value], 1)
    rows, gates = torch.cat([each.flatten() for each in kinds[:3]]), kinds[3].flatten()
    stored = {"qkv": store(weight[rows], kind), "gate": store(weight[gates], Q4_0 if kind == Q8_0 else kind)}
    weight[rows], weight[gates] = stored["qkv"].values, stored["gate"].values
    return {f"{layer}.attn_{name}.weight": each for name, each in stored.items()}


def _of_latents(config: Any, layer: str, weight: torch.Tensor, kind: int) -> dict[str, Stored]:
    """What makes keys of latents, transposed, and what makes values of them, by heads."""
    key, value = config.qk_nope_head_dim, config.v_head_dim
    heads = weight.view(-1, key + value, weight.shape[1])
    stored = {"k": store(heads[:, :key].transpose(1, 2), kind), "v": store(heads[:, key:], kind)}
    heads[:, :key], heads[:, key:] = stored["k"].values.transpose(1, 2), stored["v"].values
    return {f"{layer}.attn_{name}_b.weight": each for name, each in stored.items()}


def _convolutions(layer: str, weight: torch.Tensor) -> dict[str, Stored]:
    """Those of queries, keys and values."""
    return {
        f"{layer}.ssm_conv1d_{each}.weight": store(part.transpose(0, 1)[None])
        for each, part in zip("qkv", weight.chunk(3), strict=True)
    }


def _apart(name: str, weight: torch.Tensor, kind: int) -> dict[str, Stored]:
    """Gates and ups in tensors of their own, and weights that choose blocks of keys, which stay in float32."""
    layer, beside = f"blk.{_number(name)}", "_shexp" if "shared_experts" in name else ""
    if ".indexer." in name:
        leaf = name.partition(".indexer.")[2]
        return {f"{layer}.indexer.{leaf}": store(weight + 1 if "norm" in leaf else weight)}
    gate, up = weight.chunk(2)
    return {f"{layer}.ffn_gate{beside}.weight": _kept(gate, kind), f"{layer}.ffn_up{beside}.weight": _kept(up, kind)}


def _of_index(config: Any, layer: str, weight: torch.Tensor, kind: int) -> dict[str, Stored]:
    """Queries and keys that choose blocks."""
    width = config.indexer_head_dim
    query, key = torch.split(weight, [config.indexer_n_heads * width, width])
    return {f"{layer}.indexer.q_proj.weight": _kept(query, kind), f"{layer}.indexer.k_proj.weight": _kept(key, kind)}


def _kept(weight: torch.Tensor, kind: int) -> Stored:
    """A tensor to store; the parameter gets its values."""
    stored = store(weight, kind)
    weight.copy_(stored.values)
    return stored


def _experts(architecture: str, name: str, weight: torch.Tensor, kind: int) -> dict[str, Stored]:
    turns, bias = architecture == "gpt-oss", name.endswith("_bias")
    ending = "bias" if bias else "weight"
    whole = weight.transpose(1, 2) if architecture in _TRANSPOSED and not bias else weight
    layer, kind = f"blk.{_number(name)}", F32 if bias else kind
    if "down_proj" in name:
        return {f"{layer}.ffn_down_exps.{ending}": _kept(whole, kind)}
    if architecture in ("gemma4", "granite_swa", "mistral4"):
        return {f"{layer}.ffn_gate_up_exps.{ending}": _kept(whole, kind)}
    if architecture == "nemotron_h_moe":
        return {f"{layer}.ffn_up_exps.{ending}": _kept(whole, kind)}
    half = whole.shape[1] // 2
    gate, up = (whole[:, ::2], whole[:, 1::2]) if turns else (whole[:, :half], whole[:, half:])
    return {f"{layer}.ffn_gate_exps.{ending}": _kept(gate, kind), f"{layer}.ffn_up_exps.{ending}": _kept(up, kind)}


def _flat_experts(config: Any, name: str, weight: torch.Tensor, kind: int) -> dict[str, Stored]:
    """A matrix of all experts, one after the other, of which the last one is transposed."""
    leaf = {"w1": "ffn_gate_exps", "v1": "ffn_up_exps", "w2": "ffn_down_exps"}[name.rpartition(".")[2]]
    whole = weight.view(config.moe_num_experts, config.ffn_hidden_size, -1)
    kept = _kept(whole.transpose(1, 2) if leaf == "ffn_down_exps" else whole, kind)
    return {f"blk.{_number(name)}.{leaf}.weight": kept}


def _number(name: str) -> str:
    """The number of a parameter's layer."""
    found = re.search(r"\.(\d+)\.", name)
    return found[1] if found else ""
