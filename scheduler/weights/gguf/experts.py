"""How experts are chosen, from the metadata of a GGUF file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from scheduler.weights.gguf.file import GgufFile
from scheduler.weights.gguf.header import GgufError

SOFTMAX, SIGMOID = 1, 2  # GGUF's numbers of functions of experts' scores
_SCORES: dict[Any, str] = {SOFTMAX: "softmax", SIGMOID: "sigmoid"}


def chooses_by_sigmoid(file: GgufFile, keys: Mapping[str, Any]) -> bool:
    """Whether scores of experts are sigmoids: as the file says, and if it does not, where they are corrected."""
    said = keys.get("expert_gating_func")
    if said is not None:
        return bool(said == SIGMOID)
    return any(name.endswith(".exp_probs_b.bias") for name in file.tensors)


def read_further_layers(file: GgufFile, keys: Mapping[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """The last layers may be for predicting further tokens, which are not run."""
    return {"num_hidden_layers": said["num_hidden_layers"] - keys.get("nextn_predict_layers", 0)}


def read_which_experts(file: GgufFile, keys: Mapping[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """Which layers have experts, as their tensors show."""
    routed = [f"blk.{number}.ffn_gate_inp.weight" in file.tensors for number in range(said["num_hidden_layers"])]
    return {"mlp_layer_types": ["sparse" if each else "dense" for each in routed]}


def read_dense_layers(file: GgufFile, keys: Mapping[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """How many first layers have no experts, of which some models have none, whose files do not say it."""
    return {"first_k_dense_replace": read_which_experts(file, keys, said)["mlp_layer_types"].count("dense")}


def read_nested_parts(file: GgufFile, keys: Mapping[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """Settings of attention and of experts. Weights of the chosen ones are normalised: llama.cpp knows no others."""
    base = keys.get("rope.freq_base", 10_000.0)
    if any(not keys.get(key) for key in ("feed_forward_length", "expert_count", "expert_used_count")):
        raise GgufError("the file does not say how many experts its layers have, or how wide they are")
    return {
        "d_model": said["hidden_size"],
        "attn_config": {
            "clip_qkv": keys.get("attention.clamp_kqv"),
            "kv_n_heads": keys.get("attention.head_count_kv", 1),
            "rope_theta": base,
        },
        "ffn_config": {
            "ffn_hidden_size": keys.get("feed_forward_length"),
            "moe_num_experts": keys.get("expert_count"),
            "moe_top_k": keys.get("expert_used_count"),
        },
        "rope_parameters": {"rope_type": "default", "rope_theta": base},
    }


def read_shared_experts(file: GgufFile, keys: Mapping[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """How many experts all tokens have: as many as are together so wide."""
    width, shared = keys.get("expert_feed_forward_length"), keys.get("expert_shared_feed_forward_length")
    if not width or not shared or shared % width:
        raise GgufError("the file does not say how many experts all tokens have")
    return {"num_shared_experts": shared // width}


def read_named_scores(file: GgufFile, keys: Mapping[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """What scores of experts are, which llama.cpp and transformers' model take for something else if it is not said."""
    if (named := _SCORES.get(keys.get("expert_gating_func"))) is None:
        raise GgufError("the file does not say what the scores of its experts are, or they are none of its model")
    return {"expert_selection_fn": named}


def read_last_expert_layer(file: GgufFile, keys: Mapping[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """All layers from the first one with experts on may have them."""
    return {"moe_layer_end_index": said["num_hidden_layers"] - 1}


def read_normed_choices(file: GgufFile, keys: Mapping[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """llama.cpp normalises the weights of the chosen experts unless the file says otherwise."""
    return {"norm_topk_prob": keys.get("expert_weights_norm", True)}


def read_choice_of_groups(file: GgufFile, keys: Mapping[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """How experts are chosen. Older files do not say that it is by groups."""
    if not keys.get("expert_count"):
        return {}
    if "expert_group_count" not in keys:
        raise GgufError(
            "the file does not say in how many groups its experts are: put the model's config.json beside it"
        )
    if keys.get("attention.temperature_scale"):  # of a model whose queries grow
        return check_softmax(file, keys, said)
    normed = bool(keys.get("expert_weights_norm", False))
    if chooses_by_sigmoid(file, keys):
        return {"norm_topk_prob": normed}
    if normed:
        raise GgufError("the weights of experts with softmax scores are normalised, which transformers' model does not")
    grouped = keys["expert_group_count"] > 1
    return {"topk_method": "group_limited_greedy" if grouped else "greedy", "norm_topk_prob": False}


def check_softmax(file: GgufFile, keys: Mapping[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """Transformers' model has no other scores of experts; whether they are normalised is said where they are."""
    if keys.get("expert_gating_func", SOFTMAX) != SOFTMAX:
        raise GgufError("the scores of its experts are not by softmax, which those of transformers' model are")
    return {"norm_topk_prob": keys.get("expert_weights_norm", False)}


def check_sigmoid(file: GgufFile, keys: Mapping[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """Nothing: transformers' model has no other scores of experts."""
    if not chooses_by_sigmoid(file, keys):
        raise GgufError("the scores of its experts are no sigmoids, which those of transformers' model are")
    return {"norm_topk_prob": keys.get("expert_weights_norm", False)}


def check_scores(number: int) -> Callable[[GgufFile, Mapping[str, Any], dict[str, Any]], dict[str, Any]]:
    """A function that gives nothing: transformers' model has no other scores of experts than those of GGUF's number."""

    def check(file: GgufFile, keys: Mapping[str, Any], said: dict[str, Any]) -> dict[str, Any]:
        if keys.get("expert_gating_func", number) != number:
            raise GgufError(f"the scores of its experts are not the {_SCORES[number]} of transformers' model")
        return {}

    return check


def check_unclamped(file: GgufFile, keys: Mapping[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """Nothing: what transformers' model multiplies in multilayer perceptrons has no bounds."""
    if any(any(keys.get(f"swiglu_clamp_{kind}") or ()) for kind in ("exp", "shexp")):
        raise GgufError("its experts have bounds of what they multiply, which those of transformers' model have not")
    return {}


def check_normed(keys: Mapping[str, Any]) -> None:
    """Raise ``GgufError`` unless scores of experts are normalised sigmoids."""
    if keys.get("expert_gating_func", SIGMOID) != SIGMOID or not keys.get("expert_weights_norm"):
        raise GgufError("the scores of its experts are no normalised sigmoids, which those of transformers' model are")


def check_normed_sigmoids(file: GgufFile, keys: Mapping[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """Nothing: transformers' model has no other scores of experts, and of the chosen ones they are normalised."""
    check_normed(keys)
    return {}
