"""Settings of single architectures, which the metadata of a GGUF file says in other words, or does not say."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import NormalDist
from typing import Any

from scheduler.weights.gguf_file import GgufFile, largest
from scheduler.weights.gguf_header import GgufError
from scheduler.weights.gguf_hybrid import (
    read_convolutions,
    read_linear_attention,
    read_mamba,
    read_parallel_parts,
    read_periods,
    read_single_parts,
    read_states_alone,
)

Special = Callable[[GgufFile, Mapping[str, Any], dict[str, Any]], dict[str, Any]]
_SIGMOID = 2  # GGUF's number of a function of experts' scores


def chooses_by_sigmoid(file: GgufFile, keys: Mapping[str, Any]) -> bool:
    """Whether scores of experts are sigmoids: as the file says, and if it does not, where they are corrected."""
    said = keys.get("expert_gating_func")
    if said is not None:
        return bool(said == _SIGMOID)
    return any(name.endswith(".exp_probs_b.bias") for name in file.tensors)


def _read_last_expert_layer(file: GgufFile, keys: Mapping[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """All layers from the first one with experts on may have them."""
    return {"moe_layer_end_index": said["num_hidden_layers"] - 1}


def _read_head_scale(file: GgufFile, keys: Mapping[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """The scores' scale: of the width of a head, in the largest models of the width of all heads by their number."""
    largest = {46: 4608, 62: 5376}
    if largest.get(said["num_hidden_layers"]) == said["hidden_size"]:
        return {"query_pre_attn_scalar": said["hidden_size"] // said["num_attention_heads"]}
    return {"query_pre_attn_scalar": said["head_dim"]}


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


def _read_normed_choices(file: GgufFile, keys: Mapping[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """llama.cpp normalises the weights of the chosen experts unless the file says otherwise."""
    return {"norm_topk_prob": keys.get("expert_weights_norm", True)}


def _read_further_layers(file: GgufFile, keys: Mapping[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """The last layers may be for predicting further tokens, which are not run."""
    return {"num_hidden_layers": said["num_hidden_layers"] - keys.get("nextn_predict_layers", 0)}


def _read_window(file: GgufFile, keys: Mapping[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """A sliding window is said where there is one, and configurations have one where nothing is said."""
    return {"sliding_window": keys.get("attention.sliding_window")}


def _read_some_windows(file: GgufFile, keys: Mapping[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """The same for layers some of which have one: every fourth has none, unless the file says which, or every which."""
    layers, windowed = said["num_hidden_layers"], keys.get("attention.sliding_window_pattern", 4)
    if isinstance(windowed, int):
        windowed = [number % windowed != 0 for number in range(1, layers + 1)]
    if len(windowed) < layers:
        raise GgufError("the file does not say of each layer whether it has a sliding window")
    if "attention.sliding_window" not in keys:
        windowed = [False] * layers
    return {"layer_types": _kinds(windowed[:layers]), **_read_window(file, keys, said)}


def _read_stretched_layers(file: GgufFile, keys: Mapping[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """Where some layers have a sliding window, positions are stretched in the others only."""
    if not said.get("sliding_window"):
        return {}
    plain = {"rope_type": "default", "rope_theta": keys.get("rope.freq_base", 500_000.0)}
    ropes = {"sliding_attention": plain, "full_attention": {**plain, **said.get("rope_scaling", {})}}
    return {"rope_parameters": ropes, **_read_some_windows(file, keys, said)}


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


def _read_choice_of_groups(file: GgufFile, keys: Mapping[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """How experts are chosen. Older files do not say that it is by groups."""
    if not keys.get("expert_count"):
        return {}
    if "expert_group_count" not in keys:
        raise GgufError(
            "the file does not say in how many groups its experts are: put the model's config.json beside it"
        )
    normed = bool(keys.get("expert_weights_norm", False))
    if chooses_by_sigmoid(file, keys):
        return {"norm_topk_prob": normed}
    if normed:
        raise GgufError("the weights of experts with softmax scores are normalised, which transformers' model does not")
    grouped = keys["expert_group_count"] > 1
    return {"topk_method": "group_limited_greedy" if grouped else "greedy", "norm_topk_prob": False}


def _check_sigmoid(file: GgufFile, keys: Mapping[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """Nothing: transformers' model has no other scores of experts."""
    if not chooses_by_sigmoid(file, keys):
        raise GgufError("the scores of its experts are no sigmoids, which those of transformers' model are")
    return {"norm_topk_prob": keys.get("expert_weights_norm", False)}


def _check_normed_sigmoids(file: GgufFile, keys: Mapping[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """That embeddings are multiplied by the root of their width: llama.cpp knows no others. Transformers' model has no
    other scores of experts than normalised sigmoids.
    """
    if keys.get("expert_gating_func", _SIGMOID) != _SIGMOID or not keys.get("expert_weights_norm"):
        raise GgufError("the scores of its experts are no normalised sigmoids, which those of transformers' model are")
    if not keys.get("attention.sliding_window"):
        raise GgufError("the file does not say which of its layers have a sliding window")
    return {"mup_enabled": True}


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
    from scheduler.weights.gguf_source import values

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


def _read_two_widths(file: GgufFile, keys: Mapping[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """Layers with a window and without one have heads of their own widths, and rotary positions of their own. Those
    without turn a part of a head only: the factors of the others' frequencies are so large that nothing is left.
    """
    windowed, layers = _read_windows(keys, said), said["num_hidden_layers"]
    first = windowed.index(False)
    heads, widths = (_for_each(keys.get(key), layers) for key in ("attention.head_count_kv", "feed_forward_length"))
    ropes = _read_two_ropes(keys)
    ropes["full_attention"] |= {"rope_type": "proportional", "partial_rotary_factor": _turned_part(file)}
    return {
        "layer_types": _kinds(windowed),
        "head_dim": keys.get("attention.key_length_swa", said["head_dim"]),
        "global_head_dim": said["head_dim"],
        "num_key_value_heads": heads[windowed.index(True)] if any(windowed) else heads[0],
        "num_global_key_value_heads": heads[first],
        "attention_k_eq_v": f"blk.{first}.attn_v.weight" not in file.tensors,
        "intermediate_size": widths[0],
        "use_double_wide_mlp": max(widths) > widths[0],
        "enable_moe_block": bool(keys.get("expert_count")),
        "vocab_size_per_layer_input": _words_of_layers(file, said),
        "rope_parameters": ropes,
    }


def _read_streams(file: GgufFile, keys: Mapping[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """Layers that keep several versions of what they compute, some of whose activations are set to 0: those that are
    less than so many standard deviations above their mean.
    """
    layers, scales = said["num_hidden_layers"], keys.get("activation_sparsity_scale")
    left = file.tensors.get("blk.0.laurel_l.weight")
    if not isinstance(scales, list) or len(scales) != layers or left is None:
        raise GgufError("the file does not say how sparse its layers are")
    return {
        "layer_types": _kinds(_read_windows(keys, said)),
        "intermediate_size": _for_each(keys.get("feed_forward_length"), layers),
        "activation_sparsity_pattern": [round(NormalDist().cdf(scale), 6) for scale in scales],
        "laurel_rank": left.shape[0],
        "vocab_size_per_layer_input": _words_of_layers(file, said),
        "rope_parameters": _read_two_ropes(keys),
    }


def _read_windows(keys: Mapping[str, Any], said: dict[str, Any]) -> list[bool]:
    """Which layers have a sliding window; not all of them."""
    windowed = keys.get("attention.sliding_window_pattern")
    if not isinstance(windowed, list) or len(windowed) != said["num_hidden_layers"] or all(windowed):
        raise GgufError("the file does not say which of its layers have a sliding window")
    return windowed


def _kinds(windowed: list[bool]) -> list[str]:
    """What configurations call layers with a sliding window and without one."""
    return ["sliding_attention" if each else "full_attention" for each in windowed]


def _read_two_ropes(keys: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The rotary positions of layers with a window and without one."""
    bases = {"sliding": keys.get("rope.freq_base_swa", 10_000.0), "full": keys.get("rope.freq_base", 1_000_000.0)}
    return {f"{name}_attention": {"rope_type": "default", "rope_theta": base} for name, base in bases.items()}


def _words_of_layers(file: GgufFile, said: dict[str, Any]) -> int:
    """How many words have embeddings for each layer."""
    table = file.tensors.get("per_layer_token_embd.weight")
    return int(said["vocab_size"] if table is None else table.shape[0])


def _for_each(value: Any, layers: int) -> list[Any]:
    """A number of each layer. Raises ``GgufError`` where there is none."""
    found = value if isinstance(value, list) else [value] * layers
    if len(found) != layers or any(not isinstance(each, int) for each in found):
        raise GgufError("the file does not say how wide its layers are")
    return found


def _turned_part(file: GgufFile) -> float:
    """Which part of a head the rotary positions turn: that whose frequencies are divided by 1."""
    from scheduler.weights.gguf_source import values

    factors = file.tensors.get("rope_freqs.weight")
    return 0.25 if factors is None else float((values(factors) == 1).float().mean())


# By GGUF's name of an architecture: functions of the file, its keys and the settings so far, which give further ones.
SPECIAL: dict[str, tuple[Special, ...]] = {
    "afmoe": (_read_some_windows, _check_normed_sigmoids),
    "apertus": (_read_plain_positions, _check_activations),
    "chatglm": (_read_even_heads,),
    "deepseek2": (_read_latents, _read_choice_of_groups, _read_further_layers),
    "dots1": (_read_window, _check_sigmoid),
    "ernie4_5-moe": (_read_last_expert_layer,),
    "exaone": (_read_epsilon,),
    "exaone-moe": (_read_further_layers, _read_some_windows, _check_sigmoid),
    "exaone4": (_read_some_windows,),
    "falcon": (_read_groups,),
    "falcon-h1": (read_parallel_parts,),
    "gemma2": (_read_head_scale,),
    "gemma3": (_read_head_scale,),
    "gemma3n": (_read_streams,),
    "gemma4": (_read_two_widths,),
    "glm4moe": (_read_further_layers,),
    "gpt-oss": (_read_exact_stretching,),
    "granitehybrid": (read_mamba,),
    "jamba": (read_periods,),
    "lfm2": (read_convolutions,),
    "lfm2moe": (read_convolutions,),
    "mamba2": (read_states_alone,),
    "minicpm": (_long_factors, _read_scales),
    "mistral": (_read_window,),
    "mistral3": (_read_window, _read_growing_queries),
    "nemotron_h": (read_single_parts,),
    "nemotron_h_moe": (read_single_parts,),
    "olmo2": (_read_stretched_layers,),
    "phi3": (_long_factors,),
    "qwen35": (read_linear_attention, _read_sections),
    "qwen35moe": (read_linear_attention, _read_sections),
    "qwen3moe": (_read_normed_choices,),
    "qwen3vlmoe": (_read_normed_choices,),
    "qwen3next": (read_linear_attention,),
    "stablelm": (_sequential,),
}
