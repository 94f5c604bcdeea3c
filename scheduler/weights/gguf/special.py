"""Settings of single architectures, which the metadata of a GGUF file says in other words, or does not say."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from scheduler.weights.gguf.compressed import read_bounded_experts, read_compressed_layers
from scheduler.weights.gguf.experts import (
    SIGMOID,
    SOFTMAX,
    check_normed_sigmoids,
    check_scores,
    check_sigmoid,
    check_softmax,
    check_unclamped,
    read_choice_of_groups,
    read_dense_layers,
    read_further_layers,
    read_last_expert_layer,
    read_named_scores,
    read_nested_parts,
    read_normed_choices,
    read_shared_experts,
    read_which_experts,
)
from scheduler.weights.gguf.file import GgufFile, largest
from scheduler.weights.gguf.header import GgufError
from scheduler.weights.gguf.hybrid import (
    read_convolutions,
    read_deltas,
    read_linear_attention,
    read_mamba,
    read_parallel_parts,
    read_periods,
    read_single_parts,
    read_states_alone,
)
from scheduler.weights.gguf.latents import (
    read_growing_latents,
    read_indexed_layers,
    read_indexers,
    read_latents,
    read_scaled_latents,
    read_shared_indexers,
    read_two_latents,
)
from scheduler.weights.gguf.source import values
from scheduler.weights.gguf.sparse import read_chosen_blocks, read_compressed_blocks, read_ngrams
from scheduler.weights.gguf.windows import (
    read_chunks,
    read_doubled_keys,
    read_gated_heads,
    read_local_windows,
    read_ropes_of_layers,
    read_some_windows,
    read_streams,
    read_stretched_layers,
    read_two_widths,
    read_which_windows,
    read_window,
)
from scheduler.weights.gguf.words import WORDS

Special = Callable[[GgufFile, Mapping[str, Any], dict[str, Any]], dict[str, Any]]

_LONG_SCALE = 1.243163121016122  # of cosines and sines


def _read_head_scale(file: GgufFile, keys: Mapping[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """The scores' scale: of the width of a head, in the largest models of the width of all heads by their number."""
    widest = {46: 4608, 62: 5376}
    if widest.get(said["num_hidden_layers"]) == said["hidden_size"]:
        return {"query_pre_attn_scalar": said["hidden_size"] // said["num_attention_heads"]}
    return {"query_pre_attn_scalar": said["head_dim"]}


def _read_scaled_embeddings(file: GgufFile, keys: Mapping[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """That embeddings are multiplied by the root of their width: llama.cpp knows no others."""
    if not keys.get("attention.sliding_window"):
        raise GgufError("the file does not say which of its layers have a sliding window")
    return {"mup_enabled": True}


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


def _read_whole_turns(file: GgufFile, keys: Mapping[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """Rotary positions turn whole heads. All models have those of one base, which files need not say."""
    base = keys.get("rope.freq_base", 10_000.0)
    return {"rope_parameters": {"rope_type": "default", "rope_theta": base, "partial_rotary_factor": 1.0}}


def _read_half_widths(file: GgufFile, keys: Mapping[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """Each head has keys of its own, and gates and ups are together as wide as the file says. As in llama.cpp, queries
    do not grow with positions beyond those of the training.
    """
    width = largest(keys.get("feed_forward_length", 0))
    return {"num_key_value_heads": said["num_attention_heads"], "intermediate_size": width // 2}


def _check_rotary(file: GgufFile, keys: Mapping[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """Nothing: of the two models the larger one, of 13 billion weights, has no rotary positions."""
    if said["num_hidden_layers"] == 40:
        raise GgufError("its attention depends on distances, which that of transformers' model does not")
    return {}


def _check_each_its_own(file: GgufFile, keys: Mapping[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """Nothing: llama.cpp's converter mixes up the rows of keys that several heads have."""
    if said.get("num_key_value_heads", said["num_attention_heads"]) != said["num_attention_heads"]:
        raise GgufError("the rows of its keys are not in an order that is known")
    return {"num_key_value_heads": said["num_attention_heads"]}


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


def _read_exact_stretching(file: GgufFile, keys: Mapping[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """The bounds between frequencies that are stretched and those that are not are no whole numbers."""
    return {"rope_scaling": {**said["rope_scaling"], "truncate": False}} if "rope_scaling" in said else {}


def _read_sections(file: GgufFile, keys: Mapping[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """The frequencies of a picture's time, height and width, where positions have three numbers."""
    sections = [each for each in keys.get("rope.dimension_sections", ()) if each]
    if not sections:
        return {}
    rope = {name: said[name] for name in ("rope_theta", "partial_rotary_factor") if name in said}
    form = {"rope_type": "default", **said.get("rope_scaling", {})}
    return {"rope_parameters": {**form, **rope, "mrope_section": sections, "mrope_interleaved": True}}


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


def _read_turned_layers(file: GgufFile, keys: Mapping[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """Which layers have rotary positions, all of one base: files have no others."""
    turned, base = keys.get("attention.rope_pattern"), keys.get("rope.freq_base", 10_000.0)
    if not isinstance(turned, list) or len(turned) != said["num_hidden_layers"]:
        raise GgufError(
            "the file does not say which of its layers have rotary positions: put the model's config.json beside it"
        )
    return {"layer_rope_theta": [base if each else 0 for each in turned]}


def _read_wider_base(file: GgufFile, keys: Mapping[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """The base of rotary positions, which a factor of the file makes larger. Those of text are one number each."""
    alpha, width = keys.get("rope.scaling.alpha"), said["head_dim"]
    return {"rope_theta": said.get("rope_theta", 10_000.0) * alpha ** (width / (width - 2))} if alpha else {}


def _read_plain_positions(file: GgufFile, keys: Mapping[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """Rotary positions, where configurations have those of Llama 3 if nothing is said: their factors are a tensor."""
    plain = {"rope_type": "default", "rope_theta": keys.get("rope.freq_base", 10_000.0)}
    return {"rope_parameters": {**plain, **said.get("rope_scaling", {})}}


def _read_gates(file: GgufFile, keys: Mapping[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """The activation that all models have which llama.cpp's converter can write. Newer ones, whose rotary positions
    have another base, have another one.
    """
    if keys.get("rope.freq_base", 10_000.0) != 10_000.0:
        raise GgufError("the file does not say which activation its layers have: put the model's config.json beside it")
    return {"hidden_act": "silu"}


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


def _read_multiplied_factors(file: GgufFile, keys: Mapping[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """The same, and what the rotary positions are multiplied by: the file does not say it, nor how near scores of
    experts are that count as one; both are the same for all models. The head has a bias if the file has one.
    """
    found = _long_factors(file, keys, said)
    if found:
        scaling = {"short_mscale": _LONG_SCALE, "long_mscale": _LONG_SCALE}
        found = {**found, "rope_scaling": {**found["rope_scaling"], **scaling}}
    return {**found, "lm_head_bias": "output.bias" in file.tensors}


def _read_slopes(file: GgufFile, keys: Mapping[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """How much less attention gives to tokens that are further away, and how large queries, keys and values may be."""
    slopes = keys.get("attention.max_alibi_bias", 0)
    if not slopes:
        raise GgufError("its attention does not depend on distances, which that of transformers' model does")
    return {"attn_config": {"alibi_bias_max": round(slopes), "clip_qkv": keys.get("attention.clamp_kqv")}}


def _read_rough_activation(file: GgufFile, keys: Mapping[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """The largest model's activation, of 20 billion weights, is an approximation of the others'. All have rotary
    positions of one base, which files do not say.
    """
    if keys.get("rope.freq_base", 10_000.0) != 10_000.0:
        raise GgufError("its rotary positions have another base than those of transformers' model")
    rough = said["num_hidden_layers"] == 44 and said["hidden_size"] == 6144
    return {"hidden_act": "gelu_fast"} if rough else {}


def _sequential(file: GgufFile, keys: Mapping[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    return {"use_parallel_residual": "blk.0.ffn_norm.weight" not in file.tensors}


def _read_groups(file: GgufFile, keys: Mapping[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """The newer layout with two norms, or the older with one."""
    newer = "blk.0.attn_norm_2.weight" in file.tensors
    heads = largest(keys.get("attention.head_count_kv"))
    return {"new_decoder_architecture": newer, "multi_query": heads == 1, "num_kv_heads": heads, "alibi": False}


# By GGUF's name of an architecture: functions of the file, its keys and the settings so far, which give further ones.
SPECIAL: dict[str, tuple[Special, ...]] = {
    "afmoe": (read_some_windows, check_normed_sigmoids, _read_scaled_embeddings),
    "apertus": (_read_plain_positions, _check_activations),
    "baichuan": (_check_rotary, _check_each_its_own),
    "bailingmoe3": (
        read_further_layers,
        read_latents,
        check_sigmoid,
        check_unclamped,
        read_choice_of_groups,
        read_which_experts,
        read_deltas,
    ),
    "bert": (_read_kinds_of_texts,),
    "bitnet": (_read_gates,),
    "chatglm": (_read_even_heads,),
    # Its layers without experts have rotary positions with or without a window, as in llama.cpp.
    "cohere2moe": (read_further_layers, read_which_windows, read_which_experts, read_named_scores),
    "dbrx": (read_nested_parts,),
    "deepseek2": (read_latents, read_growing_latents, read_choice_of_groups, read_further_layers),
    "deepseek32": (read_latents, read_choice_of_groups, check_sigmoid, read_further_layers, read_indexers),
    "deepseek4": (read_further_layers, read_compressed_layers, read_bounded_experts, read_indexers),
    "dots1": (read_window, check_sigmoid),
    "dots3note": (read_further_layers, read_two_latents, check_sigmoid, read_indexers),
    "ernie4_5-moe": (read_last_expert_layer,),
    "exaone": (_read_epsilon,),
    "exaone-moe": (read_further_layers, read_some_windows, check_sigmoid),
    "exaone4": (read_some_windows,),
    "falcon": (_read_groups,),
    "falcon-h1": (read_parallel_parts,),
    "gemma-embedding": (_read_head_scale, _read_both_ways),
    "gemma2": (_read_head_scale,),
    "gemma3": (_read_head_scale,),
    "gemma3n": (read_streams,),
    "gemma4": (read_two_widths,),
    "glm-dsa": (read_latents, read_choice_of_groups, check_sigmoid, read_further_layers, read_shared_indexers),
    "glm4": (read_further_layers,),
    "glm4moe": (read_further_layers, read_dense_layers),
    "gpt-oss": (_read_exact_stretching,),
    "gptneox": (_read_rough_activation,),
    "granite_swa": (read_which_windows, _read_turned_layers),
    "granitehybrid": (read_mamba,),
    "hunyuan_vl": (_read_wider_base,),
    "hy_v3": (read_further_layers, check_normed_sigmoids, read_which_experts, read_shared_experts),
    "hy_v4": (read_latents, check_sigmoid, read_which_experts, read_indexed_layers),
    "jamba": (read_periods,),
    "kimi-linear": (read_latents, check_sigmoid, read_normed_choices, read_which_experts, read_deltas),
    "laguna": (read_gated_heads, read_ropes_of_layers, check_normed_sigmoids, read_which_experts),
    "lfm2": (read_convolutions,),
    "lfm2moe": (read_convolutions,),
    "llama4": (read_chunks,),
    "mamba2": (read_states_alone,),
    "mellum": (
        read_which_windows,
        read_ropes_of_layers,
        read_normed_choices,
        read_which_experts,
        check_scores(SOFTMAX),
    ),
    "mimo2": (read_further_layers, read_which_experts, read_doubled_keys, check_scores(SIGMOID)),
    "minicpm": (_long_factors, _read_scales),
    "minicpm3": (read_scaled_latents, _long_factors),
    "minimax-m3": (read_which_experts, read_chosen_blocks),
    "mistral": (read_window,),
    "mistral3": (read_window, _read_growing_queries),
    "mistral4": (read_latents, read_growing_latents, check_softmax),
    "modern-bert": (read_local_windows,),
    "mpt": (_read_slopes,),
    "nemotron_h": (read_single_parts,),
    "nemotron_h_moe": (read_single_parts,),
    "nomic-bert": (_read_kinds_of_texts,),
    "olmo2": (read_stretched_layers,),
    "orion": (_sequential, _read_whole_turns),
    "phi3": (_long_factors,),
    "phimoe": (_read_multiplied_factors,),
    "qwen": (_read_epsilon, _read_half_widths),
    "qwen35": (read_linear_attention, _read_sections),
    "qwen35moe": (read_linear_attention, _read_sections),
    "qwen3moe": (read_normed_choices,),
    "qwen3next": (read_linear_attention,),
    "qwen3vlmoe": (read_normed_choices,),
    "qwen4exp": (read_linear_attention, _read_sections, read_compressed_blocks, read_ngrams),
    "stablelm": (_sequential,),
    "xverse": (_check_each_its_own,),
}
