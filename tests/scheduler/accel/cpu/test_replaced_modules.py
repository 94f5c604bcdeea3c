"""What stands in the place of modules in a recorded forward: the same results to the bit, or the module itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from architectures.build import build
from device_weights import packed_source
from torch import nn
from transformers.models.llama.modeling_llama import LlamaConfig, LlamaRotaryEmbedding

from scheduler.accel.cpu.embedding_rows import EmbeddingRows
from scheduler.accel.cpu.position_table import _POSITIONS, PositionTable
from scheduler.forward.rope import LongRope
from scheduler.weights.quantised_weight import QuantisedWeight
from scheduler.weights.stand_in import WeightStandIn

HIDDEN = torch.randn(1, 5, 64, generator=torch.Generator().manual_seed(1))
POSITIONS = torch.tensor([[3, 4, 5, 900, 0]])
LATER = torch.tensor([[7, _POSITIONS]])


def rotary(context: int = 128, **parameters: Any) -> LlamaRotaryEmbedding:
    said = {"rope_type": "default", "rope_theta": 10000.0, **parameters}
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, max_position_embeddings=context, rope_parameters=said)
    return LlamaRotaryEmbedding(config)


def table_of(module: nn.Module, key: int | str = 1) -> PositionTable | None:
    args, kwargs = ((HIDDEN, POSITIONS), {}) if key == 1 else ((HIDDEN,), {str(key): POSITIONS})
    return PositionTable.of(module, args, kwargs, key)


def same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and all(map(torch.equal, one, other))


@torch.inference_mode()
@pytest.mark.parametrize("key", [1, "position_ids"])
@pytest.mark.parametrize("kind", [{}, {"rope_type": "yarn", "factor": 4.0}])
def test_a_table_has_what_rotary_embeddings_compute(kind: dict[str, Any], key: int | str) -> None:
    module = rotary(**kind)
    table = table_of(module, key)
    assert table is not None
    for positions in (POSITIONS, POSITIONS[:, 3:4], torch.arange(100, 164)[None], LATER, LATER[:, 1:]):
        hidden = torch.ones(1, positions.shape[1], 64)
        given, named = ((hidden, positions), {}) if key == 1 else ((hidden,), {"position_ids": positions})
        assert same(table(*given, **named), module(*given, **named))


@torch.inference_mode()
def test_nothing_that_a_caller_does_to_results_reaches_the_table() -> None:
    module = rotary()
    table = table_of(module)
    assert table is not None
    for part in table(HIDDEN, POSITIONS):
        part.zero_()
    assert same(table(HIDDEN, POSITIONS), module(HIDDEN, POSITIONS))


@torch.inference_mode()
@pytest.mark.parametrize("context", [128, 4 * _POSITIONS])
def test_what_depends_on_other_positions_has_no_table_and_is_as_it_was(context: int) -> None:
    module = rotary(context, rope_type="dynamic", factor=4.0)
    module(HIDDEN, torch.tensor([[700]]))
    before = module.max_seq_len_cached, module.inv_freq.clone()
    assert table_of(module) is None
    assert module.max_seq_len_cached == before[0]
    assert torch.equal(module.inv_freq, before[1])


class Shifted(nn.Module):
    """Results that depend on another argument, or that are no rows."""

    def __init__(self, of: str) -> None:
        super().__init__()
        self.of = of

    def forward(self, hidden: torch.Tensor, positions: torch.Tensor) -> Any:
        rows = positions[..., None].float()
        if self.of == "values":
            return rows + hidden.sum()
        if self.of == "shape":
            return rows.expand_as(hidden) + 1
        if self.of == "sum":
            return rows.cumsum(1)
        return {"rows": rows} if self.of == "mapping" else rows[0]


@torch.inference_mode()
@pytest.mark.parametrize("of", ["values", "shape", "sum", "mapping", "form"])
def test_what_depends_on_more_than_the_position_has_no_table(of: str) -> None:
    assert table_of(Shifted(of)) is None


@torch.inference_mode()
def test_modules_with_hooks_or_another_forward_are_called_themselves() -> None:
    module, calls = rotary(), []
    table = table_of(module)
    assert table is not None
    handle = module.register_forward_hook(lambda *_: calls.append("hook"))
    assert same(table(HIDDEN, POSITIONS), module(HIDDEN, POSITIONS))
    assert calls == ["hook"] * 2
    assert table_of(module) is None
    handle.remove()
    module.forward = lambda *_: "another"
    assert table(HIDDEN, POSITIONS) == "another"
    assert table_of(module) is None


def test_rotary_modules_with_two_sides_have_no_table() -> None:
    """Which side holds is decided by the step and not by the position."""
    model = build("phi3", "causal")
    model.model.rotary_emb.rope_type = "longrope"
    model.model.rotary_emb.config.rope_parameters["original_max_position_embeddings"] = 4 * _POSITIONS
    sides = LongRope(model)
    assert sides.threshold == 4 * _POSITIONS
    assert table_of(model.model.rotary_emb) is None


class Scaled(nn.Embedding):
    """An embedding with more to do."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * 2


def packed(kind: type[nn.Embedding]) -> nn.Embedding:
    module = kind(64, 128)
    weight = QuantisedWeight(packed_source("Q8_0", 64, 128), torch.float32)
    module._parameters["weight"] = WeightStandIn(weight, module.weight)  # type: ignore[assignment]
    return module


@torch.inference_mode()
def test_rows_of_a_packed_embedding_are_those_of_its_module() -> None:
    module, ids = packed(nn.Embedding), torch.tensor([[3, 3, 60]])
    rows = EmbeddingRows.of(module)
    assert rows is not None
    want = module(ids)
    assert torch.equal(rows(ids), want)
    rows(ids).zero_()
    assert torch.equal(rows(ids), want)
    handle = module.register_forward_hook(lambda *_: want + 1)
    assert torch.equal(rows(ids), want + 1)
    handle.remove()
    module.weight = nn.Parameter(torch.ones(64, 128))
    assert torch.equal(rows(ids), torch.ones(1, 3, 128))


def test_other_embeddings_run_as_they_are() -> None:
    assert EmbeddingRows.of(packed(Scaled)) is None
    assert EmbeddingRows.of(nn.Embedding(64, 128)) is None
    assert EmbeddingRows.of(nn.Linear(2, 2)) is None
