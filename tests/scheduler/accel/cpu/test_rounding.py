"""``--weights int8`` and ``int4``: the tokens of a model with the rounded weights, and what that changed is told."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from loaded_kit import check_generated
from tiny_models import logits, make_model, save_model
from transformers import AutoModelForCausalLM

from scheduler.accel.cpu import rounding
from scheduler.accel.cpu.experts import pack_experts
from scheduler.accel.cpu.packing import Packing
from scheduler.accel.cpu.quantised import keep_packed
from scheduler.accel.cpu.rounding import BITS, Rounding
from scheduler.engine_config import EngineConfig
from scheduler.model.loader import LoadedModel, LoadFailed, fingerprint, load
from scheduler.weights.quantised_weight import quantised_weight_of
from scheduler.weights.rounded_source import RoundedSource

DEMO = Path(__file__).resolve().parents[4] / "server" / "demo"
PROMPTS = [[(7 * i + 3) % 1000 + 10 for i in range(40)], list(range(10, 21)), [*range(30, 70), 5, 6, 7]]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """However small a weight is."""
    monkeypatch.setattr(rounding, "SMALLEST", 1)


@cache
def demo(weights: str) -> LoadedModel:
    """The demo model in float32; no test changes it."""
    return load_rounded(DEMO, weights, dtype="float32")


def load_rounded(path: Path, weights: str, **more: Any) -> LoadedModel:
    return load(EngineConfig("", str(path), device="cpu", weights=weights, **more), lambda _: None)


def rounded(model: Any, weights: str) -> tuple[Any, list[str]]:
    """A copy of a plain model with the values that rounding leaves, and the names of the weights that it changed."""
    probe, made, names = copy.deepcopy(model), copy.deepcopy(model), []
    Rounding(probe, weights)
    for name, parameter in probe.named_parameters(remove_duplicate=False):
        kept = quantised_weight_of(parameter)
        if kept is None:
            continue
        assert isinstance(kept.source, RoundedSource)
        names.append(name)
        path, _, leaf = name.rpartition(".")
        made.get_submodule(path)._parameters[leaf] = torch.nn.Parameter(kept.dense(), False)
    return made, names


@pytest.mark.parametrize("weights", BITS)
def test_tokens_are_those_of_the_rounded_weights(weights: str) -> None:
    loaded = demo(weights)
    want, names = rounded(AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval(), weights)
    assert len(names) > 10
    check_generated(loaded, PROMPTS, 12, want)


def test_what_it_changes_is_measured() -> None:
    eight, four = (demo(weights).rounding for weights in ("int8", "int4"))
    assert eight is not None
    assert four is not None
    assert eight.error is not None
    assert four.error is not None
    assert 0 < eight.error < 0.05 < four.error < 0.5
    assert eight.same is not None
    assert eight.same > 0.9
    assert "logits differ by" in four.line


def test_they_have_fingerprints_of_their_own() -> None:
    prints = [fingerprint(demo(weights)) for weights in ("auto", "int8", "int4")]
    assert prints[1] == fingerprint(load_rounded(DEMO, "int8", dtype="float32"))
    assert len({*prints}) == 3


def test_less_memory() -> None:
    plain, eight, four = (demo(weights).weight_bytes for weights in ("auto", *BITS))
    assert four < eight < plain / 2


@pytest.mark.parametrize("weights", BITS)
@pytest.mark.parametrize("name", ["gpt_oss", "deepseek_v3", "qwen3_next", "falcon"])
def test_other_models(name: str, weights: str) -> None:
    """Experts, also such as are stored the other way round, and queries, keys and values in one."""
    model, packing = make_model(name), Packing({})
    want, names = rounded(model, weights)
    assert names
    assert any("experts" in each for each in names) is (name != "falcon")
    Rounding(model, weights)
    pack_experts(model, packing)
    keep_packed(model, packing)
    packing.settle()
    expected = logits(want, PROMPTS[1])
    with torch.no_grad():
        assert (logits(model, PROMPTS[1]) - expected).norm() < 5e-4 * expected.norm()


def test_the_product_that_gives_logits_keeps_8_bits() -> None:
    model = make_model("llama")
    Rounding(model, "int4")
    head, other = (
        quantised_weight_of(model.lm_head.weight),
        quantised_weight_of(model.model.layers[0].mlp.up_proj.weight),
    )
    assert head is not None
    assert other is not None
    assert (head.source.bits, other.source.bits) == (8, 4)


def test_nothing_to_round(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(rounding, "SMALLEST", 1 << 40)
    with pytest.raises(LoadFailed, match="no weights that could be packed") as caught:
        load_rounded(save_model("llama", tmp_path), "int8")
    assert "\n" not in str(caught.value)


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounding, "kernel", lambda: None)
    with pytest.raises(LoadFailed, match="needs a C\\+\\+ compiler"):
        load_rounded(DEMO, "int4")
