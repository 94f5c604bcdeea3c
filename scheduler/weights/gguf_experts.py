"""How experts are chosen, from the metadata of a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from scheduler.weights.gguf_file import GgufFile
from scheduler.weights.gguf_header import GgufError

_SIGMOID = 2  # GGUF's number of a function of experts' scores


def chooses_by_sigmoid(file: GgufFile, keys: Mapping[str, Any]) -> bool:
    """Whether scores of experts are sigmoids: as the file says, and if it does not, where they are corrected."""
    said = keys.get("expert_gating_func")
    if said is not None:
        return bool(said == _SIGMOID)
    return any(name.endswith(".exp_probs_b.bias") for name in file.tensors)


def read_last_expert_layer(file: GgufFile, keys: Mapping[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """All layers from the first one with experts on may have them."""
    return {"moe_layer_end_index": said["num_hidden_layers"] - 1}


def read_layers_with_experts(file: GgufFile, keys: Mapping[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """Which layers have experts: those with a router."""
    routed = [f"blk.{number}.ffn_gate_inp.weight" in file.tensors for number in range(said["num_hidden_layers"])]
    return {"mlp_layer_types": ["sparse" if each else "dense" for each in routed]}


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
    normed = bool(keys.get("expert_weights_norm", False))
    if chooses_by_sigmoid(file, keys):
        return {"norm_topk_prob": normed}
    if normed:
        raise GgufError("the weights of experts with softmax scores are normalised, which transformers' model does not")
    grouped = keys["expert_group_count"] > 1
    return {"topk_method": "group_limited_greedy" if grouped else "greedy", "norm_topk_prob": False}


def check_sigmoid(file: GgufFile, keys: Mapping[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """Nothing: transformers' model has no other scores of experts."""
    if not chooses_by_sigmoid(file, keys):
        raise GgufError("the scores of its experts are no sigmoids, which those of transformers' model are")
    return {"norm_topk_prob": keys.get("expert_weights_norm", False)}


def check_unclamped(file: GgufFile, keys: Mapping[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """Nothing: what transformers' model multiplies in multilayer perceptrons has no bounds."""
    if any(any(keys.get(f"swiglu_clamp_{kind}") or ()) for kind in ("exp", "shexp")):
        raise GgufError("its experts have bounds of what they multiply, which those of transformers' model have not")
    return {}


def check_normed(keys: Mapping[str, Any]) -> None:
    """Raise ``GgufError`` unless scores of experts are normalised sigmoids."""
    if keys.get("expert_gating_func", _SIGMOID) != _SIGMOID or not keys.get("expert_weights_norm"):
        raise GgufError("the scores of its experts are no normalised sigmoids, which those of transformers' model are")


def check_normed_sigmoids(file: GgufFile, keys: Mapping[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """That embeddings are multiplied by the root of their width: llama.cpp knows no others. Transformers' model has no
    other scores of experts than normalised sigmoids.
    """
    check_normed(keys)
    if not keys.get("attention.sliding_window"):
        raise GgufError("the file does not say which of its layers have a sliding window")
    return {"mup_enabled": True}
