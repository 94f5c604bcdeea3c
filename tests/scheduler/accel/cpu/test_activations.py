"""``--activations int8``: it is used where it changes little, told, and otherwise refused with the reason."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from scheduler.accel.cpu import activations, rounding
from scheduler.accel.cpu.activations import round_activations
from scheduler.accel.cpu.program_kernel import ProgramKernel, kernel
from scheduler.engine_config import EngineConfig
from scheduler.model import draft_model
from scheduler.model.draft_model import load_draft_model
from scheduler.model.loader import LoadedModel, LoadFailed, fingerprint, load
from scheduler.model_facts import ActivationRounding

DEMO = Path(__file__).resolve().parents[4] / "server" / "demo"


@pytest.fixture(autouse=True)
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[ProgramKernel]:
    """However small a weight is; and 16 bits again afterwards."""
    monkeypatch.setattr(rounding, "SMALLEST", 1)
    found = kernel()
    assert found is not None
    assert found.activation_bytes == 2
    yield found
    round_activations(None)
    assert found.activation_bytes == 2


def loaded(**more: Any) -> LoadedModel:
    config: dict[str, Any] = {"device": "cpu", "weights": "int8", "activations": "int8", **more}
    return load(EngineConfig("", str(DEMO), **config), lambda _: None)


def test_it_is_used_where_it_changes_little(compiled: ProgramKernel, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    made = loaded()
    found = made.activations
    assert found is not None
    assert found.line in [record.getMessage() for record in caplog.records]
    if not compiled.multiplies_bytes:
        assert (compiled.activation_bytes, found.error) == (2, None)
        assert "no instruction that multiplies bytes" in found.line
        return
    assert compiled.activation_bytes == 1
    assert found.error is not None
    assert found.same is not None
    assert 1e-3 < found.error < activations.MOST_ERROR
    assert found.same > 0.8
    assert not found.refused
    round_activations(None)
    exact = loaded(activations="auto")
    assert (exact.activations, compiled.activation_bytes) == (None, 2)
    assert fingerprint(exact) != fingerprint(made)
    assert fingerprint(replace(made, activations=ActivationRounding("int8", None, None, "no"))) == fingerprint(exact)


def test_where_it_changes_much_inputs_keep_16_bits(compiled: ProgramKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activations, "MOST_ERROR", 1e-4)
    monkeypatch.setattr(ProgramKernel, "multiplies_bytes", property(lambda _: True))
    monkeypatch.setattr(activations, "made_up_logits", lambda model: torch.ones(64, 8) * compiled.activation_bytes)
    found = loaded().activations
    assert found is not None
    assert found.refused == "logits would differ by 50.0%, more than 0%"
    assert found.line.startswith("--activations int8 is not used, inputs of products keep 16 bits: logits would")
    assert compiled.activation_bytes == 2


@pytest.mark.parametrize(
    ("logits", "why"), [(None, "could not be measured"), (torch.ones(64, 8), "none of its weights is packed")]
)
def test_why_it_is_not_used(
    logits: torch.Tensor | None, why: str, compiled: ProgramKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ProgramKernel, "multiplies_bytes", property(lambda _: True))
    monkeypatch.setattr(activations, "made_up_logits", lambda model: logits)
    found = loaded(weights="auto").activations
    assert found is not None
    assert why in found.line
    assert compiled.activation_bytes == 2


def test_a_draft_model_is_measured_without_it_and_multiplies_as_the_served_one(
    compiled: ProgramKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    served, seen = loaded(activations="auto", weights="auto"), []

    def load_it(config: EngineConfig, tell: Any) -> LoadedModel:
        seen.append(config.activations)
        return served

    monkeypatch.setattr(draft_model, "load", load_it)
    config = EngineConfig("", str(DEMO), device="cpu", activations="int8", draft_model=str(DEMO))
    for found, count in ((ActivationRounding("int8", 0.01, 1.0), 1), (ActivationRounding("int8", None, None, "no"), 2)):
        draft = load_draft_model(config, replace(served, activations=found), lambda _: None)
        assert (draft.activations, compiled.activation_bytes) == (found, count)
    assert seen == ["auto", "auto"]


def test_without_a_compiler_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activations, "kernel", cache(lambda: None))
    assert "needs a C++ compiler" in activations.measure_activations(None).line
    round_activations(ActivationRounding("int8", 0.01, 1.0))


def test_nothing_is_compiled_where_it_is_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    @cache
    def fail() -> None:
        raise AssertionError

    monkeypatch.setattr(activations, "kernel", fail)
    round_activations(None)
    assert fail.cache_info().misses == 0


def test_it_is_not_for_divided_models() -> None:
    with pytest.raises(LoadFailed, match="--activations int8: not with --tensor-parallel"):
        loaded(weights="auto", tensor_parallel=2)
