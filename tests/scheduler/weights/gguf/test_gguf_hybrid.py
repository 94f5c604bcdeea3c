"""Hybrid models in GGUF files: which of their layers have attention, and what the others are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_kit import F32, Q8_0, Stored, store
from gguf_loaded import logits, quiet, read, refusal, rewritten, settings
from gguf_metadata import metadata_of
from gguf_models import written
from transformers import AutoModelForCausalLM

from scheduler.weights.gguf.file import GgufFile
from scheduler.weights.gguf.header import GgufError
from scheduler.weights.gguf.source import all_values

_MULTIPLIERS: dict[str, Any] = {
    "lm_head_multiplier": 0.3,
    "embedding_multiplier": 5.0,
    "mlp_multipliers": [0.7, 1.3],
    "key_multiplier": 0.4,
    "attention_in_multiplier": 1.1,
    "attention_out_multiplier": 0.9,
    "ssm_in_multiplier": 1.25,
    "ssm_out_multiplier": 0.23,
    "ssm_multipliers": [0.35, 0.25, 0.17, 0.5, 0.45],
}


def multiplied(path: Path, tied: bool) -> tuple[Path, Any]:
    """A file whose weights llama.cpp's converter has multiplied, and the model of the settings."""
    path, plain = written(path, "falcon-h1", F32)
    config = type(plain.config)(**{**plain.config.to_dict(), **_MULTIPLIERS, "tie_word_embeddings": tied})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    weights = plain.state_dict()
    model.load_state_dict(
        {**weights, "lm_head.weight": weights["model.embed_tokens.weight" if tied else "lm_head.weight"]}
    )
    parts = torch.tensor(config.ssm_multipliers).repeat_interleave(torch.tensor([128, 128, 32, 32, 8]))[:, None]
    factors: dict[str, Any] = {
        "attn_q": config.attention_in_multiplier,
        "attn_k": config.attention_in_multiplier * config.key_multiplier,
        "attn_v": config.attention_in_multiplier,
        "attn_output": config.attention_out_multiplier,
        "ffn_gate": config.mlp_multipliers[0],
        "ffn_down": config.mlp_multipliers[1],
        "ssm_in": parts * config.ssm_in_multiplier,
        "ssm_out": config.ssm_out_multiplier,
        "token_embd": config.embedding_multiplier,
        "output": config.lm_head_multiplier,
    }
    changed: dict[str, Stored | None] = {}
    for name, tensor in GgufFile(path).tensors.items():
        if (factor := factors.get(name.split(".")[-2])) is not None:
            changed[name] = store(all_values(tensor, torch.float32) * factor)
    if tied:
        changed["output.weight"] = None
    return rewritten(path, "falcon-h1", changed), model


@quiet
@pytest.mark.parametrize("tied", [False, True])
def test_weights_that_are_multiplied_are_not_multiplied_again(tied: bool, tmp_path: Path) -> None:
    path, want = multiplied(tmp_path / "x.gguf", tied)
    if tied:
        with pytest.raises(GgufError, match="not say what they are multiplied by: put the model's config"):
            read(path)
    else:
        torch.testing.assert_close(logits(read(path)), logits(want), rtol=1e-4, atol=1e-4)
    want.config.save_pretrained(tmp_path)
    torch.testing.assert_close(logits(read(path)), logits(want), rtol=1e-4, atol=1e-4)


def test_biases_that_are_multiplied(tmp_path: Path) -> None:
    path, want = written(tmp_path / "x.gguf", "falcon-h1", Q8_0)
    biased = rewritten(path, "falcon-h1", {"blk.0.attn_q.bias": store(torch.ones(128))})
    with pytest.raises(GgufError, match="its attention has biases"):
        settings(biased)
    want.config.attention_bias = True
    want.config.save_pretrained(tmp_path)
    assert settings(biased).attention_bias
    want.config.attention_in_multiplier = 1.1
    want.config.save_pretrained(tmp_path)
    with pytest.raises(GgufError, match="biases of its attention are multiplied"):
        settings(biased)


def test_layers_of_a_single_part_that_are_not_of_a_kind(tmp_path: Path) -> None:
    path, _ = written(tmp_path / "x.gguf", "nemotron_h_moe", Q8_0)
    both = rewritten(path, "nemotron_h_moe", {"blk.0.ffn_up.weight": store(torch.ones(32, 64))})
    with pytest.raises(GgufError, match="layer 0 of the file is not of a kind"):
        settings(both)
    for key, wrong, told in (
        ("ssm.inner_size", 100, "how wide its layers of Mamba 2 are"),
        ("expert_used_count", [2, 2, 2, 1], "differ in their experts"),
        ("expert_feed_forward_length", [32, 32, 32, 16], "differ in their experts"),
    ):
        assert told in refusal(path, "nemotron_h_moe", key, wrong)
    used, groups = "nemotron_h_moe.expert_group_used_count", "nemotron_h_moe.expert_group_count"
    grouped = rewritten(path, "nemotron_h_moe", {}, **{used: None, groups: 4})
    with pytest.raises(GgufError, match="how many groups of experts are used"):
        settings(grouped)


def test_a_last_layer_that_predicts_further_tokens_is_of_two_parts(tmp_path: Path) -> None:
    path, want = written(tmp_path / "x.gguf", "nemotron_h_moe", Q8_0)
    further: dict[str, Stored | None] = {
        f"blk.4.{name}.weight": store(torch.ones(64, 64)) for name in ("attn_q", "ffn_gate_inp")
    }
    more: dict[str, object] = {"nemotron_h_moe.block_count": 5, "nemotron_h_moe.nextn_predict_layers": 1}
    got = read(rewritten(path, "nemotron_h_moe", further, **more))
    torch.testing.assert_close(logits(got), logits(want), rtol=1e-4, atol=1e-4)


def test_layers_that_do_not_say_whether_they_have_attention(tmp_path: Path) -> None:
    path, _ = written(tmp_path / "x.gguf", "granitehybrid", Q8_0)
    for key, wrong, told in (
        ("attention.head_count_kv", 2, "which of its layers have attention"),
        ("attention.head_count_kv", [2], "which of its layers have attention"),
        ("ssm.inner_size", 0, "how wide its layers of Mamba 2 are"),
    ):
        assert told in refusal(path, "granitehybrid", key, wrong)


def test_layers_that_do_not_follow_each_other_at_one_distance(tmp_path: Path) -> None:
    path, _ = written(tmp_path / "x.gguf", "jamba", Q8_0)
    third = rewritten(path, "jamba", {"blk.4.attn_output.weight": store(torch.ones(64, 64))})
    with pytest.raises(GgufError, match="do not follow each other at one distance"):
        settings(third)
    other = rewritten(path, "jamba", {}, **{"jamba.ssm.inner_size": 100})
    with pytest.raises(GgufError, match="how wide its layers of Mamba are"):
        settings(other)


def test_experts_of_an_older_file_are_as_wide_as_their_tensors(tmp_path: Path) -> None:
    path, want = written(tmp_path / "x.gguf", "nemotron_h_moe", Q8_0)
    width = "nemotron_h_moe.expert_feed_forward_length"
    assert width in metadata_of("nemotron_h_moe")
    older = rewritten(path, "nemotron_h_moe", {}, **{width: None})
    assert settings(older).moe_intermediate_size == want.config.moe_intermediate_size


def test_states_that_are_no_whole_number_of_times_as_wide_as_the_model(tmp_path: Path) -> None:
    path, _ = written(tmp_path / "x.gguf", "mamba2", Q8_0)
    keys = metadata_of("mamba2")
    heads = keys["mamba2.ssm.time_step_rank"]
    damaged = rewritten(
        path, "mamba2", {}, **{"mamba2.ssm.inner_size": heads * (keys["mamba2.ssm.inner_size"] // heads + 1)}
    )
    with pytest.raises(GgufError, match="no whole number of times as wide"):
        settings(damaged)


def test_linear_attention_by_differences_that_is_not_told_of(tmp_path: Path) -> None:
    path, _ = written(tmp_path / "x.gguf", "kimi-linear", Q8_0)
    rates: dict[str, Stored | None] = {f"blk.{number}.ssm_beta.weight": None for number in (0, 2)}
    for damaged in (
        rewritten(path, "kimi-linear", rates),
        rewritten(path, "kimi-linear", {}, **{"kimi-linear.attention.head_count_kv": [0, 1]}),
        rewritten(path, "kimi-linear", {}, **{"kimi-linear.attention.head_count_kv": 1}),
        rewritten(path, "kimi-linear", {}, **{"kimi-linear.kda.head_dim": None}),
    ):
        with pytest.raises(GgufError, match="which of its layers have linear attention"):
            settings(damaged)


def test_bounds_of_experts_that_the_model_has_not(tmp_path: Path) -> None:
    path, _ = written(tmp_path / "x.gguf", "bailingmoe3", Q8_0)
    for key in ("swiglu_clamp_exp", "swiglu_clamp_shexp"):
        unbounded = rewritten(path, "bailingmoe3", {}, **{f"bailingmoe3.{key}": [0.0] * 3})
        assert settings(unbounded).kda_lower_bound == -3.0
        bounded = rewritten(path, "bailingmoe3", {}, **{f"bailingmoe3.{key}": [0.0, 7.0, 7.0]})
        with pytest.raises(GgufError, match="have bounds of what they multiply"):
            settings(bounded)


def test_numbers_that_hash_ngrams_are_those_of_the_file(tmp_path: Path) -> None:
    path, want = written(tmp_path / "x.gguf", "qwen4exp", Q8_0)
    module, theirs = (model.model.layers[0].ple.ple_embedding for model in (read(path), want))
    assert all(torch.equal(buffer, theirs.get_buffer(name)) for name, buffer in module.named_buffers())
    ended = rewritten(path, "qwen4exp", {}, **{"qwen4exp.ple.eos_token_id": 7})
    assert settings(ended).eos_token_id == [7, 258]  # its first
    with pytest.raises(GgufError, match="not those of the model"):
        read(rewritten(path, "qwen4exp", {}, **{"qwen4exp.ple.layer_multipliers": [1, 3]}))
    for key, wrong, told in (
        ("ple.layers", [0, 1], "hashes them"),
        ("ple.head_offsets", None, "hashes them"),
        ("ple.eos_token_id", None, "hashes them"),
        ("embedding_length_per_layer_input", None, "hashes them"),
        ("attention.compress_ratios", [0, 4, 8], "how long the blocks of keys are"),
        ("attention.indexer.top_k", None, "how long the blocks of keys are"),
    ):
        assert told in refusal(path, "qwen4exp", key, wrong)
    plain = rewritten(path, "qwen4exp", {}, **{"qwen4exp.ple.layers": None})
    assert settings(plain).ple_layer_ids == []
