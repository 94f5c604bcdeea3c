"""Weights that stay as their file packed them: the logits of the dequantised weights, and nothing is unpacked that need
not be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_kit import F32, Q4_0, Q8_0
from gguf_loaded import read
from gguf_models import written
from gguf_shapes import MODELS
from program_kit import compiled
from torch import nn

from scheduler.accel.cpu import quantised as module_under_test
from scheduler.accel.cpu.experts import PackedExperts, pack_experts
from scheduler.accel.cpu.packing import Packing
from scheduler.accel.cpu.quantised import QuantisedModule, is_linear, keep_packed
from scheduler.weights.gguf.file import GgufFile
from scheduler.weights.quantised_weight import quantised_weight_of

IDS = torch.tensor([[(7 * i + 3) % 250 for i in range(24)]])
MOST = 3e-4  # inputs of products are rounded to 16 bits
# Random errors of 2e-5 in the inputs of their products change the logits by half of this too.
MORE = {"hrm_text": 1e-3, "jamba": 1e-3, "jamba dense": 6e-4, "qwen3next": 1e-3, "qwen35": 2e-3}
quiet = pytest.mark.filterwarnings("ignore")  # what transformers says of optional kernels


def kept(path: Path) -> tuple[Any, Packing]:
    compiled()
    model, packing = read(path, packed=True), Packing({})
    pack_experts(model, packing)
    keep_packed(model, packing)
    return model, packing


@torch.no_grad()
def error(model: Any, want: Any) -> float:
    expected = want(IDS).logits
    return float((model(IDS).logits - expected).norm() / expected.norm())


@quiet
@pytest.mark.parametrize("label", MODELS)
def test_an_architecture(label: str, tmp_path: Path) -> None:
    path, want = written(tmp_path / "x.gguf", label, Q4_0 if len(label) % 2 else Q8_0)
    (model, packing), most = kept(path), MORE.get(label, MOST)
    assert error(model, want) < most
    packed = [
        name for name, weight in read(path, packed=True).named_parameters() if quantised_weight_of(weight) is not None
    ]
    assert packed
    packing.settle()
    unpacked = [name for name in packed if type(model.get_parameter(name)) is nn.Parameter]
    others = ("gate.weight", "router.weight", ".o_a_proj.weight")  # no linear modules: routers, and one in groups
    assert all(name.endswith(others) for name in unpacked), unpacked
    assert error(model, want) < most


@quiet
def test_rows_of_two_types_stay_packed(tmp_path: Path) -> None:
    path, want = written(tmp_path / "x.gguf", "qwen3next", Q8_0)
    gate, others = (GgufFile(path).tensors[f"blk.0.attn_{name}.weight"] for name in ("gate", "qkv"))
    assert (gate.kind, others.kind) == (Q4_0, Q8_0)
    name = "model.layers.0.linear_attn.in_proj_qkvz.weight"
    weight = quantised_weight_of(read(path, packed=True).get_parameter(name))
    assert weight is not None
    assert torch.equal(weight.dense(), want.get_parameter(name))
    model, packing = kept(path)
    packing.settle()
    assert type(model.get_parameter(name)) is not nn.Parameter
    assert error(model, want) < MOST


def test_embeddings_look_up_rows(tmp_path: Path) -> None:
    path, want = written(tmp_path / "x.gguf", "qwen2", Q8_0)
    model, packing = kept(path)
    weight = quantised_weight_of(model.model.embed_tokens.weight)
    assert weight is not None
    assert weight is quantised_weight_of(model.lm_head.weight)
    error(model, want)
    assert not weight.touched
    assert torch.equal(model.model.embed_tokens(IDS), want.model.embed_tokens(IDS))
    packing.settle()
    assert quantised_weight_of(model.model.embed_tokens.weight) is weight


def test_rows_that_were_taken_are_kept_and_cannot_be_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, want = written(tmp_path / "x.gguf", "qwen2", Q8_0)
    embed, wanted = kept(path)[0].model.embed_tokens, want.model.embed_tokens
    weight = quantised_weight_of(embed.weight)
    assert weight is not None
    monkeypatch.setattr(weight, "_most_taken", 3)
    asked: list[int] = []
    rows = weight.source.dequantise

    def dequantise(start: int, stop: int) -> torch.Tensor:
        asked.extend(range(start, stop))
        return rows(start, stop)

    monkeypatch.setattr(weight.source, "dequantise", dequantise)
    for ids in ([5], [6, 7], [5, 5], [8], [5], [6]):
        found = embed(torch.tensor([ids]))
        assert torch.equal(found, wanted(torch.tensor([ids])))
        found.zero_()
    assert asked == [5, 6, 7, 8, 6]


def test_a_weight_that_is_read_otherwise_is_unpacked(tmp_path: Path) -> None:
    path, want = written(tmp_path / "x.gguf", "llama", Q8_0)
    model, packing = kept(path)
    gate = model.model.layers[0].mlp.gate_proj
    assert torch.equal(gate.weight.sum(), want.model.layers[0].mlp.gate_proj.weight.sum())
    with pytest.raises(RuntimeError, match="cannot be written"):
        gate.weight.zero_()
    before = len(packing)
    packing.settle()
    assert len(packing) == before - 1
    assert packing.matrix(gate) is None
    assert torch.equal(gate.weight, want.model.layers[0].mlp.gate_proj.weight)
    assert error(model, want) < MOST


def test_a_view_of_a_packed_weight(tmp_path: Path) -> None:
    """In the mode that models are run in, torch returns none of a tensor that was made in it."""
    path, want = written(tmp_path / "x.gguf", "llama", Q8_0)
    weight = read(path, packed=True).model.layers[0].mlp.gate_proj.weight
    with torch.inference_mode():
        assert torch.equal(weight.view(2, -1, 64), want.model.layers[0].mlp.gate_proj.weight.view(2, -1, 64))


def test_removing_unpacks_everything(tmp_path: Path) -> None:
    path, want = written(tmp_path / "x.gguf", "llama experts", Q8_0)
    model, packing = kept(path)
    packing.remove()
    for name, weight in model.named_parameters():
        assert type(weight) is nn.Parameter, name
        torch.testing.assert_close(weight, want.get_parameter(name), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("label", ["llama biased", "llama experts"])
def test_without_a_compiler(label: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Right and slower: linear maps unpack some rows at a time, experts are unpacked."""
    path, want = written(tmp_path / "x.gguf", label, Q8_0)
    monkeypatch.setattr(module_under_test, "kernel", lambda: None)
    monkeypatch.setattr("scheduler.accel.cpu.experts.kernel", lambda: None)
    monkeypatch.setattr(module_under_test, "_ROWS", 40)
    model, packing = kept(path)
    assert error(model, want) < 1e-5
    packing.settle()
    assert error(model, want) < 1e-5
    proj = model.model.layers[0].self_attn.q_proj
    assert packing.matrix(proj) is None
    assert quantised_weight_of(proj.weight) is not None


def test_a_product_that_is_wrong_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, want = written(tmp_path / "x.gguf", "llama", Q8_0)
    monkeypatch.setattr(module_under_test, "_MOST_ERROR", 0.0)
    model, packing = kept(path)
    assert packing.matrix(model.lm_head) is None
    assert error(model, want) < 1e-5


def test_experts_are_read_packed(tmp_path: Path) -> None:
    path, want = written(tmp_path / "x.gguf", "qwen3moe", Q4_0)
    model, packing = kept(path)
    held = [one for one in packing._modules if isinstance(one, PackedExperts)]
    assert len(held) == 2
    assert all(one.nbytes < 4 * 3 * 32 * 64 * 4 / 4 for one in held)  # of 4 experts in float32
    assert error(model, want) < MOST


def test_plain_weights_are_not_touched(tmp_path: Path) -> None:
    path, _ = written(tmp_path / "x.gguf", "llama", F32)
    _, packing = kept(path)
    assert not [one for one in packing._modules if isinstance(one, QuantisedModule)]


class Clamped(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input).clamp(-100, 100)


class Scaled(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * 1.01


@pytest.mark.parametrize(
    ("module", "linear"),
    [
        (nn.Linear(32, 64), True),
        (nn.Linear(32, 64, bias=False), True),
        (Clamped(32, 64), False),
        (Scaled(32, 64), False),
        (nn.Embedding(32, 64), False),
        (nn.Bilinear(8, 8, 8), False),
    ],
)
def test_what_is_linear(module: nn.Module, linear: bool) -> None:
    weight = module._parameters["weight"]
    assert is_linear(module) is linear
    assert module._parameters["weight"] is weight
