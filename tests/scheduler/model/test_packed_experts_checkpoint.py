"""Checkpoints whose experts are packed, and those whose values are of a table, on a CPU: loaded without a library, and
computing what the values stand for.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from loaded_kit import check_generated
from packed_models import CASES, write_case
from program_kit import compiled
from transformers import AutoModelForCausalLM
from wide import widely

from scheduler.accel.cpu.experts import pack_experts, packed_experts
from scheduler.accel.cpu.packing import Packing
from scheduler.engine_config import EngineConfig
from scheduler.model.checkpoint import read_config, read_model
from scheduler.model.loader import LoadedModel, load
from scheduler.weights.quantised_weight import QuantisedWeight, quantised_weight_of

PROMPTS = [[(7 * i + 3) % 1000 + 10 for i in range(40)], list(range(10, 21))]
NARROW = ("GPTQ", "compressed-tensors", "mxfp4", "nf4")


def write(folder: Path, name: str) -> Any:
    """Write a checkpoint; returns a model with the values that its codes stand for."""
    write_case(folder, name)
    return AutoModelForCausalLM.from_pretrained(folder / "plain", dtype=torch.float32).eval()


def load_packed(folder: Path) -> LoadedModel:
    return load(EngineConfig("", str(folder / "packed"), device="cpu", dtype="float32"), lambda _: None)


@pytest.mark.parametrize("name", widely(CASES, NARROW))
def test_tokens_are_those_of_the_values(name: str, tmp_path: Path) -> None:
    want = write(tmp_path, name)
    loaded = load_packed(tmp_path)
    assert loaded.verdict.mode.name == "packed"
    assert loaded.parameters == want.num_parameters()
    size = (tmp_path / "packed" / "model.safetensors").stat().st_size
    assert loaded.weight_bytes <= size
    experts = [one for one in loaded.model.modules() if one._parameters.keys() >= {"gate_up_proj", "down_proj"}]
    assert bool(experts) == (CASES[name][0] != "llama")
    assert all(packed_experts(one) is not None for one in experts)
    check_generated(loaded, PROMPTS, 12, want)
    loaded.verdict.mode.remove()
    ids = torch.tensor(PROMPTS[:1])
    with torch.no_grad():
        got, expected = loaded.model(ids).logits, want(ids).logits
    assert (got - expected).norm() <= 5e-4 * expected.norm()


def test_values_stay_packed_and_as_they_are(tmp_path: Path) -> None:
    """Before the kernel packs them: every packed parameter gives the values exactly."""
    for number, name in enumerate(("GPTQ", "fp8 of deepseek", "mxfp4", "nf4")):
        folder = tmp_path / str(number)
        want = dict(write(folder, name).named_parameters())
        config = EngineConfig("", str(folder / "packed"), device="cpu", dtype="float32")
        model, _ = read_model(config, read_config(config), torch.device("cpu"))
        kept = {
            key: weight for key, one in model.named_parameters() if (weight := quantised_weight_of(one)) is not None
        }
        assert len(kept) >= 4
        for key, weight in kept.items():
            torch.testing.assert_close(weight.dense(), want[key].data, rtol=1e-6, atol=0)


def test_experts_are_compared_without_unpacking_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each module some experts; one that differs keeps its own code."""
    compiled()
    write(tmp_path, "mxfp4")
    config = EngineConfig("", str(tmp_path / "packed"), device="cpu", dtype="float32")
    model, _ = read_model(config, read_config(config), torch.device("cpu"))
    modules = [one for one in model.modules() if one._parameters.keys() >= {"gate_up_proj", "down_proj"}]
    unpacked: list[int] = []
    original = QuantisedWeight.dense_of

    def dense_of(self: QuantisedWeight, experts: list[int]) -> torch.Tensor:
        unpacked.append(len(experts))
        return original(self, experts) * (2 if self is wrong else 1)

    def dense(self: QuantisedWeight) -> torch.Tensor:
        raise AssertionError("a whole weight is unpacked")

    wrong = quantised_weight_of(modules[1].down_proj)
    monkeypatch.setattr(QuantisedWeight, "dense_of", dense_of)
    monkeypatch.setattr(QuantisedWeight, "dense", dense)
    pack_experts(model, Packing({}))
    assert [packed_experts(one) is not None for one in modules] == [True, False]
    assert unpacked == [3, 3] * len(modules)
