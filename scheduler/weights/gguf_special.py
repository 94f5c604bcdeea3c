"""Settings of single architectures, which the metadata of a GGUF file says in other words, or does not say."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from scheduler.weights.gguf_experts import (
    check_normed_sigmoids,
    check_sigmoid,
    check_unclamped,
    read_choice_of_groups,
    read_last_expert_layer,
    read_layers_with_experts,
    read_normed_choices,
)
from scheduler.weights.gguf_file import GgufFile, largest
from scheduler.weights.gguf_header import GgufError
from scheduler.weights.gguf_hybrid import (
    read_convolutions,
    read_deltas,
    read_linear_attention,
    read_mamba,
    read_parallel_parts,
    read_periods,
    read_single_parts,
    read_states_alone,
)
from scheduler.weights.gguf_source import values
from scheduler.weights.gguf_sparse import read_chosen_blocks, read_compressed_blocks, read_ngrams
from scheduler.weights.gguf_windows import (
    read_doubled_keys,
    read_local_windows,
    read_some_windows,
    read_streams,
    read_stretched_layers,
    read_two_widths,
    read_window,
)
from scheduler.weights.gguf_words import WORDS

Special = Callable[[GgufFile, Mapping[str, Any], dict[str, Any]], dict[str, Any]]


def _read_head_scale(file: GgufFile, keys: Mapping[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """The scores' scale: of the width of a head, in the largest models of the width of all heads by their number."""
    largest = {46: 4608, 62: 5376}
    if largest.get(said["num_hidden_layers"]) == said["hidden_size"]:
        return {"query_pre_attn_scalar": said["hidden_size"] // said["num_attention_heads"]}
    return {"query_pre_attn_scalar": said["head_dim"]}


def _read_both_ways(file: GgufFile, keys: Mapping[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """Attention to tokens before and behind, as all models of this kind have it; a window is of both together."""
    return {"use_bidirectional_attention": True}


def _read_kinds_of_texts(file: GgufFile, keys: Mapping[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """How many kinds of texts have embeddings; no token ends a reply. RoBERTa and its kin are of the same architecture
    and are BERT with other vocabularies: their files leave out the positions that stand for padding.
    """
    kinds = file.tensors.get("token_types.weight")
    words = file.metadata.get("tokenizer.ggml.model") == WORDS
    if kinds is None or not (words or file.metadata.get("tokenizer.ggml.add_bos_token")):
        raise GgufError("the file does not say of what kinds texts are, or what stands before them")
    return {"type_vocab_size": kinds.shape[0], "eos_token_id": None}


def _read_even_heads(file: GgufFile, keys: Mapping[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """Heads that are together as wide as the model, unless the file says otherwise."""
    return {"head_dim": keys.get("attention.key_length", said["hidden_size"] // said["num_attention_heads"])}


def _read_epsilon(file: GgufFile, keys: Mapping[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """What is added in norms, which files call that of norms of another kind."""
    return {
        "rms_norm_eps": keys.get("attention.layer_norm_rms_epsilon", keys.get("attention.layer_norm_epsilon", 1e-5))
    }


def _read_scales(file: GgufFile, keys: Mapping[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """What embeddings, layers and logits are multiplied by. Older files do not say it, when it was the same for all."""
    if keys.get("expert_count"):
        raise GgufError("transformers has no model of its architecture with experts")
    width = keys.get("attention.key_length", said["hidden_size"] // said["num_attention_heads"])
    return {
        "attention_multiplier": width**-0.5,
        "embedding_multiplier": keys.get("embedding_scale", 12.0),
        "residual_multiplier": keys.get("residual_scale", 1.4 / said["num_hidden_layers"] ** 0.5),
        "logits_scaling": keys.get("logit_scale", said["hidden_size"] / 256),
    }


def _read_further_layers(file: GgufFile, keys: Mapping[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """The last layers may be for predicting further tokens, which are not run."""
    return {"num_hidden_layers": said["num_hidden_layers"] - keys.get("nextn_predict_layers", 0)}


def _read_exact_stretching(file: GgufFile, keys: Mapping[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """The bounds between frequencies that are stretched and those that are not are no whole numbers."""
    return {"rope_scaling": {**said["rope_scaling"], "truncate": False}} if "rope_scaling" in said else {}


def _read_sections(file: GgufFile, keys: Mapping[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """The frequencies of a picture's time, height and width, where positions have three numbers."""
    sections = [each for each in keys.get("rope.dimension_sections", ()) if each]
    if not sections:
        return {}
    rope = {name: said[name] for name in ("rope_theta", "partial_rotary_factor") if name in said}
    return {"rope_parameters": {"rope_type": "default", **rope, "mrope_section": sections, "mrope_interleaved": True}}


def _read_latents(file: GgufFile, keys: Mapping[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """The widths of heads whose keys and values are made of latents. Older files say them as those of other heads."""
    key = keys.get("attention.key_length_mla", keys.get("attention.key_length"))
    value = keys.get("attention.value_length_mla", keys.get("attention.value_length"))
    turned = keys.get("rope.dimension_count")
    if not key or not value or not turned or "attention.kv_lora_rank" not in keys:
        raise GgufError("the file does not say how wide the parts of its keys and values are")
    found = {
        "q_lora_rank": keys.get("attention.q_lora_rank"),
        "qk_rope_head_dim": turned,
        "qk_nope_head_dim": key - turned,
        "v_head_dim": value,
        "head_dim": turned,
        "num_key_value_heads": said["num_attention_heads"],
    }
    if "rope_scaling" in said and "rope.scaling.yarn_log_multiplier" in keys:
        scale = round(keys["rope.scaling.yarn_log_multiplier"] * 10, 6)  # of a file's float32
        found["rope_scaling"] = {**said["rope_scaling"], "mscale": scale, "mscale_all_dim": scale}
    return found


def _read_growing_queries(file: GgufFile, keys: Mapping[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """Queries that grow with the logarithm of their positions, and positions that are stretched."""
    growth = keys.get("attention.temperature_scale")
    if not growth:
        return {}
    if "rope_scaling" not in said:
        raise GgufError("the file does not say how its rotary positions are stretched")
    scale = keys.get("rope.scaling.yarn_log_multiplier", 0.0)
    more = {"rope_theta": said["rope_theta"], "mscale": 1.0, "mscale_all_dim": scale, "llama_4_scaling_beta": growth}
    return {"rope_parameters": {**said["rope_scaling"], **more}}


def _read_plain_positions(file: GgufFile, keys: Mapping[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """Rotary positions, where configurations have those of Llama 3 if nothing is said: their factors are a tensor."""
    plain = {"rope_type": "default", "rope_theta": keys.get("rope.freq_base", 10_000.0)}
    return {"rope_parameters": {**plain, **said.get("rope_scaling", {})}}


def _check_activations(file: GgufFile, keys: Mapping[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """Nothing: the numbers of each layer's activation are weights of the model."""
    for number in range(said["num_hidden_layers"]):
        if any(f"blk.{number}.xielu.{name}" not in file.tensors for name in ("alpha_p", "alpha_n", "beta", "eps")):
            raise GgufError("the file does not have the numbers of the activation of each layer")
    return {}


def _long_factors(file: GgufFile, keys: Mapping[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """The factors of long contexts, which are tensors in the file."""
    long, short = (file.tensors.get(f"rope_factors_{name}.weight") for name in ("long", "short"))
    if long is None or short is None:
        return {}
    before = keys.get("rope.scaling.original_context_length", said["max_position_embeddings"])
    factors = {"long_factor": values(long).tolist(), "short_factor": values(short).tolist()}
    scaling = {"rope_type": "longrope", "original_max_position_embeddings": before, **factors}
    if "rope.scaling.attn_factor" in keys:
        scaling["attention_factor"] = keys["rope.scaling.attn_factor"]
    return {"rope_scaling": scaling, "original_max_position_embeddings": before}


def _sequential(file: GgufFile, keys: Mapping[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    return {"use_parallel_residual": "blk.0.ffn_norm.weight" not in file.tensors}


def _read_groups(file: GgufFile, keys: Mapping[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """The newer layout with two norms, or the older with one."""
    newer = "blk.0.attn_norm_2.weight" in file.tensors
    heads = largest(keys.get("attention.head_count_kv"))
    return {"new_decoder_architecture": newer, "multi_query": heads == 1, "num_kv_heads": heads, "alibi": False}


# By GGUF's name of an architecture: functions of the file, its keys and the settings so far, which give further ones.
SPECIAL: dict[str, tuple[Special, ...]] = {
    "afmoe": (read_some_windows, check_normed_sigmoids),
    "apertus": (_read_plain_positions, _check_activations),
    "bailingmoe3": (
        _read_further_layers,
        _read_latents,
        check_sigmoid,
        check_unclamped,
        read_choice_of_groups,
        read_layers_with_experts,
        read_deltas,
    ),
    "bert": (_read_kinds_of_texts,),
    "chatglm": (_read_even_heads,),
    "deepseek2": (_read_latents, read_choice_of_groups, _read_further_layers),
    "dots1": (read_window, check_sigmoid),
    "ernie4_5-moe": (read_last_expert_layer,),
    "exaone": (_read_epsilon,),
    "exaone-moe": (_read_further_layers, read_some_windows, check_sigmoid),
    "exaone4": (read_some_windows,),
    "falcon": (_read_groups,),
    "falcon-h1": (read_parallel_parts,),
    "gemma-embedding": (_read_head_scale, _read_both_ways),
    "gemma2": (_read_head_scale,),
    "gemma3": (_read_head_scale,),
    "gemma3n": (read_streams,),
    "gemma4": (read_two_widths,),
    "glm4moe": (_read_further_layers,),
    "gpt-oss": (_read_exact_stretching,),
    "granitehybrid": (read_mamba,),
    "jamba": (read_periods,),
    "kimi-linear": (_read_latents, check_sigmoid, read_normed_choices, read_layers_with_experts, read_deltas),
    "lfm2": (read_convolutions,),
    "lfm2moe": (read_convolutions,),
    "mamba2": (read_states_alone,),
    "mimo2": (_read_further_layers, read_layers_with_experts, read_doubled_keys),
    "minicpm": (_long_factors, _read_scales),
    "minimax-m3": (read_layers_with_experts, read_chosen_blocks),
    "mistral": (read_window,),
    "mistral3": (read_window, _read_growing_queries),
    "modern-bert": (read_local_windows,),
    "nemotron_h": (read_single_parts,),
    "nemotron_h_moe": (read_single_parts,),
    "nomic-bert": (_read_kinds_of_texts,),
    "olmo2": (read_stretched_layers,),
    "phi3": (_long_factors,),
    "qwen35": (read_linear_attention, _read_sections),
    "qwen35moe": (read_linear_attention, _read_sections),
    "qwen3moe": (read_normed_choices,),
    "qwen3vlmoe": (read_normed_choices,),
    "qwen3next": (read_linear_attention,),
    "qwen4exp": (read_linear_attention, _read_sections, read_compressed_blocks, read_ngrams),
    "stablelm": (_sequential,),
}
