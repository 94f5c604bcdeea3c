"""Settings of layers that differ in a sliding window, from the metadata of a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import NormalDist
from typing import Any

from scheduler.weights.gguf.file import GgufFile
from scheduler.weights.gguf.header import GgufError
from scheduler.weights.gguf.source import values


def read_window(file: GgufFile, keys: Mapping[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """A sliding window is said where there is one, and configurations have one where nothing is said."""
    return {"sliding_window": keys.get("attention.sliding_window")}


def read_some_windows(file: GgufFile, keys: Mapping[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """The same for layers some of which have one: every fourth has none, unless the file says which, or every which."""
    layers, windowed = said["num_hidden_layers"], keys.get("attention.sliding_window_pattern", 4)
    if isinstance(windowed, int):
        windowed = [number % windowed != 0 for number in range(1, layers + 1)]
    if len(windowed) < layers:
        raise GgufError("the file does not say of each layer whether it has a sliding window")
    if "attention.sliding_window" not in keys:
        windowed = [False] * layers
    return {"layer_types": _kinds(windowed[:layers]), **read_window(file, keys, said)}


def read_which_windows(file: GgufFile, keys: Mapping[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """The same where a file says which of its layers have one: they are at other places in some models."""
    if not isinstance(keys.get("attention.sliding_window_pattern"), list) and keys.get("attention.sliding_window"):
        raise GgufError("the file does not say which of its layers have a sliding window")
    return read_some_windows(file, keys, said)


def read_stretched_layers(file: GgufFile, keys: Mapping[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """Where some layers have a sliding window, positions are stretched in the others only."""
    if not said.get("sliding_window"):
        return {}
    plain = {"rope_type": "default", "rope_theta": keys.get("rope.freq_base", 500_000.0)}
    ropes = {"sliding_attention": plain, "full_attention": {**plain, **said.get("rope_scaling", {})}}
    return {"rope_parameters": ropes, **read_some_windows(file, keys, said)}


def read_ropes_of_layers(file: GgufFile, keys: Mapping[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """Layers with a sliding window have rotary positions of their own, which are not stretched."""
    ropes, head = _read_two_ropes(keys), keys.get("attention.key_length")
    if not head or (keys.get("attention.sliding_window") and "rope.freq_base_swa" not in keys):
        raise GgufError("the file does not say what the rotary positions of layers with a sliding window are")
    ropes["full_attention"] |= said.get("rope_scaling", {})
    for name, key in (("full", "rope.dimension_count"), ("sliding", "rope.dimension_count_swa")):
        if key in keys:
            ropes[f"{name}_attention"]["partial_rotary_factor"] = keys[key] / head
    return {"rope_parameters": ropes}


def read_gated_heads(file: GgufFile, keys: Mapping[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """Layers with heads of their own number, and gates of heads or of each number of them. Of four layers the first has
    no sliding window, unless the file says which: llama.cpp knows no others. No model caps the scores of its experts.
    """
    layers = said["num_hidden_layers"]
    heads = _for_each(keys.get("attention.head_count"), layers, "how many heads its layers have")
    gate = file.tensors.get("blk.0.attn_gate.weight")
    if gate is None:
        raise GgufError("the file has no gates of its attention")
    first = {"attention.sliding_window_pattern": [number % 4 != 0 for number in range(layers)]}
    return {
        "num_attention_heads_per_layer": heads,
        "layer_types": read_some_windows(file, {**first, **keys}, said)["layer_types"],
        "gating": True if gate.shape[0] == heads[0] else "per-element",
    }


def read_chunks(file: GgufFile, keys: Mapping[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """Of four layers three see a chunk of the text, and the fourth sees all of it, without rotary positions. Where the
    file says a window of 0 tokens, all layers see all of it, with them. How long chunks are, how queries grow, and that
    queries and keys are normalised except where there are 128 experts is the same for all models, and in llama.cpp.
    """
    whole = keys.get("attention.sliding_window") == 0
    step = keys.get("interleave_moe_layer_step", 1) if keys.get("expert_count") else 0
    turned = [int(whole or number % 4 != 0) for number in range(1, said["num_hidden_layers"] + 1)]
    return {
        "use_qk_norm": keys.get("expert_count") != 128,
        "no_rope_layers": turned,
        "layer_types": ["full_attention" if whole or not each else "chunked_attention" for each in turned],
        "moe_layers": list(range(step - 1, len(turned), step)) if step else [],
    }


def read_two_widths(file: GgufFile, keys: Mapping[str, Any], said: dict[str, Any]) -> dict[str, Any]:
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


def read_doubled_keys(file: GgufFile, keys: Mapping[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """Layers with a window have twice as many heads of keys and values as those without one, and rotary positions of
    their own, of which all turn the same part of a head. The window that files say is of the tokens before the one that
    looks back; transformers' model counts that too.
    """
    windowed, layers = _read_windows(keys, said), said["num_hidden_layers"]
    heads = _for_each(keys.get("attention.head_count_kv"), layers)
    few = heads[windowed.index(False)]
    if any(count != (2 * few if each else few) for count, each in zip(heads, windowed, strict=True)):
        raise GgufError("its layers with a window have not twice as many heads of keys as the others")
    if "attention.value_scale" not in keys or "attention.sliding_window" not in keys:
        raise GgufError(
            "the file does not say what its values are multiplied by, or how long its window is: put the model's "
            "config.json beside it"
        )
    part = {"partial_rotary_factor": said.get("partial_rotary_factor", 1.0)}
    return {
        "layer_types": _kinds(windowed),
        "num_key_value_heads": few,
        "sliding_window": keys["attention.sliding_window"] + 1,
        "rope_parameters": {kind: rope | part for kind, rope in _read_two_ropes(keys).items()},
    }


def read_local_windows(file: GgufFile, keys: Mapping[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """Windows of tokens on both sides, which all layers have but every which from the first on, and rotary positions of
    each kind of layers; no token ends a reply.
    """
    every, window = keys.get("attention.sliding_window_pattern", 3), keys.get("attention.sliding_window")
    if not isinstance(every, int) or every < 1 or not isinstance(window, int):
        raise GgufError("the file does not say which of its layers have a sliding window")
    return {
        "layer_types": _kinds([number % every != 0 for number in range(said["num_hidden_layers"])]),
        "sliding_window": window // 2,
        "rope_parameters": _read_two_ropes({"rope.freq_base": 160_000.0, **keys}),
        "hidden_activation": keys.get("hidden_activation", "gelu"),
        "norm_bias": "output_norm.bias" in file.tensors,
        "eos_token_id": None,
    }


def read_streams(file: GgufFile, keys: Mapping[str, Any], said: dict[str, Any]) -> dict[str, Any]:
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
    layers = said["num_hidden_layers"]
    if not isinstance(windowed, list) or len(windowed) < layers or all(windowed[:layers]):
        raise GgufError("the file does not say which of its layers have a sliding window")
    return [bool(each) for each in windowed[:layers]]


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


def _for_each(value: Any, layers: int, what: str = "how wide its layers are") -> list[Any]:
    """A number of each layer. Raises ``GgufError`` where there is none."""
    found = value[:layers] if isinstance(value, list) else [value] * layers
    if len(found) != layers or any(not isinstance(each, int) for each in found):
        raise GgufError(f"the file does not say {what}")
    return found


def _turned_part(file: GgufFile) -> float:
    """Which part of a head the rotary positions turn: that whose frequencies are divided by 1."""
    factors = file.tensors.get("rope_freqs.weight")
    return 0.25 if factors is None else float((values(factors) == 1).float().mean())
