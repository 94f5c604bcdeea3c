"""Attention to latents and to chosen keys in GGUF files, and files that do not say how."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_kit import F32, Q8_0, Stored, store, write_file
from gguf_loaded import logits, quiet, read, refusal, rewritten, settings
from gguf_metadata import config_of, metadata_of
from gguf_models import written
from gguf_widths import LATENT, SHAPE
from transformers import (
    Glm4MoeLiteConfig,
    Glm4MoeLiteForCausalLM,
    YoutuConfig,
    YoutuForCausalLM,
)

from scheduler.weights.gguf.file import GgufFile
from scheduler.weights.gguf.header import GgufError
from scheduler.weights.gguf.model import stored_dtype


def test_layers_that_choose_blocks_of_keys(tmp_path: Path) -> None:
    path, _ = written(tmp_path / "x.gguf", "minimax-m3", Q8_0)
    for key, wrong, told in (
        ("expert_gating_func", 1, "no normalised sigmoids"),
        ("expert_weights_norm", None, "no normalised sigmoids"),
        ("expert_shared_count", None, "how wide its layers are"),
        ("feed_forward_length", None, "how wide its layers are"),
        ("rope.dimension_count", None, "which part of a head positions turn"),
    ):
        assert told in refusal(path, "minimax-m3", key, wrong)


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
    cut: dict[str, Stored | None] = {
        name: None for name in GgufFile(path).tensors if name.startswith("blk.") and not name.startswith("blk.0.")
    }
    got = read(rewritten(path, "deepseek2", cut, **plain, **none))
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
    assert "how its rotary positions are stretched" in refusal(path, "mistral4", "rope.scaling.type", "none")
    assert "scores of its experts are not by softmax" in refusal(path, "mistral4", "expert_gating_func", 2)


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
        assert told in refusal(path, "dots3note", key, wrong)


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
