"""Experts of a form of their own in GGUF files: in the common form they say the same, and stay packed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_kit import F32, Q4_0, Q8_0
from gguf_loaded import IDS, logits, read, rewritten, settings
from gguf_models import written
from transformers import AutoModelForCausalLM
from transformers.initialization import no_init_weights

from scheduler.weights.gguf.config import read_gguf_config
from scheduler.weights.gguf.file import GgufFile
from scheduler.weights.gguf.header import GgufError
from scheduler.weights.gguf.model import build_model
from scheduler.weights.gguf.routed import RoutedExperts
from scheduler.weights.quantised_weight import quantised_weight_of


def experts_of(model: Any) -> list[RoutedExperts]:
    return [module for module in model.modules() if isinstance(module, RoutedExperts)]


def packed(path: Path, dtype: torch.dtype | None = None) -> Any:
    file = GgufFile(path)
    return build_model(file, read_gguf_config(file, path), AutoModelForCausalLM, dtype, {}, packed=True)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_experts_whose_inputs_are_weighed_stay_packed(dtype: torch.dtype | None, tmp_path: Path) -> None:
    path, want = written(tmp_path / "x.gguf", "llama4", Q4_0)
    found = experts_of(packed(path, dtype))
    plain = [want.model.layers[number].feed_forward.experts for number in want.config.moe_layers]
    assert len(found) == len(plain) == 2
    for mine, theirs in zip(found, plain, strict=True):
        for name in ("gate_up_proj", "down_proj"):
            weight, parameter = quantised_weight_of(mine.get_parameter(name)), theirs.get_parameter(name)
            assert weight is not None
            assert mine.get_parameter(name).dtype is (dtype or torch.float32)
            assert torch.equal(weight.dense().float(), parameter.transpose(1, 2).to(dtype or torch.float32).float())


def test_experts_in_rows_of_one_matrix_stay_packed(tmp_path: Path) -> None:
    path, want = written(tmp_path / "x.gguf", "dbrx", Q8_0)
    for mine, block in zip(experts_of(packed(path)), want.transformer.blocks, strict=True):
        gate, up, down = (getattr(block.ffn.experts.mlp, name).view(4, 96, 64) for name in ("w1", "v1", "w2"))
        joined, back = (quantised_weight_of(mine.get_parameter(name)) for name in ("gate_up_proj", "down_proj"))
        assert joined is not None
        assert back is not None
        assert torch.equal(joined.dense(), torch.cat([gate, up], 1))
        assert torch.equal(back.dense(), down.transpose(1, 2))


@pytest.mark.parametrize("label", ["llama4", "dbrx"])
def test_a_model_of_the_same_class_has_such_experts_too(label: str, tmp_path: Path) -> None:
    path, want = written(tmp_path / "x.gguf", label, F32)
    got = read(path)
    with no_init_weights():
        other = type(got)(got.config).eval()
    other.load_state_dict(got.state_dict())
    assert len(experts_of(other)) == len(experts_of(got)) == 2
    assert torch.equal(logits(other), logits(got))
    assert isinstance(got, type(want))
    assert not experts_of(want)
    assert not experts_of(type(want)(want.config))


def test_texts_of_a_batch_are_apart(tmp_path: Path) -> None:
    for label in ("llama4", "dbrx"):
        path, want = written(tmp_path / "x.gguf", label, Q8_0)
        ids = torch.cat([IDS, IDS.flip(1)])
        with torch.no_grad():
            torch.testing.assert_close(read(path)(ids).logits, want(ids).logits, rtol=1e-4, atol=1e-4)


def test_a_number_that_is_none_of_an_expert_adds_nothing(tmp_path: Path) -> None:
    path, _ = written(tmp_path / "x.gguf", "dbrx", F32)
    experts = experts_of(read(path))[0]
    tokens, weights = torch.randn(3, 64), torch.rand(3, 2)
    with torch.no_grad():
        one = experts(tokens, torch.tensor([[1, 4], [2, 4], [4, 4]]), weights)
        weights[:, 1] = weights[2] = 0
        torch.testing.assert_close(one, experts(tokens, torch.tensor([[1, 0], [2, 3], [0, 1]]), weights))


def test_how_many_experts_is_said(tmp_path: Path) -> None:
    path, _ = written(tmp_path / "x.gguf", "dbrx", F32)
    for key in ("feed_forward_length", "expert_count", "expert_used_count"):
        other = rewritten(path, "dbrx", {}, **{f"dbrx.{key}": None})
        with pytest.raises(GgufError, match="how many experts its layers have"):
            settings(other)
