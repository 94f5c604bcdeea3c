"""What a GGUF file has to say, and what it must not say in vain."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from scheduler.weights.gguf.header import GgufError

INDEXER = ("attention.indexer.head_count", "attention.indexer.key_length", "attention.indexer.top_k")
# Keys without which llama.cpp refuses a file of an architecture, where configurations would have others' numbers.
_NEEDED = {
    "bailingmoe3": ("kda.gate_lower_bound",),
    "hrm_text": ("hrm.layers_per_stack", "hrm.h_cycles", "hrm.l_cycles"),
    "hy_v4": (*INDEXER, "hyper_connection.count", "hyper_connection.epsilon", "hyper_connection.magnitude"),
    "minimax-m3": (*INDEXER, "attention.indexer.block_size"),
    "qwen4exp": (
        "hyper_connection.count",
        "hyper_connection.low_rank",
        "ple.ngram_size",
        "ple.heads_per_ngram",
        "ple.conv_kernel",
    ),
}


def check_needed(architecture: str, keys: Mapping[str, Any]) -> None:
    """Raise ``GgufError`` where a file does not say what models of its architecture differ in."""
    if any(key not in keys for key in _NEEDED.get(architecture, ())):
        raise GgufError("the file does not say all that models of its architecture differ in")


def check_windows(keys: Mapping[str, Any], said: Mapping[str, Any], config: Any) -> None:
    """Raise ``GgufError`` where a file has a sliding window that the model has not, or in other layers than it."""
    if not keys.get("attention.sliding_window"):
        return
    if not said.get("sliding_window"):
        raise GgufError("it has a sliding window, which transformers' model of its architecture has not")
    pattern, kinds = keys.get("attention.sliding_window_pattern"), getattr(config, "layer_types", None)
    if not isinstance(pattern, list) or not kinds or "sliding_attention" not in kinds:
        return
    if [bool(each) for each in pattern[: len(kinds)]] != [kind == "sliding_attention" for kind in kinds]:
        raise GgufError("it has a sliding window in other layers than transformers' model of its architecture")


def check_ropes(keys: Mapping[str, Any], config: Any) -> None:
    """Raise ``GgufError`` where a file's rotary positions are stretched and the model's are not, or those of its layers
    with a window have a base that none of the model has.
    """
    found = list(_ropes(getattr(config, "rope_parameters", None)))
    form, factor = keys.get("rope.scaling.type", "none"), keys.get("rope.scaling.factor", 1.0)
    stretched = form in ("linear", "yarn") and factor != 1
    if stretched and form not in [rope.get("rope_type") for rope in found]:
        raise GgufError("its rotary positions are stretched, which those of transformers' model are not")
    base = keys.get("rope.freq_base_swa")
    if base and found and all(abs(rope.get("rope_theta", 0) - base) > 1e-3 * base for rope in found):
        raise GgufError("layers with a sliding window have rotary positions of a base that its model has not")


def _ropes(said: Any) -> Iterator[Mapping[str, Any]]:
    """The rotary positions of a configuration, which may be of kinds of layers."""
    if isinstance(said, Mapping) and "rope_type" in said:
        yield said
    elif isinstance(said, Mapping):
        for part in said.values():
            yield from _ropes(part)
