"""How experts are chosen, in GGUF files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gguf_kit import F32, Q8_0, store
from gguf_loaded import logits, quiet, read, rewritten, settings
from gguf_metadata import config_of
from gguf_models import written

from scheduler.weights.gguf.header import GgufError


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


@quiet
def test_how_experts_are_chosen_for_pictures_is_left(tmp_path: Path) -> None:
    path, want = written(tmp_path / "x.gguf", "deepseek4", F32)
    got = read(rewritten(path, "deepseek4", {"blk.1.exp_probs_b_vl.bias": store(torch.ones(8))}))
    torch.testing.assert_close(logits(got), logits(want), rtol=1e-4, atol=1e-4)


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
