"""Embedding models in GGUF files: the vectors of the dequantised weights, and files that cannot be followed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_kit import Q8_0, Stored, store
from gguf_loaded import rewritten
from gguf_models import written
from torch.nn.functional import normalize

from scheduler.engine_config import EngineConfig
from scheduler.model.loader import LoadFailed
from scheduler.model_facts import ModelFacts
from scheduler.model_task import task_of_files
from scheduler.pooling.pooler import Pooler
from scheduler.pooling.pooler_loader import load_pooler
from scheduler.pooling.recipe import BadRecipe, PoolingRecipe, read_recipe
from scheduler.pooling_messages import PoolInput
from scheduler.protocol import pack_ids
from scheduler.weights.quantised_weight import quantised_weight_of

INPUTS = [[(7 * i + 3) % 250 for i in range(count)] for count in (40, 9, 23)]
NEAR = 3e-4  # inputs of products are rounded to 16 bits
MODES = {1: "mean", 2: "cls", 3: "lasttoken"}
DENSE = {"dense_2_feat_in": 64, "dense_2_feat_out": 96, "dense_3_feat_in": 96, "dense_3_feat_out": 32}


def saying(
    path: Path, label: str, kind: object = 3, change: Mapping[str, Stored] | None = None, **said: object
) -> Path:
    """The file with a type of pooling, and more that it says by the name of its architecture."""
    named = {f"{label}.{key.replace('__', '.')}": value for key, value in {"pooling_type": kind, **said}.items()}
    return rewritten(path, label, {**(change or {})}, **named)


def load(path: Path) -> tuple[Pooler, ModelFacts]:
    """The model of a file, as an engine loads it."""
    recipe = read_recipe(str(path))
    assert recipe is not None
    return load_pooler(EngineConfig("", str(path), device="cpu"), recipe, lambda message: None)


def pooled(hidden: torch.Tensor, mode: str) -> torch.Tensor:
    """One input's vector of its hidden states ``[tokens, width]``."""
    return {"mean": hidden.mean(dim=0), "cls": hidden[0], "lasttoken": hidden[-1]}[mode]


@torch.no_grad()
def hidden_of(model: Any, ids: list[int]) -> torch.Tensor:
    states: torch.Tensor = model.model(torch.tensor([ids])).last_hidden_state[0]
    return states


def check(pooler: Pooler, want: list[torch.Tensor]) -> None:
    """The vectors of the inputs, each alone and all together."""
    given = [PoolInput(pack_ids(ids)) for ids in INPUTS]
    expected = torch.stack([normalize(vector, dim=0) for vector in want])
    alone = torch.cat([pooler.run([one]) for one in given])
    torch.testing.assert_close(alone, expected, rtol=0, atol=NEAR)
    if pooler.shares:
        torch.testing.assert_close(pooler.run(given), expected, rtol=0, atol=NEAR)


@pytest.mark.parametrize("kind", MODES)
def test_a_causal_model_pools_as_its_file_says(kind: int, tmp_path: Path) -> None:
    path, want = written(tmp_path / "x.gguf", "qwen3", Q8_0)
    path = saying(path, "qwen3", kind)
    pooler, facts = load(path)
    check(pooler, [pooled(hidden_of(want, ids), MODES[kind]) for ids in INPUTS])
    assert facts.pooling is not None
    assert (facts.task, facts.pooling.pooling, facts.pooling.normalised) == ("embed", (MODES[kind],), True)
    assert facts.max_context == 256
    held = [weight for each in pooler.model.parameters() if (weight := quantised_weight_of(each)) is not None]
    assert len(held) == 1 + 2 * 7
    assert facts.weight_bytes < path.stat().st_size


def test_a_model_that_looks_both_ways_has_dense_layers(tmp_path: Path) -> None:
    path, want = written(tmp_path / "x.gguf", "gemma-embedding", Q8_0)
    layers = [store(torch.randn(*shape), Q8_0) for shape in ((96, 64), (32, 96))]
    change = {f"dense_{number}.weight": each for number, each in enumerate(layers, 2)}
    pooler, facts = load(saying(path, "gemma-embedding", 1, change, **DENSE))
    first, second = (each.values for each in layers)
    check(pooler, [second @ (first @ hidden_of(want, ids).mean(dim=0)) for ids in INPUTS])
    assert facts.pooling is not None
    assert facts.pooling.width == 32
    lacking = saying(path, "gemma-embedding", 1, {"dense_2.weight": layers[0]}, **DENSE)
    with pytest.raises(LoadFailed, match=r"the file has no dense_3\.weight"):
        load(lacking)


def test_prompts_beside_the_file(tmp_path: Path) -> None:
    path, _ = written(tmp_path / "x.gguf", "qwen3", Q8_0)
    said = {"prompts": {"query": "find: ", "number": 5}, "default_prompt_name": "query"}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(said))
    recipe = read_recipe(str(saying(path, "qwen3")))
    assert isinstance(recipe, PoolingRecipe)
    assert (recipe.prompts, recipe.default_prompt) == ({"query": "find: "}, "query")


def test_what_a_file_is_for(tmp_path: Path) -> None:
    path, _ = written(tmp_path / "x.gguf", "qwen3", Q8_0)
    for kind, task in ((None, "generate"), (0, "generate"), (3, "embed"), (4, "generate"), ([3], "generate")):
        said = str(saying(path, "qwen3", kind))
        assert task_of_files(said) == task
        if kind in (None, 0):
            assert read_recipe(said) is None
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(b"GGUF")
    for name in (str(damaged), str(tmp_path / "none.gguf")):
        assert read_recipe(name) is None
    assert task_of_files(str(damaged)) == "generate"
    assert task_of_files("nobody/nothing/none.gguf") is None


def test_what_cannot_be_followed_is_told_in_a_line(tmp_path: Path) -> None:
    path, _ = written(tmp_path / "x.gguf", "qwen3", Q8_0)
    other, _ = written(tmp_path / "y.gguf", "gemma-embedding", Q8_0)
    cases: list[tuple[Path, str, object, dict[str, object], str]] = [
        (path, "qwen3", 4, {}, "pools for scores of texts"),
        (path, "qwen3", [3], {}, "in another way that is not known"),
        (path, "qwen3", 3, {"attention__causal": False}, "its attention looks both ways"),
        (other, "gemma-embedding", 1, {}, "does not have the dense layers"),
    ]
    for file, label, kind, said, told in cases:
        file = saying(file, label, kind, None, **said)
        with pytest.raises(BadRecipe, match=told):
            read_recipe(str(file))
