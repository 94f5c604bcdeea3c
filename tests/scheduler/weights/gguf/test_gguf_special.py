"""Settings of single architectures in GGUF files, and files that do not say them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_kit import F32, Q8_0, Stored, store, write_file
from gguf_loaded import logits, quiet, read, refusal, rewritten, settings
from gguf_metadata import metadata_of
from gguf_models import written

from scheduler.weights.gguf.file import GgufFile
from scheduler.weights.gguf.header import GgufError
from scheduler.weights.gguf.source import all_values


def test_queries_that_grow_with_positions_that_are_not_stretched(tmp_path: Path) -> None:
    path, _ = written(tmp_path / "x.gguf", "mistral3", Q8_0)
    damaged = rewritten(path, "mistral3", {}, **{"mistral3.rope.scaling.type": "none"})
    with pytest.raises(GgufError, match="how its rotary positions are stretched"):
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


@quiet
def test_rotary_positions_of_long_contexts_that_are_multiplied(tmp_path: Path) -> None:
    path, want = written(tmp_path / "x.gguf", "phimoe", Q8_0)
    assert settings(path).rope_parameters == {"rope_type": "default", "rope_theta": 1_000_000.0}
    factors = {
        f"rope_factors_{name}.weight": store(torch.full((8,), by)) for name, by in (("short", 1.5), ("long", 3.0))
    }
    said = {"rope.scaling.original_context_length": 32, "rope.scaling.attn_factor": 1.25}
    got = read(rewritten(path, "phimoe", {**factors}, **{f"phimoe.{key}": value for key, value in said.items()}))
    config = want.config.to_dict() | {"original_max_position_embeddings": 32}
    config["rope_parameters"] = {
        "rope_type": "longrope",
        "rope_theta": 1_000_000.0,
        "original_max_position_embeddings": 32,
        "short_factor": [1.5] * 8,
        "long_factor": [3.0] * 8,
        "short_mscale": 1.243163121016122,
        "long_mscale": 1.243163121016122,
    }
    longer = type(want)(type(want.config)(**config)).eval()
    longer.load_state_dict(want.state_dict())
    torch.testing.assert_close(logits(got), logits(longer), rtol=1e-4, atol=1e-4)
    assert (logits(got) - logits(want)).abs().max() > 1e-2
    without = rewritten(path, "phimoe", {"output.bias": None})
    assert settings(path).lm_head_bias
    assert not settings(without).lm_head_bias


def test_the_activation_of_a_model_of_20_billion_weights_is_rougher(tmp_path: Path) -> None:
    path, _ = written(tmp_path / "x.gguf", "gptneox", Q8_0)
    large = {"gptneox.block_count": 44, "gptneox.embedding_length": 6144}
    assert settings(path).hidden_act == "gelu"
    assert settings(rewritten(path, "gptneox", {}, **large)).hidden_act == "gelu_fast"


def test_attention_that_does_not_depend_on_distances(tmp_path: Path) -> None:
    path, _ = written(tmp_path / "x.gguf", "mpt", Q8_0)
    assert settings(rewritten(path, "mpt", {}, **{"mpt.attention.clamp_kqv": None})).attn_config.clip_qkv is None
    for slopes in (None, 0.0):
        other = rewritten(path, "mpt", {}, **{"mpt.attention.max_alibi_bias": slopes})
        with pytest.raises(GgufError, match="its attention does not depend on distances"):
            settings(other)


def test_activations_of_ternary_models_that_the_file_does_not_say(tmp_path: Path) -> None:
    path, _ = written(tmp_path / "x.gguf", "bitnet", Q8_0)
    assert settings(rewritten(path, "bitnet", {}, **{"bitnet.rope.freq_base": None})).hidden_act == "silu"
    other = rewritten(path, "bitnet", {}, **{"bitnet.rope.freq_base": 500000.0})
    with pytest.raises(GgufError, match="which activation its layers have"):
        settings(other)


def test_rotary_positions_are_not_always_stretched(tmp_path: Path) -> None:
    path, want = written(tmp_path / "x.gguf", "hunyuan_vl", Q8_0)
    assert settings(path).rope_parameters["rope_theta"] == pytest.approx(want.config.rope_parameters["rope_theta"])
    plain = settings(rewritten(path, "hunyuan_vl", {}, **{"hunyuan_vl.rope.scaling.alpha": None}))
    assert plain.rope_parameters == {"rope_type": "default", "rope_theta": 10000.0}
    twice = {"hunyuan_vl.rope.scaling.type": "linear", "hunyuan_vl.rope.scaling.factor": 2.0}
    assert settings(rewritten(path, "hunyuan_vl", {}, **twice)).rope_parameters["rope_type"] == "linear"
    once = {**twice, "hunyuan_vl.rope.scaling.factor": 1.0}
    assert settings(rewritten(path, "hunyuan_vl", {}, **once)).rope_parameters["rope_type"] == "default"


def test_rows_are_in_halves_where_positions_have_several_numbers(tmp_path: Path) -> None:
    path, _ = written(tmp_path / "x.gguf", "glm4", F32)
    sections = {"glm4.rope.dimension_sections": [2, 1, 1, 0]}
    change: dict[str, Stored | None] = {}
    for name, tensor in GgufFile(path).tensors.items():
        if "attn_q." in name or "attn_k." in name:
            heads = all_values(tensor, torch.float32).view(-1, 16, *tensor.shape[1:])
            change[name] = store(torch.cat([heads[:, :8:2], heads[:, 1:8:2], heads[:, 8:]], 1).flatten(0, 1))
    assert torch.equal(logits(read(rewritten(path, "glm4", change, **sections))), logits(read(path)))
    damaged = rewritten(path, "glm4", change, **sections, **{"glm4.rope.dimension_count": 7})
    with pytest.raises(GgufError, match="are not pairs of rows"):
        read(damaged)


def test_a_layer_that_predicts_further_tokens_is_none_of_the_model(tmp_path: Path) -> None:
    path, want = written(tmp_path / "x.gguf", "glm4", F32)
    further = {"glm4.block_count": 3, "glm4.nextn_predict_layers": 1}
    got = read(rewritten(path, "glm4", {"blk.2.attn_norm.weight": store(torch.ones(64))}, **further))
    assert torch.equal(logits(got), logits(want))


def test_models_whose_files_do_not_tell_them_from_larger_ones(tmp_path: Path) -> None:
    path, _ = written(tmp_path / "x.gguf", "baichuan", Q8_0)
    assert "its attention depends on distances" in refusal(path, "baichuan", "block_count", 40)
    for label in ("baichuan", "xverse"):
        path, _ = written(tmp_path / "x.gguf", label, Q8_0)
        grouped = rewritten(path, label, {}, **{f"{label}.attention.head_count_kv": 2})
        with pytest.raises(GgufError, match="the rows of its keys"):
            settings(grouped)


def test_what_is_said_in_vain_is_refused(tmp_path: Path) -> None:
    path, _ = written(tmp_path / "x.gguf", "orion", Q8_0)
    for kind in ("linear", "yarn"):
        stretched = {"orion.rope.scaling.type": kind, "orion.rope.scaling.factor": 8.0}
        with pytest.raises(GgufError, match="stretched, which those of transformers' model are not"):
            settings(rewritten(path, "orion", {}, **stretched))
    assert "in a way that is not known" in refusal(path, "orion", "rope.scaling.type", "otherwise")
    path, _ = written(tmp_path / "x.gguf", "gemma3", Q8_0)
    for key, wrong, told in (
        ("rope.freq_base_swa", 123.0, "of a base that its model has not"),
        ("attention.sliding_window_pattern", [False] * 7, "in other layers than"),
    ):
        assert told in refusal(path, "gemma3", key, wrong)
    with pytest.raises(GgufError, match="factors of the rotary positions, which"):
        read(rewritten(path, "gemma3", {"rope_freqs.weight": store(torch.ones(8))}))


def test_positions_of_three_numbers_may_be_stretched(tmp_path: Path) -> None:
    path, _ = written(tmp_path / "x.gguf", "qwen35", Q8_0)
    stretched = {"qwen35.rope.scaling.type": "linear", "qwen35.rope.scaling.factor": 8.0}
    found = settings(rewritten(path, "qwen35", {}, **stretched)).rope_parameters
    assert (found["rope_type"], found["factor"], found["mrope_section"]) == ("linear", 8.0, [2, 1, 1])


@pytest.mark.parametrize(
    ("label", "key"),
    [("hy_v4", "hyper_connection.magnitude"), ("minimax-m3", "attention.indexer.top_k")],
)
def test_what_models_differ_in_has_to_be_said(label: str, key: str, tmp_path: Path) -> None:
    path, _ = written(tmp_path / "x.gguf", label, Q8_0)
    assert "does not say all that models" in refusal(path, label, key, None)


def test_how_much_experts_weigh_is_1_if_it_is_not_said(tmp_path: Path) -> None:
    path, _ = written(tmp_path / "x.gguf", "hy_v3", Q8_0)
    assert settings(rewritten(path, "hy_v3", {}, **{"hy_v3.expert_weights_scale": None})).router_scaling_factor == 1


@quiet
@pytest.mark.parametrize(
    ("label", "key", "wrong"),
    [
        ("llama", "block_count", 0),
        ("llama", "block_count", "two"),
        ("llama", "attention.head_count", 0),
        ("llama", "attention.head_count", "secret" * 1000),
        ("qwen2", "rope.freq_base", [1.0]),
        ("mpt", "attention.clamp_kqv", "secret" * 1000),
        ("laguna", "attention.head_count", [4, "six", 6, 6, 4]),
        ("glm4", "rope.dimension_sections", 3),
        ("exaone4", "attention.sliding_window_pattern", 0),
        ("llama experts", "expert_count", "many"),
    ],
)
def test_metadata_of_wrong_types(label: str, key: str, wrong: Any, tmp_path: Path) -> None:
    path, _ = written(tmp_path / "x.gguf", label, Q8_0)
    architecture = label.partition(" ")[0]
    with pytest.raises(GgufError) as told:
        read(rewritten(path, label, {}, **{f"{architecture}.{key}": wrong}))
    assert len(str(told.value)) < 200
    assert "secret" not in str(told.value)


@pytest.mark.parametrize(("label", "other"), [("mimo2", 1), ("mellum", 2)])
def test_scores_that_the_model_has_not(label: str, other: int, tmp_path: Path) -> None:
    path, _ = written(tmp_path / "x.gguf", label, Q8_0)
    assert "the scores of its experts are not the" in refusal(path, label, "expert_gating_func", other)


def test_bases_of_rotary_positions_that_files_need_not_say(tmp_path: Path) -> None:
    path, _ = written(tmp_path / "x.gguf", "orion", Q8_0)
    assert (
        settings(rewritten(path, "orion", {}, **{"orion.rope.freq_base": 500.0})).rope_parameters["rope_theta"] == 500
    )
    path, _ = written(tmp_path / "x.gguf", "gptneox", Q8_0)
    assert "rotary positions have another base" in refusal(path, "gptneox", "rope.freq_base", 500.0)


def test_models_that_look_both_ways_say_how_they_pool(tmp_path: Path) -> None:
    path, _ = written(tmp_path / "x.gguf", "qwen3", Q8_0)
    assert "both ways, and the file does not say how it pools" in refusal(path, "qwen3", "attention.causal", False)
    with pytest.raises(GgufError, match="no place for 1 tensors of the file, 'dense_2"):
        read(rewritten(path, "qwen3", {"dense_2.weight": store(torch.ones(64, 64))}))
