"""Settings of single architectures in GGUF files, and files that do not say them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_kit import F32, Q8_0, Stored, store, write_file
from gguf_loaded import logits, quiet, read, rewritten, settings
from gguf_metadata import config_of, metadata_of
from gguf_models import written
from gguf_widths import LATENT, SHAPE
from transformers import (
    Glm4MoeLiteConfig,
    Glm4MoeLiteForCausalLM,
    YoutuConfig,
    YoutuForCausalLM,
)

from scheduler.weights.gguf_file import GgufFile
from scheduler.weights.gguf_header import GgufError
from scheduler.weights.gguf_model import stored_dtype
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
    for label in ("hy_v3", "laguna"):
        path, _ = written(tmp_path / "x.gguf", label, Q8_0)
        for key in ("expert_gating_func", "expert_weights_norm"):
            other = rewritten(path, label, {}, **{f"{label}.{key}": False})
            with pytest.raises(GgufError, match="no normalised sigmoids"):
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


@quiet
def test_models_that_are_stored_as_another(tmp_path: Path) -> None:
    """What is written as that model computes the same: with experts that are always sigmoids, and without experts."""
    path, want = written(tmp_path / "x.gguf", "deepseek2", F32)
    plain: dict[str, Any] = {
        f"deepseek2.rope.scaling.{key}": None
        for key in (
            "type",
            "factor",
            "original_context_length",
            "yarn_beta_fast",
            "yarn_beta_slow",
            "yarn_log_multiplier",
        )
    }
    said = want.config.to_dict() | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    lite = Glm4MoeLiteForCausalLM(Glm4MoeLiteConfig(**said)).eval()
    lite.load_state_dict(want.state_dict())
    got = read(rewritten(path, "deepseek2", {}, **plain, **{"deepseek2.expert_gating_func": None}))
    torch.testing.assert_close(logits(got), logits(lite), rtol=1e-4, atol=1e-4)
    dense = YoutuForCausalLM(YoutuConfig(**{**SHAPE, **LATENT, "num_hidden_layers": 1})).eval()
    dense.load_state_dict({name: weight for name, weight in want.state_dict().items() if name in dense.state_dict()})
    none: dict[str, Any] = {key: None for key in metadata_of("deepseek2") if key.startswith("deepseek2.expert_")}
    none |= {"deepseek2.block_count": 1, "deepseek2.expert_shared_count": 0}
    got = read(rewritten(path, "deepseek2", {}, **plain, **none))
    torch.testing.assert_close(logits(got), logits(dense), rtol=1e-4, atol=1e-4)


def test_latents_whose_files_say_little(tmp_path: Path) -> None:
    path, _ = written(tmp_path / "x.gguf", "minicpm3", F32)
    factors = {name: store(torch.arange(1.0, 9.0) + place) for place, name in enumerate(("long", "short"))}
    longer = rewritten(path, "minicpm3", {f"rope_factors_{name}.weight": each for name, each in factors.items()})
    rope = settings(longer).rope_parameters
    assert rope["original_max_position_embeddings"] == 256
    assert [rope[f"{name}_factor"][0] for name in ("long", "short")] == [1.0, 2.0]
    with pytest.raises(GgufError, match="how wide the parts of its keys and values are"):
        settings(rewritten(path, "minicpm3", {"blk.0.attn_output.weight": None}))
    path, _ = written(tmp_path / "x.gguf", "mistral4", F32)
    with pytest.raises(GgufError, match="how its rotary positions are stretched"):
        settings(rewritten(path, "mistral4", {}, **{"mistral4.rope.scaling.type": "none"}))
    with pytest.raises(GgufError, match="scores of its experts are not by softmax"):
        settings(rewritten(path, "mistral4", {}, **{"mistral4.expert_gating_func": 2}))


def test_which_layers_choose_the_keys_that_are_attended_to(tmp_path: Path) -> None:
    """Further layers, which predict tokens, may be told of too; older files say it of none."""
    path, want = written(tmp_path / "x.gguf", "glm-dsa", F32)

    def config(**said: object) -> Any:
        return settings(rewritten(path, "glm-dsa", {}, **{f"glm-dsa.{key}": value for key, value in said.items()}))

    types = "attention.indexer.types"
    further: dict[str, object] = {"block_count": 5, "nextn_predict_layers": 1, types: [True, True, False, True, True]}
    assert config(**further).indexer_types == want.config.indexer_types
    assert config(**{types: None}).indexer_types == ["full"] * 4
    for wrong in ({types: None, "context_length": 1 << 20}, {types: [True]}, {types: [False, True, True, True]}):
        with pytest.raises(GgufError, match="which of its layers choose the keys"):
            config(**wrong)
    with pytest.raises(GgufError, match="how the keys that are attended to are chosen"):
        config(**{"attention.indexer.top_k": None})
    with pytest.raises(GgufError, match="queries are not made of latents"):
        config(**{"attention.q_lora_rank": None})
    with pytest.raises(GgufError, match="normalised"):
        config(expert_gating_func=1)


def test_latents_of_layers_with_a_window(tmp_path: Path) -> None:
    path, want = written(tmp_path / "x.gguf", "dots3note", F32)
    got, config = settings(path).per_layer_config, want.config.per_layer_config
    for name in ("num_attention_heads", "kv_lora_rank", "head_dim", "qk_nope_head_dim", "v_head_dim"):
        assert [getattr(got[number], name) for number in range(3)] == [
            getattr(config[number], name) for number in range(3)
        ]
    norm = "model.layers.1.self_attn.kv_a_layernorm.weight"
    rounded = want.state_dict()[norm].bfloat16()
    assert torch.equal(read(path, torch.bfloat16).state_dict()[norm], rounded)
    for key, wrong, told in (
        ("attention.sliding_window_pattern", [True] * 3, "how wide the parts"),
        ("attention.sliding_window_pattern", 3, "of each layer whether it has a sliding window"),
        ("attention.head_count", 4, "of each layer whether it has a sliding window"),
        ("attention.kv_lora_rank_swa", None, "how wide the parts"),
        ("rope.scaling.type", "yarn", "positions are stretched, which those of transformers' model are not"),
    ):
        with pytest.raises(GgufError, match=told):
            settings(rewritten(path, "dots3note", {}, **{f"dots3note.{key}": wrong}))


def test_layers_that_attend_to_what_is_compressed(tmp_path: Path) -> None:
    path, want = written(tmp_path / "x.gguf", "deepseek4", F32)

    def config(**said: object) -> Any:
        return settings(rewritten(path, "deepseek4", {}, **{f"deepseek4.{key}": value for key, value in said.items()}))

    further: dict[str, object] = {
        "block_count": 5,
        "nextn_predict_layers": 1,
        "attention.compress_ratios": [0, 4, 8, 4, 0],
    }
    assert config(**further).layer_types == want.config.layer_types
    plain = config(**{"rope.scaling.type": "none", "attention.compress_ratios": [0, 4, 0, 4]})
    assert plain.rope_parameters["compress"]["rope_type"] == "default"
    assert plain.compress_rates == {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
    assert stored_dtype(GgufFile(path)) is torch.float32
    for wrong, told in (
        ({"attention.compress_ratios": [0, 4, 8]}, "how the attention of its layers is compressed"),
        ({"hyper_connection.count": None}, "how the attention of its layers is compressed"),
        ({"attention.compress_ratios": [0, 4, 8, 2]}, "do not compress equally much"),
        ({"expert_gating_func": 2}, "not normalised roots"),
        ({"expert_weights_norm": False}, "not normalised roots"),
        ({"swiglu_clamp_shexp": [0.5] * 4}, "one bound of what its experts multiply"),
    ):
        with pytest.raises(GgufError, match=told):
            config(**wrong)


@quiet
def test_how_experts_are_chosen_for_pictures_is_left(tmp_path: Path) -> None:
    path, want = written(tmp_path / "x.gguf", "deepseek4", F32)
    got = read(rewritten(path, "deepseek4", {"blk.1.exp_probs_b_vl.bias": store(torch.ones(8))}))
    torch.testing.assert_close(logits(got), logits(want), rtol=1e-4, atol=1e-4)


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


def test_layers_that_see_chunks_of_the_text(tmp_path: Path) -> None:
    path, want = written(tmp_path / "x.gguf", "llama4", Q8_0)
    many = settings(rewritten(path, "llama4", {}, **{"llama4.expert_count": 128}))
    assert settings(path).use_qk_norm
    assert not many.use_qk_norm
    assert many.layer_types == want.config.layer_types == [*["chunked_attention"] * 3, "full_attention"]
    whole = settings(rewritten(path, "llama4", {}, **{"llama4.attention.sliding_window": 0}))
    assert (whole.layer_types, whole.no_rope_layers) == (["full_attention"] * 4, [1] * 4)
    assert whole.moe_layers == want.config.moe_layers == [1, 3]


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


def test_scores_of_experts_and_windows_that_are_not_said(tmp_path: Path) -> None:
    path, _ = written(tmp_path / "x.gguf", "cohere2moe", Q8_0)
    for key, told in (
        ("expert_gating_func", "what the scores of its experts are"),
        ("attention.sliding_window_pattern", "which of its layers have a sliding window"),
    ):
        other = rewritten(path, "cohere2moe", {}, **{f"cohere2moe.{key}": None})
        with pytest.raises(GgufError, match=told):
            settings(other)
    whole = rewritten(path, "cohere2moe", {}, **{"cohere2moe.attention.sliding_window": None})
    assert settings(whole).layer_types == ["full_attention"] * 5


def test_experts_of_all_tokens_that_are_no_whole_number(tmp_path: Path) -> None:
    """A last layer is for predicting further tokens."""
    path, _ = written(tmp_path / "x.gguf", "hy_v3", Q8_0)
    key = "hy_v3.expert_shared_feed_forward_length"
    for wrong in (None, 40):
        other = rewritten(path, "hy_v3", {}, **{key: wrong})
        with pytest.raises(GgufError, match="how many experts all tokens have"):
            settings(other)
    further = settings(rewritten(path, "hy_v3", {}, **{"hy_v3.block_count": 4, "hy_v3.nextn_predict_layers": 1}))
    assert (further.num_hidden_layers, further.mlp_layer_types) == (3, ["dense", "sparse", "sparse"])


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
    with pytest.raises(GgufError, match="its attention depends on distances"):
        settings(rewritten(path, "baichuan", {}, **{"baichuan.block_count": 40}))
    for label in ("baichuan", "xverse"):
        path, _ = written(tmp_path / "x.gguf", label, Q8_0)
        grouped = rewritten(path, label, {}, **{f"{label}.attention.head_count_kv": 2})
        with pytest.raises(GgufError, match="the rows of its keys"):
            settings(grouped)


def test_layers_that_choose_what_they_attend_to(tmp_path: Path) -> None:
    path, want = written(tmp_path / "x.gguf", "hy_v4", Q8_0)
    types, limit = "attention.indexer.types", "swiglu_clamp_exp"
    for key, wrong, told in (
        (types, None, "which of its layers choose"),
        (types, [True] * 3, "which of its layers choose"),
        (types, [False, True, True, True], "which of its layers choose"),
        (limit, [1.0, 2.0, 2.0, 2.0], "differ in how large numbers"),
        (limit, 1.0, "differ in how large numbers"),
    ):
        other = rewritten(path, "hy_v4", {}, **{f"hy_v4.{key}": wrong})
        with pytest.raises(GgufError, match=told):
            settings(other)
    unlimited, large = (
        logits(read(rewritten(path, "hy_v4", {}, **{f"hy_v4.{limit}": given}))) for given in (None, [1000.0] * 4)
    )
    assert torch.equal(unlimited, large)
    assert not torch.equal(unlimited, logits(want))


def test_few_keys_are_chosen(tmp_path: Path) -> None:
    """In float32 there is one order of them."""
    path, want = written(tmp_path / "x.gguf", "hy_v4", Q8_0)
    got = read(rewritten(path, "hy_v4", {}, **{"hy_v4.attention.indexer.top_k": 4}))
    config = type(want.config)(**(want.config.to_dict() | {"index_topk": 4}))
    few = type(want)(config).eval()
    few.load_state_dict(want.state_dict())
    torch.testing.assert_close(logits(got), logits(few), rtol=1e-4, atol=1e-4)
    assert (logits(few) - logits(want)).abs().max() > 1e-2


def test_rotary_positions_of_layers_with_a_window(tmp_path: Path) -> None:
    path, _ = written(tmp_path / "x.gguf", "mellum", Q8_0)
    for key in ("rope.freq_base_swa", "attention.key_length"):
        other = rewritten(path, "mellum", {}, **{f"mellum.{key}": None})
        with pytest.raises(GgufError, match="what the rotary positions of layers with a sliding window are"):
            settings(other)
    whole = rewritten(path, "mellum", {}, **{"mellum.attention.sliding_window": None})
    assert settings(whole).layer_types == ["full_attention"] * 5
