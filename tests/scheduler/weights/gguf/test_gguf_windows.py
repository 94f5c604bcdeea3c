"""Layers that differ in a sliding window, in GGUF files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gguf_kit import Q8_0
from gguf_loaded import refusal, rewritten, settings
from gguf_models import written

from scheduler.weights.gguf.header import GgufError


def test_layers_that_do_not_say_how_sparse_they_are(tmp_path: Path) -> None:
    path, _ = written(tmp_path / "x.gguf", "gemma3n", Q8_0)
    for damaged in (
        rewritten(path, "gemma3n", {}, **{"gemma3n.activation_sparsity_scale": [0.5]}),
        rewritten(path, "gemma3n", {"blk.0.laurel_l.weight": None}),
    ):
        with pytest.raises(GgufError, match="how sparse its layers are"):
            settings(damaged)


def test_layers_of_two_widths(tmp_path: Path) -> None:
    path, want = written(tmp_path / "x.gguf", "gemma4", Q8_0)
    uniform = rewritten(path, "gemma4", {"rope_freqs.weight": None}, **{"gemma4.rope.freq_base": 1000.0})
    ropes = settings(uniform).rope_parameters
    assert ropes["full_attention"] == {**want.config.rope_parameters["full_attention"], "rope_theta": 1000.0}
    for key, wrong in (
        ("attention.sliding_window_pattern", [True] * 6),
        ("attention.sliding_window_pattern", [False] * 5),
        ("attention.sliding_window_pattern", 6),
        ("feed_forward_length", [96] * 5),
        ("attention.head_count_kv", ["two"] * 6),
    ):
        damaged = rewritten(path, "gemma4", {}, **{f"gemma4.{key}": wrong})
        with pytest.raises(GgufError, match="the file does not say"):
            settings(damaged)


def test_which_layers_have_a_window(tmp_path: Path) -> None:
    """Of each, or every which has none; further layers, which predict tokens, may be told of too."""
    path, want = written(tmp_path / "x.gguf", "exaone4 windows", Q8_0)
    key, count = "exaone4.attention.sliding_window_pattern", want.config.num_hidden_layers

    def kinds(pattern: Any) -> list[str]:
        file = rewritten(path, "exaone4 windows", {}, **{key: pattern})
        return [kind.partition("_")[0] for kind in settings(file).layer_types]

    turns = [number % 2 == 0 for number in range(count)]
    assert kinds([*turns, True]) == kinds(turns) == kinds(2) == ["sliding" if each else "full" for each in turns]
    with pytest.raises(GgufError, match="of each layer whether it has a sliding window"):
        kinds(turns[1:])


def test_layers_with_a_window_that_have_twice_as_many_heads_of_keys(tmp_path: Path) -> None:
    path, _ = written(tmp_path / "x.gguf", "mimo2", Q8_0)
    for key, wrong, told in (
        ("attention.head_count_kv", [2] * 7, "not twice as many heads of keys"),
        ("attention.head_count_kv", [2, 4], "how wide its layers are"),
        ("attention.sliding_window_pattern", [1] * 7, "which of its layers have a sliding window"),
        ("attention.value_scale", None, "what its values are multiplied by"),
        ("attention.sliding_window", None, "how long its window is"),
    ):
        assert told in refusal(path, "mimo2", key, wrong)


def test_layers_that_see_chunks_of_the_text(tmp_path: Path) -> None:
    path, want = written(tmp_path / "x.gguf", "llama4", Q8_0)
    many = settings(rewritten(path, "llama4", {}, **{"llama4.expert_count": 128}))
    assert settings(path).use_qk_norm
    assert not many.use_qk_norm
    assert many.layer_types == want.config.layer_types == [*["chunked_attention"] * 3, "full_attention"]
    whole = settings(rewritten(path, "llama4", {}, **{"llama4.attention.sliding_window": 0}))
    assert (whole.layer_types, whole.no_rope_layers) == (["full_attention"] * 4, [1] * 4)
    assert whole.moe_layers == want.config.moe_layers == [1, 3]


def test_layers_with_gated_heads_of_their_own_number(tmp_path: Path) -> None:
    path, want = written(tmp_path / "x.gguf", "laguna", Q8_0)
    turns = [number % 2 == 0 for number in range(5)]
    other = rewritten(path, "laguna", {}, **{"laguna.attention.sliding_window_pattern": turns})
    assert settings(path).layer_types == want.config.layer_types
    assert [kind == "sliding_attention" for kind in settings(other).layer_types] == turns
    even = rewritten(path, "laguna", {}, **{"laguna.attention.head_count": 6})
    assert settings(even).num_attention_heads_per_layer == [6] * 5
    ungated = rewritten(path, "laguna", {"blk.0.attn_gate.weight": None})
    with pytest.raises(GgufError, match="no gates of its attention"):
        settings(ungated)
    short = rewritten(path, "laguna", {}, **{"laguna.attention.head_count": [6] * 4})
    with pytest.raises(GgufError, match="how many heads its layers have"):
        settings(short)


def test_which_layers_have_rotary_positions(tmp_path: Path) -> None:
    path, _ = written(tmp_path / "x.gguf", "granite_swa", Q8_0)
    for wrong in (None, [True] * 4, True):
        other = rewritten(path, "granite_swa", {}, **{"granite_swa.attention.rope_pattern": wrong})
        with pytest.raises(GgufError, match="which of its layers have rotary positions"):
            settings(other)


def test_rotary_positions_of_layers_with_a_window(tmp_path: Path) -> None:
    path, _ = written(tmp_path / "x.gguf", "mellum", Q8_0)
    for key in ("rope.freq_base_swa", "attention.key_length"):
        other = rewritten(path, "mellum", {}, **{f"mellum.{key}": None})
        with pytest.raises(GgufError, match="what the rotary positions of layers with a sliding window are"):
            settings(other)
    whole = rewritten(path, "mellum", {}, **{"mellum.attention.sliding_window": None})
    assert settings(whole).layer_types == ["full_attention"] * 5
