"""Adapters that cannot be used are refused in one line that says why."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_kit import ATTENTION, make_parts, save_adapter
from safetensors.torch import load_file, save_file
from tiny_models import make_model

from scheduler.adapters.adapter_checkpoint import BadAdapter, read_adapter
from scheduler.adapters.adapter_set import AdapterSet

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


@pytest.fixture(scope="module")
def model() -> Any:
    return make_model("llama")


@pytest.fixture
def folder(model: Any, tmp_path: Path) -> Path:
    return save_adapter(tmp_path / "adapter", make_parts(model, ATTENTION, 4, 0), 4, 8)


def tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], Any]:
    def write(folder: Path) -> None:
        found = load_file(folder / WEIGHTS)
        change(found)
        save_file(found, folder / WEIGHTS)

    return write


def settings(**changed: Any) -> Callable[[Path], Any]:
    def write(folder: Path) -> None:
        config = json.loads((folder / CONFIG).read_text())
        (folder / CONFIG).write_text(json.dumps(config | changed))

    return write


FIRST = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
OTHER = "base_model.model.model.layers.9.self_attn.q_proj.lora_"


def put(**changed: torch.Tensor) -> Callable[[Path], Any]:
    """Tensors by what their names end with: of the first module, or of one that is not there."""
    named = {(OTHER if "_" in key else FIRST) + key[0] + ".weight": tensor for key, tensor in changed.items()}
    return tensors(lambda found: found.update(named))


BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no config": (lambda folder: (folder / CONFIG).unlink(), "no adapter_config.json"),
    "no JSON": (lambda folder: (folder / CONFIG).write_text("{"), "no JSON"),
    "a list": (lambda folder: (folder / CONFIG).write_text("[]"), "peft_type"),
    "no weights": (lambda folder: (folder / WEIGHTS).unlink(), "no adapter_model.safetensors"),
    "a pickle": (lambda folder: (folder / WEIGHTS).rename(folder / "adapter_model.bin"), "bin is not read"),
    "cut off": (lambda folder: (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-5]), "damaged"),
    "empty": (lambda folder: (folder / WEIGHTS).write_bytes(b""), "damaged"),
    "no tensors": (tensors(dict.clear), "no tensors"),
    "a prompt": (settings(peft_type="PREFIX_TUNING"), "peft_type"),
    "DoRA": (settings(use_dora=True), "use_dora"),
    "whole modules": (settings(modules_to_save=["lm_head"]), "modules_to_save"),
    "a bias of no kind": (settings(bias="some"), "bias"),
    "a bias nobody tells of": (tensors(lambda found: found.update({FIRST + "B.bias": torch.zeros(4)})), "bias"),
    "activated": (settings(alora_invocation_tokens=["a"]), "alora_invocation_tokens"),
    "PiSSA": (settings(init_lora_weights="pissa"), "init_lora_weights"),
    "experts": (settings(target_parameters=["experts.gate_up_proj"]), "target_parameters"),
    "another rank": (settings(r=5), "rank 4"),
    "no rank": (settings(r=None), "rank or alpha"),
    "no alpha": (settings(lora_alpha="much"), "rank or alpha"),
    "a bad pattern": (settings(rank_pattern={"(": 4}), "rank_pattern"),
    "patterns of no kind": (settings(alpha_pattern=[1]), "alpha_pattern"),
    "a target without tensors": (settings(target_modules=["q_proj", "nowhere"]), "nowhere"),
    "half": (tensors(lambda found: found.pop(f"{FIRST}A.weight")), "one half"),
    "halves that do not fit": (
        tensors(lambda found: found.update({f"{FIRST}A.weight": torch.ones(3, 64)})),
        "do not fit",
    ),
    "integers": (put(A=torch.ones(4, 64).int()), "floating-point"),
    "an embedding": (
        tensors(lambda found: found.update({"model.embed_tokens.lora_embedding_A": torch.ones(1)})),
        "no part",
    ),
    "another model": (put(A=torch.ones(4, 48)), "of another model"),
    "no such module": (put(A_=torch.ones(4, 64), B_=torch.ones(64, 4)), "no such module"),
    "a module that is no linear map": (
        tensors(
            lambda found: found.update(
                {f"model.norm.lora_{part}.weight": torch.ones(4, 4) for part in "AB"},
            )
        ),
        "no linear map",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_wrong_is_said(name: str, folder: Path, model: Any) -> None:
    adapters = AdapterSet(model, model, None)
    damage, said = BROKEN[name]
    damage(folder)
    with pytest.raises(BadAdapter, match=said) as found:
        adapters.load("a", folder)
    assert str(folder) not in str(found.value)
    assert "\n" not in str(found.value)
    assert adapters.find("a") is None


def test_a_model_may_take_none(folder: Path, model: Any) -> None:
    with pytest.raises(BadAdapter, match="not served"):
        AdapterSet(model, model, None, "adapters are not served here").load("a", folder)


def test_the_digest_is_of_all_that_results_depend_on(folder: Path) -> None:
    digests = [read_adapter(folder).digest]
    for change in (
        settings(inference_mode=True),
        settings(lora_alpha=9),
        tensors(lambda found: found[f"{FIRST}A.weight"].mul_(2)),
    ):
        change(folder)
        digests.append(read_adapter(folder).digest)
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3
