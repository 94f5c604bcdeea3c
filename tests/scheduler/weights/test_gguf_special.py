"""Settings of single architectures in GGUF files, and files that do not say them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_kit import F32, Q8_0, store, write_file
from gguf_loaded import read, rewritten, settings
from gguf_metadata import config_of, metadata_of
from gguf_models import written

from scheduler.weights.gguf_file import GgufFile
from scheduler.weights.gguf_header import GgufError
from scheduler.weights.gguf_source import all_values


def test_queries_that_grow_with_positions_that_are_not_stretched(tmp_path: Path) -> None:
    path, _ = written(tmp_path / "x.gguf", "mistral3", Q8_0)
    damaged = rewritten(path, "mistral3", {}, **{"mistral3.rope.scaling.type": "none"})
    with pytest.raises(GgufError, match="how its rotary positions are stretched"):
        settings(damaged)


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
        damaged = rewritten(path, "mimo2", {}, **{f"mimo2.{key}": wrong})
        with pytest.raises(GgufError, match=told):
            settings(damaged)


def test_layers_that_choose_blocks_of_keys(tmp_path: Path) -> None:
    path, _ = written(tmp_path / "x.gguf", "minimax-m3", Q8_0)
    for key, wrong, told in (
        ("expert_gating_func", 1, "no normalised sigmoids"),
        ("expert_weights_norm", None, "no normalised sigmoids"),
        ("expert_shared_count", None, "how wide its layers are"),
        ("feed_forward_length", None, "how wide its layers are"),
        ("rope.dimension_count", None, "which part of a head positions turn"),
    ):
        damaged = rewritten(path, "minimax-m3", {}, **{f"minimax-m3.{key}": wrong})
        with pytest.raises(GgufError, match=told):
            settings(damaged)


def test_numbers_of_activations_are_weights(tmp_path: Path) -> None:
    path, want = written(tmp_path / "x.gguf", "apertus", Q8_0)
    file = GgufFile(path)
    said = dict(file.metadata)
    tensors = {
        each.name: store(all_values(each, torch.float32)) for each in file.tensors.values() if "xielu" not in each.name
    }
    got = read(path)
    for mine, theirs in zip(got.model.layers, want.model.layers, strict=True):
        assert all(
            torch.equal(x, y)
            for x, y in zip(mine.mlp.act_fn.state_dict().values(), theirs.mlp.act_fn.state_dict().values(), strict=True)
        )
    other = {**said, "xielu.beta": [0.25, 0.75]}
    changed = read(write_file(tmp_path / "y.gguf", other, tensors))
    assert [float(layer.mlp.act_fn.beta) for layer in changed.model.layers] == [0.25, 0.75]
    for wrong, told in (
        ([0.5], "does not have the numbers of the activation"),
        (["a", "b"], "is not a list of numbers"),
    ):
        path = write_file(tmp_path / "z.gguf", {**said, "xielu.beta": wrong}, tensors)
        with pytest.raises(GgufError, match=told):
            read(path)


def test_scores_of_experts_that_the_model_cannot_have(tmp_path: Path) -> None:
    path, _ = written(tmp_path / "x.gguf", "dots1", Q8_0)
    by_softmax = rewritten(path, "dots1", {}, **{"dots1.expert_gating_func": 1})
    with pytest.raises(GgufError, match="scores of its experts are no sigmoids"):
        settings(by_softmax)
    path, _ = written(tmp_path / "x.gguf", "afmoe", Q8_0)
    for key, wrong, told in (
        ("expert_gating_func", 1, "no normalised sigmoids"),
        ("expert_weights_norm", False, "no normalised sigmoids"),
        ("attention.sliding_window", 0, "which of its layers have a sliding window"),
    ):
        other = rewritten(path, "afmoe", {}, **{f"afmoe.{key}": wrong})
        with pytest.raises(GgufError, match=told):
            settings(other)


def test_groups_of_experts_are_configured_by_the_metadata(tmp_path: Path) -> None:
    """A last layer is for predicting further tokens."""
    path, _ = written(tmp_path / "x.gguf", "glm4moe", F32)
    further: dict[str, object] = {"glm4moe.block_count": 4, "glm4moe.nextn_predict_layers": 1}
    path = rewritten(path, "glm4moe", {}, **further)
    want, got = config_of("glm4moe").to_dict(), settings(path).to_dict()
    assert got.pop("rms_norm_eps") == pytest.approx(want.pop("rms_norm_eps"))
    assert got == want


def test_attention_to_latents_is_configured_by_the_metadata(tmp_path: Path) -> None:
    for label in ("deepseek2", "deepseek2 softmax"):
        path, _ = written(tmp_path / "x.gguf", label, F32)
        config = settings(path)
        want, got = config_of(label).to_dict(), config.to_dict()
        assert got.pop("rms_norm_eps") == pytest.approx(want.pop("rms_norm_eps"))
        assert got == want
    path, _ = written(tmp_path / "x.gguf", "deepseek2", F32)
    metadata = metadata_of("deepseek2")
    tensors = {"token_embd.weight": store(torch.ones(288, 64)), "blk.1.exp_probs_b.bias": store(torch.ones(8))}

    def config_without(*keys: str, **more: object) -> Any:
        said = {key: value for key, value in metadata.items() if key.removeprefix("deepseek2.") not in keys}
        said |= {f"deepseek2.{key}": value for key, value in more.items()}
        other = write_file(tmp_path / "y.gguf", said, tensors)
        return settings(other)

    assert config_without("expert_gating_func").model_type == "deepseek_v3"
    assert config_without("expert_gating_func", "expert_count", "expert_group_count").model_type == "deepseek_v3"
    with pytest.raises(GgufError, match="in how many groups its experts are"):
        config_without("expert_group_count")
    with pytest.raises(GgufError, match="how wide the parts of its keys and values are"):
        config_without("attention.kv_lora_rank")
    with pytest.raises(GgufError, match="normalised"):
        config_without(expert_gating_func=1)
    assert config_without("expert_weights_norm", expert_gating_func=1, expert_group_count=1).topk_method == "greedy"


def test_scales_that_older_files_of_minicpm_do_not_say(tmp_path: Path) -> None:
    path, _ = written(tmp_path / "x.gguf", "minicpm", Q8_0)
    tensors = {each.name: store(all_values(each, torch.float32)) for each in GgufFile(path).tensors.values()}
    said = {key: value for key, value in metadata_of("minicpm").items() if not key.endswith("_scale")}
    older = write_file(tmp_path / "y.gguf", said, tensors)
    config = settings(older)
    assert (config.embedding_multiplier, config.logits_scaling) == (12.0, 0.25)
    assert config.residual_multiplier == pytest.approx(1.4 / 2**0.5)
    routed = rewritten(path, "minicpm", {}, **{"minicpm.expert_count": 4})
    with pytest.raises(GgufError, match="no model of its architecture with experts"):
        settings(routed)


def test_what_is_added_in_norms_by_its_other_name(tmp_path: Path) -> None:
    path, _ = written(tmp_path / "x.gguf", "exaone", Q8_0)
    tensors = {each.name: store(all_values(each, torch.float32)) for each in GgufFile(path).tensors.values()}
    said = {key: value for key, value in metadata_of("exaone").items() if "epsilon" not in key}
    other = write_file(tmp_path / "y.gguf", {**said, "exaone.attention.layer_norm_epsilon": 0.5}, tensors)
    assert settings(other).rms_norm_eps == 0.5
