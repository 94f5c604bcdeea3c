"""Embedding models in GGUF files: the vectors of the dequantised weights, and files that cannot be followed."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_kit import F32, Q8_0, Stored, store, write_file
from gguf_loaded import rewritten, settings
from gguf_models import NAMES, written
from gguf_words_kit import WORDS, word_tokens
from torch.nn.functional import normalize
from transformers import AutoModel, BertConfig, ModernBertConfig, NomicBertConfig

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
# Encoders: their configuration, and what it and the file say beside what all of them do.
_ROPES = {
    f"{kind}_attention": {"rope_type": "default", "rope_theta": base}
    for kind, base in (("full", 500.0), ("sliding", 100.0))
}
_LOCAL = {"local_attention": 16, "hidden_activation": "silu", "rope_parameters": _ROPES, "norm_eps": 1e-12}
_SAID_OF_LOCAL = {
    "attention.sliding_window": 16,
    "attention.sliding_window_pattern": 3,
    "attention.layer_norm_rms_epsilon": 1e-12,
    "hidden_activation": "silu",
    "rope.freq_base": 500.0,
    "rope.freq_base_swa": 100.0,
}
_ONE_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
ENCODERS: dict[str, tuple[Any, dict[str, Any], dict[str, object]]] = {
    "bert": (BertConfig, {"type_vocab_size": 2}, {}),
    "modern-bert": (ModernBertConfig, _LOCAL, _SAID_OF_LOCAL),
    "nomic-bert": (NomicBertConfig, {"type_vocab_size": 2, **_ONE_ROPE}, {"rope.freq_base": 500.0}),
}
MARKS = {"bos_token_id": 2, "eos_token_id": None, "pad_token_id": 0}
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


@torch.no_grad()
def encoder_file(path: Path, label: str, **said: object) -> tuple[Path, Any]:
    """A file of an encoder with words as tokens, and the model with the dequantised weights."""
    torch.manual_seed(3)
    sizes = {"vocab_size": len(WORDS), "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    kind, further, more = ENCODERS[label]
    config = kind(**sizes, **MARKS, intermediate_size=96, max_position_embeddings=64, **further)
    model, parts = AutoModel.from_config(config, dtype=torch.float32).eval(), dict[str, list[torch.Tensor]]()
    for name, weight in model.state_dict().items():
        weight.add_(torch.randn_like(weight) * 0.2)
        base, _, ending = re.sub(r"\.\d+\.", ".N.", name).rpartition(".")
        if (found := NAMES[label].get(base)) is not None:  # several parameters may be one tensor
            number = re.search(r"\.(\d+)\.", name)
            tensor = f"{found}.{ending}".replace(".N.", f".{number[1]}." if number else "")
            parts.setdefault(tensor, []).append(weight)
    tensors: dict[str, Stored] = {}
    for tensor, weights in parts.items():
        plain = tensor.startswith(("position_embd", "token_types"))
        tensors[tensor] = store(torch.cat(weights), F32 if plain else Q8_0)
        for weight, values in zip(weights, tensors[tensor].values.chunk(len(weights)), strict=True):
            weight.copy_(values)
    keys: dict[str, object] = {"block_count": 2, "context_length": 64, "embedding_length": 64}
    keys |= {"feed_forward_length": 96, "attention.head_count": 4, "attention.layer_norm_epsilon": 1e-12}
    keys |= {"attention.causal": False, "pooling_type": 2, **more}
    named = {f"{label}.{key}": value for key, value in keys.items()}
    return write_file(path, {"general.architecture": label, **named, **word_tokens(), **said}, tensors), model


@pytest.mark.parametrize(("label", "matrices"), [("bert", 6), ("modern-bert", 4), ("nomic-bert", 7)])
def test_an_encoder_with_words_as_tokens(label: str, matrices: int, tmp_path: Path) -> None:
    path, model = encoder_file(tmp_path / "x.gguf", label)
    pooler, facts = load(path)
    rows = [[2, *(5 + number % 30 for number in ids), 3] for ids in INPUTS]
    with torch.no_grad():
        states = [model(torch.tensor([row])).last_hidden_state[0] for row in rows]
    given = [PoolInput(pack_ids(row)) for row in rows]
    want = torch.stack([normalize(one[0], dim=0) for one in states])
    torch.testing.assert_close(pooler.run(given), want, rtol=0, atol=NEAR)
    assert (facts.task, facts.max_context, facts.mode) == ("embed", 64, "packed")
    assert sum(quantised_weight_of(each) is not None for each in pooler.model.parameters()) == 1 + 2 * matrices
    mine, theirs = settings(path).to_dict(), model.config.to_dict()
    for name in theirs.keys() - {"architectures", "dtype", "cls_token_id", "sep_token_id"}:
        assert mine[name] == (pytest.approx(theirs[name]) if isinstance(theirs[name], float) else theirs[name]), name


def test_encoders_that_are_not_read(tmp_path: Path) -> None:
    for label, said, told in (
        ("bert", {"tokenizer.ggml.model": "t5"}, "what stands before them"),
        ("nomic-bert", {"tokenizer.ggml.model": "gpt2"}, "what stands before them"),
        ("modern-bert", {"modern-bert.attention.sliding_window": 0.5}, "which of its layers have a sliding window"),
        ("modern-bert", {"modern-bert.attention.sliding_window_pattern": 0}, "which of its layers have a sliding"),
    ):
        path, _ = encoder_file(tmp_path / "x.gguf", label, **said)
        with pytest.raises(LoadFailed, match=told):
            load(path)


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
