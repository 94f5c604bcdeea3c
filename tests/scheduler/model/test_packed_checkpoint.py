"""Checkpoints of GPTQ, AWQ and compressed-tensors on a CPU: loaded without those libraries, packed, and computing what
their codes, scales and zeros stand for.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from loaded_kit import check_generated
from packed_checkpoints import (
    Writer,
    awq,
    compressed,
    compressed_in_words,
    gptq,
    gptq_v2,
    rounded,
    said_by,
    write_checkpoint,
)
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from wide import widely

from scheduler.accel.cpu.packed_matrix import PackedMatrix
from scheduler.engine_config import EngineConfig
from scheduler.model import checkpoint, packed_checkpoint
from scheduler.model.loader import LoadedModel, LoadFailed, fingerprint, load
from scheduler.weights.packed_formats import format_of
from scheduler.weights.quantised_weight import quantised_weight_of

DEMO = Path(__file__).resolve().parents[3] / "server" / "demo"
PROMPTS = [[(7 * i + 3) % 1000 + 10 for i in range(40)], list(range(10, 21)), [*range(30, 70), 5, 6, 7]]
FORMATS: dict[str, tuple[Writer, int, dict[str, Any]]] = {
    "GPTQ": (gptq, 4, {"symmetric": True}),
    "GPTQ with zeros": (gptq, 4, {}),
    "GPTQ of 8 bits": (gptq_v2, 8, {}),
    "GPTQ of 3 bits": (gptq_v2, 3, {}),
    "GPTQ of 2 bits": (gptq, 2, {}),
    "GPTQ in the order of activations": (gptq, 4, {"shuffled": True, "symmetric": True}),
    "AWQ": (awq, 4, {"group": 64}),
    "compressed-tensors": (compressed, 4, {"symmetric": True}),
    "compressed-tensors with zeros": (compressed, 4, {"group": 64}),
    "compressed-tensors of 8 bits": (compressed, 8, {"symmetric": True}),
    "compressed-tensors of 6 bits": (compressed, 6, {}),
    "compressed-tensors of 3 bits in words": (compressed_in_words, 3, {}),
    "compressed-tensors in the order of activations": (compressed, 4, {"shuffled": True}),
}
NARROW = (  # one of each library, with zeros and without, and each order; the codes of all are read here in any case
    "GPTQ in the order of activations",
    "AWQ",
    "compressed-tensors of 3 bits in words",
)


def write(folder: Path, name: str, dtype: torch.dtype = torch.float32) -> Any:
    """The demo model as a packed checkpoint; returns a model with the values that the codes stand for."""
    write_to, bits, more = FORMATS[name]
    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=dtype).eval()
    AutoTokenizer.from_pretrained(DEMO).save_pretrained(folder)
    write_checkpoint(folder, model, write_to, bits, **more)
    return model


def load_packed(folder: Path, dtype: str = "float32") -> LoadedModel:
    return load(EngineConfig("", str(folder), device="cpu", dtype=dtype), lambda _: None)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("out", "inside"), [(72, 192), (64, 1024)])
def test_values_are_those_of_the_codes(name: str, out: int, inside: int) -> None:
    write_to, bits, more = FORMATS[name]
    of = rounded(torch.randn(out, inside), bits, more.get("group", 32), **_without_group(more))
    form = format_of(said_by(write_to, bits, more.get("group", 32)))
    assert form is not None
    source = form.source({f".{leaf}": tensor for leaf, tensor in write_to(of).items()}, inside)
    assert torch.equal(source.dequantise(0, out), of.values)
    assert torch.equal(source.dequantise(5, 70 % out), of.values[5 : 70 % out])
    assert torch.equal(source.take(torch.tensor([3, 1])), of.values[[3, 1]])
    matrix = PackedMatrix(source)
    assert torch.equal(matrix.dense(), of.values)
    if out % 64 == 0 and bits > 3:  # whole groups of columns
        assert matrix.nbytes <= 1.2 * source.nbytes


def _without_group(more: dict[str, Any]) -> dict[str, Any]:
    return {"symmetric": False} | {name: value for name, value in more.items() if name != "group"}


@pytest.mark.parametrize("name", widely(FORMATS, NARROW))
def test_tokens_are_those_of_the_codes(name: str, tmp_path: Path) -> None:
    want = write(tmp_path, name)
    loaded = load_packed(tmp_path)
    assert loaded.verdict.mode.name == "packed"
    kept = [quantised_weight_of(p) for p in loaded.model.parameters()]
    assert sum(one is not None for one in kept) > 10
    assert not any(one.touched for one in kept if one is not None)
    check_generated(loaded, PROMPTS, 12, want)
    ids = torch.tensor(PROMPTS[:1])
    loaded.verdict.mode.remove()
    with torch.no_grad():
        got, expected = loaded.model(ids).logits, want(ids).logits
    assert (got - expected).norm() <= 5e-4 * expected.norm()  # inputs are rounded to 16 bits


@pytest.mark.wide
def test_they_are_as_large_as_their_files_and_say_who_they_are(tmp_path: Path) -> None:
    want = write(tmp_path, "GPTQ", torch.float16)
    loaded = load_packed(tmp_path, "auto")
    assert loaded.parameters == want.num_parameters()
    size = (tmp_path / "model.safetensors").stat().st_size
    assert 0.95 * size < loaded.weight_bytes <= size
    assert loaded.model.dtype is torch.float16
    said = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert loaded.model.config.quantization_config == said
    assert fingerprint(loaded) == fingerprint(load_packed(tmp_path, "auto"))
    other = {**said, "checkpoint_format": "gptq_v2"}  # the same tensors mean something else
    config = json.loads((tmp_path / "config.json").read_text()) | {"quantization_config": other}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert fingerprint(loaded) != fingerprint(load_packed(tmp_path, "auto"))


@pytest.mark.parametrize(
    "said",
    [
        None,
        {"quant_method": "awq", "version": "gemv"},
        {"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"},
        {"quant_method": "gptq", "bits": 5},
        {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": {"a": {}}},
        said_by(compressed, 4, 32) | {"kv_cache_scheme": {"num_bits": 8}},
        said_by(compressed, 4, 32) | {"config_groups": {"a": {"input_activations": {"num_bits": 8}}}},
        said_by(compressed, 4, 32) | {"config_groups": {"a": {"weights": {"num_bits": 4, "type": "float"}}}},
        {"quant_method": "fp8", "fmt": "e5m2"},
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
        {"quant_method": "auto-round", "packing_format": "auto_round:ipex", "bits": 4},
    ],
)
def test_other_formats_are_left_to_their_libraries(said: Any) -> None:
    assert format_of(said) is None


@pytest.mark.parametrize("installed", [True, False])
@pytest.mark.parametrize("name", ["GPTQ", "AWQ", "compressed-tensors"])
def test_on_a_gpu_a_library_that_keeps_weights_packed_goes_first(
    name: str, installed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    want, ours = write(tmp_path, name), list[torch.device]()

    def moved(model: Any, device: torch.device) -> Any:
        ours.append(device)
        return model

    def quantised_options(settings: Any, device: torch.device) -> dict[str, Any]:
        raise ValueError("the library was asked")

    monkeypatch.setattr(packed_checkpoint, "find_spec", lambda library: object() if installed else None)
    monkeypatch.setattr(checkpoint, "move_packed", moved)
    monkeypatch.setattr(checkpoint, "_quantised_options", quantised_options)
    config, device = EngineConfig("", str(tmp_path), dtype="float32"), torch.device("cuda")
    settings = checkpoint.read_config(config)
    if installed and name != "compressed-tensors":  # which unpacks them in the first step
        with pytest.raises(ValueError, match="the library was asked"):
            checkpoint.read_model(config, settings, device)
        return
    model, _ = checkpoint.read_model(config, settings, device)
    assert ours == [device]
    assert model.num_parameters() == want.num_parameters()


@pytest.mark.parametrize(
    ("leaf", "change", "reason"),
    [
        ("qweight", lambda tensor: tensor[:-1].contiguous(), "do not fit"),
        ("scales", lambda tensor: tensor[:, :-8].contiguous(), "do not fit"),
        ("g_idx", lambda tensor: (torch.arange(len(tensor), 0, -1) // 48).int(), "different sizes"),
        ("qzeros", lambda _: None, "no qzeros"),
        ("qweight", lambda _: None, "missing"),
    ],
)
def test_tensors_that_do_not_fit_are_told(leaf: str, change: Any, reason: str, tmp_path: Path) -> None:
    write(tmp_path, "GPTQ with zeros")
    tensors = load_file(tmp_path / "model.safetensors")
    name = next(name for name in tensors if name.endswith(f"q_proj.{leaf}"))
    changed = change(tensors.pop(name))
    if changed is not None:
        tensors[name] = changed
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(LoadFailed, match=reason):
        load_packed(tmp_path)


def test_a_packed_weight_that_is_no_linear_module_is_left_to_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "AWQ")
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.mlp.experts.0.up_proj.qweight"] = torch.zeros(8, 8, dtype=torch.int32)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    asked = []

    def quantised_options(settings: Any, device: torch.device) -> dict[str, Any]:
        asked.append(settings.quantization_config)
        raise ValueError("the library was asked")

    monkeypatch.setattr(checkpoint, "_quantised_options", quantised_options)
    with pytest.raises(LoadFailed, match="the library was asked"):
        load_packed(tmp_path)
    assert asked == [said_by(awq, 4, 64)]
