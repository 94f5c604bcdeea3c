"""Which tensors of a GGUF file are the parameters of a transformers model.

The names inside a layer are few, and the same for nearly all architectures: one table maps them. Where a name has
several meanings, those that only some architectures have come first, and a tensor is taken once.
"""

from __future__ import annotations

import re
from collections.abc import Collection

_LAYER = re.compile(r"(?:^|\.)(?:layers?|h|blocks)\.(?P<number>\d+)\.(?P<leaf>.+)\.(?P<kind>weight|bias)$")
_BARE = re.compile(r"(?:^|\.)(?:layers?|h|blocks)\.(?P<number>\d+)\.(?P<leaf>.+)$")

# Outside of layers: the last part of a module's name, or the last two, and what it may be in the file: the first that
# is there.
_OUTSIDE = {
    "embed_tokens": ("token_embd",),
    "embed_in": ("token_embd",),
    "wte": ("token_embd",),
    "word_embeddings": ("token_embd",),
    "embeddings": ("token_embd",),
    "wpe": ("position_embd",),
    "position_embeddings": ("position_embd",),
    "token_type_embeddings": ("token_types",),
    "LayerNorm": ("token_embd_norm",),
    "tok_embeddings": ("token_embd",),
    "embeddings.norm": ("token_embd_norm",),
    "final_norm": ("output_norm",),
    "word_embeddings_layernorm": ("token_embd_norm",),
    "embedding_norm": ("output_norm", "token_embd_norm"),
    "norm": ("output_norm",),
    "final_layernorm": ("output_norm",),
    "final_layer_norm": ("output_norm",),
    "norm_f": ("output_norm",),
    "ln_f": ("output_norm",),
    "lm_head": ("output", "token_embd"),
    "embed_tokens_per_layer": ("per_layer_token_embd",),
    "hc_norm": ("output_hc_norm",),
    "input_mix_weight_down": ("output_hc_down",),
    "input_mix_weight_up": ("output_hc_up",),
    "per_layer_model_projection": ("per_layer_model_proj",),
    "per_layer_projection_norm": ("per_layer_proj_norm",),
    "altup_projections": ("altup_proj",),
    "altup_unembed_projections": ("altup_unembd_proj",),
}
_BESIDE = {"z_L_init": ("hrm.z_l_init",)}  # parameters that are no module's weight or bias
_STACKS = re.compile(r"\b(?P<stack>[LH])_module\.layers\.(?P<number>\d+)\.")  # H's layers are numbered after L's
EMBEDDINGS = "token_embd"  # may be taken twice: where they are the head
JOINED = ".attn_qkv."
QUERIES_KEYS_VALUES = (".q_proj", ".k_proj", ".v_proj")  # in the order of their rows in a joined tensor

# Inside a layer, in the order in which they take tensors. A space is between tensors whose rows are joined.
_INSIDE: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("self_attn.q_proj", ("attn_q", "attn_qkv")),
    ("self_attn.k_proj", ("attn_k", "attn_qkv")),
    ("self_attn.v_proj", ("attn_v", "attn_qkv")),
    ("self_attn.q_a_proj", ("attn_q_a",)),
    ("self_attn.q_a_layernorm", ("attn_q_a_norm",)),
    ("self_attn.q_b_proj", ("attn_q_b",)),
    ("self_attn.kv_a_proj_with_mqa", ("attn_kv_a_mqa",)),
    ("self_attn.kv_a_layernorm", ("attn_kv_a_norm",)),
    ("self_attn.kv_b_proj", ("attn_k_b attn_v_b", "attn_kv_b")),  # attn_kv_b: in older files, as the parameter is
    ("self_attn.k_rope_only_layernorm", ("attn_k_norm",)),
    ("self_attn.indexer.wq_b", ("indexer.attn_q_b",)),
    ("self_attn.indexer.wk", ("indexer.attn_k",)),
    ("self_attn.indexer.k_norm", ("indexer.k_norm",)),
    ("self_attn.indexer.weights_proj", ("indexer.proj",)),
    ("self_attn.q_a_norm", ("attn_q_a_norm",)),
    ("self_attn.kv_proj", ("attn_kv",)),
    ("self_attn.kv_norm", ("attn_kv_a_norm",)),
    ("self_attn.o_a_proj", ("attn_output_a",)),
    ("self_attn.o_b_proj", ("attn_output_b",)),
    ("self_attn.compressor.kv_proj", ("attn_compressor_kv",)),
    ("self_attn.compressor.gate_proj", ("attn_compressor_gate",)),
    ("self_attn.compressor.kv_norm", ("attn_compressor_norm",)),
    ("self_attn.compressor.indexer.kv_proj", ("indexer_compressor_kv",)),
    ("self_attn.compressor.indexer.gate_proj", ("indexer_compressor_gate",)),
    ("self_attn.compressor.indexer.kv_norm", ("indexer_compressor_norm",)),
    ("self_attn.compressor.indexer.q_b_proj", ("indexer.attn_q_b",)),
    ("self_attn.compressor.indexer.scorer.weights_proj", ("indexer.proj",)),
    ("self_attn.gate_proj", ("attn_gate",)),
    ("self_attn.g_proj", ("attn_gate", "ssm_g_a")),
    ("self_attn.g_a_proj", ("ssm_g_a",)),
    ("self_attn.g_b_proj", ("ssm_g_b",)),
    ("self_attn.b_proj", ("ssm_beta",)),
    ("self_attn.conv1d", ("ssm_conv1d_q ssm_conv1d_k ssm_conv1d_v",)),
    ("self_attn.forget_gate.f_proj", ("ssm_f_a",)),
    ("self_attn.forget_gate.f_a_proj", ("ssm_f_a",)),
    ("self_attn.forget_gate.f_b_proj", ("ssm_f_b",)),
    ("self_attn.o_norm", ("ssm_norm",)),
    ("self_attn.o_proj", ("attn_output",)),
    ("self_attn.out_proj", ("attn_output",)),
    ("self_attn.dense", ("attn_output",)),
    ("self_attn.qkv_proj", ("attn_qkv",)),
    ("self_attn.q_norm", ("attn_q_norm",)),
    ("self_attn.k_norm", ("attn_k_norm",)),
    ("self_attn.q_layernorm", ("attn_q_norm",)),
    ("self_attn.k_layernorm", ("attn_k_norm",)),
    ("self_attn.query_layernorm", ("attn_q_norm",)),
    ("self_attn.key_layernorm", ("attn_k_norm",)),
    ("self_attn.attn_sub_norm", ("attn_sub_norm",)),
    ("self_attn.sinks", ("attn_sinks",)),
    ("self_attn.indexer.q_proj", ("indexer.q_proj",)),
    ("self_attn.indexer.k_proj", ("indexer.k_proj",)),
    ("self_attn.indexer.q_norm", ("indexer.q_norm",)),
    ("self_attention.query_key_value", ("attn_qkv",)),
    ("self_attention.dense", ("attn_output",)),
    ("norm_attn_norm.norm_1", ("attn_norm",)),
    ("norm_attn_norm.norm_2", ("attn_output_norm",)),
    ("norm_attn_norm.attn.Wqkv", ("attn_qkv",)),
    ("norm_attn_norm.attn.out_proj", ("attn_output",)),
    ("attention.query_key_value", ("attn_qkv",)),
    ("attention.dense", ("attn_output",)),
    ("attention.self.query", ("attn_q",)),
    ("attention.self.key", ("attn_k",)),
    ("attention.self.value", ("attn_v",)),
    ("attention.output.dense", ("attn_output",)),
    ("attention.output.LayerNorm", ("attn_output_norm",)),
    ("intermediate.dense", ("ffn_up",)),
    ("output.dense", ("ffn_down",)),
    ("output.LayerNorm", ("layer_output_norm",)),
    ("attn.Wqkv", ("attn_qkv",)),
    ("attn.Wo", ("attn_output",)),
    ("attn.c_attn", ("attn_qkv",)),
    ("attn.c_proj", ("attn_output",)),
    ("attn.out_proj", ("attn_output",)),
    ("mlp.gate_proj", ("ffn_gate",)),
    ("mlp.up_proj", ("ffn_up",)),
    ("mlp.down_proj", ("ffn_down",)),
    ("mlp.ffn_sub_norm", ("ffn_sub_norm",)),
    ("mlp.gate_up_proj", ("ffn_gate ffn_up", "ffn_up")),
    ("mlp.Wi", ("ffn_up",)),
    ("mlp.Wo", ("ffn_down",)),
    ("mlp.fc1", ("ffn_up",)),
    ("mlp.fc2", ("ffn_down",)),
    ("mlp.c_fc", ("ffn_up",)),
    ("mlp.c_proj", ("ffn_down",)),
    ("mlp.dense_h_to_4h", ("ffn_up",)),
    ("mlp.dense_4h_to_h", ("ffn_down",)),
    ("ffn.up_proj", ("ffn_up",)),
    ("ffn.down_proj", ("ffn_down",)),
    ("feed_forward.w1", ("ffn_gate",)),
    ("feed_forward.w2", ("ffn_down",)),
    ("feed_forward.w3", ("ffn_up",)),
    ("mlp.gate", ("ffn_gate_inp",)),
    ("mlp.gate.wg", ("ffn_gate_inp",)),
    ("mlp.router.gate", ("ffn_gate_inp",)),
    ("mlp.router", ("ffn_gate_inp",)),
    ("router.proj", ("ffn_gate_inp",)),
    ("feed_forward.gate_proj", ("ffn_gate",)),
    ("feed_forward.up_proj", ("ffn_up",)),
    ("feed_forward.down_proj", ("ffn_down",)),
    ("feed_forward.router", ("ffn_gate_inp",)),
    ("feed_forward.shared_expert.gate_proj", ("ffn_gate_shexp",)),
    ("feed_forward.shared_expert.up_proj", ("ffn_up_shexp",)),
    ("feed_forward.shared_expert.down_proj", ("ffn_down_shexp",)),
    ("feed_forward.gate", ("ffn_gate_inp",)),
    ("ffn.router.layer", ("ffn_gate_inp",)),
    ("block_sparse_moe.gate", ("ffn_gate_inp",)),
    ("block_sparse_moe.router", ("ffn_gate_inp",)),
    ("block_sparse_moe.router.layer", ("ffn_gate_inp",)),
    ("mlp.shared_expert.gate_proj", ("ffn_gate_shexp",)),
    ("mlp.shared_expert.up_proj", ("ffn_up_shexp",)),
    ("mlp.shared_expert.down_proj", ("ffn_down_shexp",)),
    ("mlp.shared_expert_gate", ("ffn_gate_inp_shexp",)),
    ("mlp.shared_experts.gate_proj", ("ffn_gate_shexp",)),
    ("mlp.shared_experts.up_proj", ("ffn_up_shexp",)),
    ("mlp.shared_experts.down_proj", ("ffn_down_shexp",)),
    ("mlp.shared_experts.gate_up_proj", ("ffn_gate_shexp ffn_up_shexp",)),
    ("mlp.shared_mlp.gate_proj", ("ffn_gate_shexp",)),
    ("mlp.shared_mlp.up_proj", ("ffn_up_shexp",)),
    ("mlp.shared_mlp.down_proj", ("ffn_down_shexp",)),
    ("shared_mlp.input_linear", ("ffn_gate_shexp ffn_up_shexp", "ffn_gate ffn_up", "ffn_up_shexp")),
    ("shared_mlp.output_linear", ("ffn_down_shexp", "ffn_down")),
    ("conv.in_proj", ("shortconv.in_proj",)),
    ("conv.out_proj", ("shortconv.out_proj",)),
    ("conv.conv", ("shortconv.conv",)),
    ("mixer.in_proj", ("ssm_in",)),
    ("mixer.conv1d", ("ssm_conv1d",)),
    ("mixer.x_proj", ("ssm_x",)),
    ("mixer.dt_proj", ("ssm_dt",)),
    ("mixer.norm", ("ssm_norm",)),
    ("mixer.out_proj", ("ssm_out",)),
    ("mixer.q_proj", ("attn_q", "attn_qkv")),
    ("mixer.k_proj", ("attn_k", "attn_qkv")),
    ("mixer.v_proj", ("attn_v", "attn_qkv")),
    ("mixer.o_proj", ("attn_output",)),
    ("mixer.up_proj", ("ffn_up",)),
    ("mixer.down_proj", ("ffn_down",)),
    ("mixer.gate", ("ffn_gate_inp",)),
    ("mixer.shared_experts.up_proj", ("ffn_up_shexp",)),
    ("mixer.shared_experts.down_proj", ("ffn_down_shexp",)),
    ("mixer.fc1_latent_proj", ("ffn_latent_down",)),
    ("mixer.fc2_latent_proj", ("ffn_latent_up",)),
    ("mamba.in_proj", ("ssm_in",)),
    ("mamba.conv1d", ("ssm_conv1d",)),
    ("mamba.x_proj", ("ssm_x",)),
    ("mamba.dt_proj", ("ssm_dt",)),
    ("mamba.dt_layernorm", ("ssm_dt_norm",)),
    ("mamba.b_layernorm", ("ssm_b_norm",)),
    ("mamba.c_layernorm", ("ssm_c_norm",)),
    ("mamba.norm", ("ssm_norm",)),
    ("mamba.out_proj", ("ssm_out",)),
    ("linear_attn.in_proj_qkvz", ("attn_qkv attn_gate", "ssm_in")),  # ssm_in: in older files, as the parameter is
    ("linear_attn.in_proj_ba", ("ssm_ba",)),
    ("linear_attn.in_proj_qkv", ("attn_qkv",)),
    ("linear_attn.in_proj_z", ("attn_gate",)),
    ("linear_attn.in_proj_a", ("ssm_alpha",)),
    ("linear_attn.in_proj_b", ("ssm_beta",)),
    ("linear_attn.conv1d", ("ssm_conv1d",)),
    ("linear_attn.norm", ("ssm_norm",)),
    ("linear_attn.out_proj", ("ssm_out",)),
    ("self_attn.indexer.index_qk_proj", ("indexer.q_proj indexer.k_proj",)),
    ("self_attn.indexer.q_layernorm", ("indexer.q_norm",)),
    ("self_attn.indexer.k_layernorm", ("indexer.k_norm",)),
    ("attn_hyper_connection.hc_norm", ("hc_attn_norm",)),
    ("attn_hyper_connection.input_mix_weight_down", ("hc_attn_down",)),
    ("attn_hyper_connection.input_mix_weight_up", ("hc_attn_up",)),
    ("attn_hyper_connection.block_inject_weight", ("hc_attn_inject",)),
    ("mlp_hyper_connection.hc_norm", ("hc_ffn_norm",)),
    ("mlp_hyper_connection.input_mix_weight_down", ("hc_ffn_down",)),
    ("mlp_hyper_connection.input_mix_weight_up", ("hc_ffn_up",)),
    ("mlp_hyper_connection.block_inject_weight", ("hc_ffn_inject",)),
    ("ple.key_proj", ("ple_key",)),
    ("ple.value_proj", ("ple_value",)),
    ("ple.norm_key", ("ple_norm_key",)),
    ("ple.norm_query", ("ple_norm_query",)),
    ("ple.norm_conv", ("ple_norm_conv",)),
    ("ple.conv1d", ("ple_conv1d",)),
    ("norm", ("attn_norm",)),
    ("norm_1", ("attn_norm",)),
    ("norm_2", ("ffn_norm",)),
    ("attn_norm", ("attn_norm",)),
    ("mlp_norm", ("ffn_norm",)),
    ("ln_1", ("attn_norm",)),
    ("ln_2", ("ffn_norm",)),
    ("ln_attn", ("attn_norm_2",)),
    ("ln_mlp", ("attn_norm",)),
    ("operator_norm", ("attn_norm",)),
    ("ffn_norm", ("ffn_norm",)),
    ("input_layernorm", ("attn_norm",)),
    ("attention_layernorm", ("attn_norm",)),
    ("feedforward_layernorm", ("ffn_norm",)),
    ("pre_feedforward_layernorm", ("ffn_norm",)),
    ("post_feedforward_layernorm", ("post_ffw_norm",)),
    ("pre_feedforward_layernorm_2", ("pre_ffw_norm_2",)),
    ("post_feedforward_layernorm_1", ("post_ffw_norm_1",)),
    ("post_feedforward_layernorm_2", ("post_ffw_norm_2",)),
    ("per_layer_input_gate", ("inp_gate",)),
    ("per_layer_projection", ("proj",)),
    ("post_per_layer_input_norm", ("post_norm",)),
    ("altup.correction_coefs", ("altup_correct_coef",)),
    ("altup.prediction_coefs", ("altup_predict_coef",)),
    ("altup.modality_router", ("altup_router",)),
    ("altup.router_norm", ("altup_router_norm",)),
    ("laurel.linear_left", ("laurel_l",)),
    ("laurel.linear_right", ("laurel_r",)),
    ("laurel.post_laurel_norm", ("laurel_post_norm",)),
    ("pre_mlp_layernorm", ("ffn_norm",)),
    ("post_mlp_layernorm", ("post_ffw_norm", "layer_output_norm")),
    ("post_self_attn_layernorm", ("post_attention_norm",)),
    ("post_attention_layernorm", ("post_attention_norm", "ffn_norm", "attn_output_norm")),
)
_NGRAMS, _TABLE = ".ngram_embedding.weight", ("per_layer_token_embd.weight",)  # of a layer, and outside in the file
_OF_STREAMS = ("fn", "base", "scale")
# Outside of layers, and no module's weight or bias.
_OUTSIDE_OTHERS = {f"hc_head.hc_{name}": f"output_hc_{name}.weight" for name in _OF_STREAMS}
# Parameters that are no module's weight or bias, here or in the file, in the same form.
_OTHERS = {
    "experts.gate_up_proj": ("ffn_gate_exps.weight ffn_up_exps.weight", "ffn_gate_up_exps.weight"),
    "experts.up_proj": ("ffn_up_exps.weight",),  # without gates
    "experts.down_proj": ("ffn_down_exps.weight",),
    "experts.gate_up_proj_bias": ("ffn_gate_exps.bias ffn_up_exps.bias",),
    "experts.down_proj_bias": ("ffn_down_exps.bias",),
    "e_score_correction_bias": ("exp_probs_b.bias", "exp_probs_b"),
    "compressor.position_bias": ("attn_compressor_ape.weight",),
    "indexer.position_bias": ("indexer_compressor_ape.weight",),
    "gate.tid2eid": ("ffn_gate_tid2eid.weight",),
    "mlp.expert_bias": ("exp_probs_b.bias",),
    "feed_forward.expert_bias": ("exp_probs_b.bias",),
    "router.scale": ("ffn_gate_inp.scale",),
    "router.per_expert_scale": ("ffn_down_exps.scale",),
    "altup.correct_output_scale": ("altup_correct_scale.weight",),
    "pre_ff_layernorm.weight": ("ffn_norm", "ffn_norm.weight"),
    **{f"{part}_hc.{name}": (f"hc_{part}_{name}.weight",) for part in ("attn", "ffn") for name in _OF_STREAMS},
    "act_fn.alpha_p": ("xielu.alpha_p",),
    "act_fn.alpha_n": ("xielu.alpha_n",),
    "act_fn.beta": ("xielu.beta",),
    "act_fn.eps": ("xielu.eps",),
    "layer_scalar": ("layer_output_scale.weight",),
    "self_attn.sinks": ("attn_sinks.weight",),
    "mixer.A_log": ("ssm_a",),
    "mixer.D": ("ssm_d",),
    "mixer.dt_bias": ("ssm_dt.bias",),
    "mamba.A_log": ("ssm_a",),
    "mamba.D": ("ssm_d",),
    "mamba.dt_bias": ("ssm_dt.bias",),
    "forget_gate.A_log": ("ssm_a",),
    "forget_gate.dt_bias": ("ssm_dt.bias",),
    "linear_attn.A_log": ("ssm_a",),
    "linear_attn.dt_bias": ("ssm_dt.bias",),
}


def find_tensors(parameters: Collection[str], tensors: Collection[str]) -> dict[str, tuple[str, ...]]:
    """The tensors of the file that each parameter is made of, for those that are found; more than one are joined."""
    found: dict[str, tuple[str, ...]] = {}
    taken: set[str] = set()
    order = {leaf: place for place, (leaf, _) in enumerate(_INSIDE)}
    stacks = [match for name in parameters if (match := _STACKS.search(name))]
    before = len({match["number"] for match in stacks if match["stack"] == "L"})
    for name in sorted(parameters, key=lambda name: order.get(_leaf(name), -1)):
        for choice in _choices(_in_one_stack(name, before)):
            if all(each in tensors and each not in taken for each in choice):
                found[name] = choice
                taken |= {
                    each for each in choice if each.partition(".")[0] != EMBEDDINGS and not _is_joined(name, each)
                }
                break
    return found


def _is_joined(name: str, tensor: str) -> bool:
    """Whether a parameter is some of the rows of a tensor, which has those of queries, keys and values."""
    return JOINED in tensor and name.rpartition(".")[0].endswith(QUERIES_KEYS_VALUES)


def _leaf(name: str) -> str:
    match = _LAYER.search(name)
    return match["leaf"] if match else ""


def _in_one_stack(name: str, before: int) -> str:
    """The name of a parameter with its layer's number in the file, where a stack is ``before`` its own."""
    match = _STACKS.search(name)
    if match is None or match["stack"] == "L":
        return name
    return f"{name[: match.start('number')]}{int(match['number']) + before}{name[match.end('number') :]}"


def _choices(name: str) -> list[tuple[str, ...]]:
    """What a parameter may be in a file, the likeliest first."""
    if match := _LAYER.search(name):
        number, kind = match["number"], match["kind"]
        if leafs := dict(_INSIDE).get(match["leaf"], ()):
            return [tuple(f"blk.{number}.{each}.{kind}" for each in leaf.split()) for leaf in leafs]
    if name.endswith(_NGRAMS):
        return [_TABLE]
    if match := _BARE.search(name):
        leafs = next((made for end, made in _OTHERS.items() if f".{match['leaf']}".endswith("." + end)), ())
        return [tuple(f"blk.{match['number']}.{part}" for part in leaf.split()) for leaf in leafs]
    if alone := next((made for end, made in _OUTSIDE_OTHERS.items() if name.endswith("." + end)), ""):
        return [(alone,)]
    module, _, kind = name.rpartition(".")
    owner, _, last = module.rpartition(".")
    if last.isdigit():  # one of several
        last, kind = owner.rpartition(".")[2], f"{last}.{kind}"
    outside = _OUTSIDE.get(".".join(module.split(".")[-2:])) or _OUTSIDE.get(last, ())
    return [(found,) for found in (*_BESIDE.get(kind, ()), *(f"{name}.{kind}" for name in outside))]
