"""Each kind of pooling against its formula over transformers' own forward of one text, and sentence-transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pooling_kit import CHAIN, LONGEST, TEXTS, WIDTH, body_of, hidden_of, pooling_tokenizer, save_cross_encoder
from pooling_kit import save_embedder as save
from torch.nn.functional import normalize
from transformers import BertForSequenceClassification

from scheduler.engine_config import EngineConfig
from scheduler.model.loader import LoadFailed
from scheduler.model_facts import ModelFacts
from scheduler.pooling.pooler import Pooler
from scheduler.pooling.pooler_loader import load_pooler
from scheduler.pooling.recipe import BadRecipe, read_recipe
from scheduler.pooling_messages import PoolInput
from scheduler.protocol import Loading, TokenizerRead, pack_ids
from server.chat.chat_tokenizer import ChatTokenizer

WEIGHTS = torch.arange(1.0, 100.0)[:, None]
FORMULAS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "cls": lambda hidden: hidden[0],
    "max": lambda hidden: hidden.max(dim=0).values,
    "mean": lambda hidden: hidden.mean(dim=0),
    "mean_sqrt_len_tokens": lambda hidden: hidden.sum(dim=0) / len(hidden) ** 0.5,
    "weightedmean": lambda hidden: (hidden * WEIGHTS[: len(hidden)]).sum(dim=0) / WEIGHTS[: len(hidden)].sum(),
    "lasttoken": lambda hidden: hidden[-1],
}
OLD_NAMES = {
    "cls": "pooling_mode_cls_token",
    "max": "pooling_mode_max_tokens",
    "mean": "pooling_mode_mean_tokens",
    "mean_sqrt_len_tokens": "pooling_mode_mean_sqrt_len_tokens",
    "weightedmean": "pooling_mode_weightedmean_tokens",
    "lasttoken": "pooling_mode_lasttoken",
}
NEAR = 1e-5
DENSE = ("Dense", {"in_features": WIDTH, "out_features": 6, "activation_function": "torch.nn.modules.activation.Tanh"})
CHAINS = {
    "plain": (("Pooling", {"pooling_mode": "mean"}),),
    "unit": CHAIN,
    "two modes": (("Pooling", {"pooling_mode": ["mean", "max"]}), ("Normalize", {})),
    "dense": (("Pooling", {"pooling_mode": "cls"}), DENSE, ("Dropout", {"dropout": 0.1}), ("Normalize", {})),
}


def load(folder: Path) -> tuple[Pooler, ModelFacts]:
    """The model of a folder, as an engine loads it."""
    recipe = read_recipe(str(folder))
    assert recipe is not None
    return load_pooler(EngineConfig("", str(folder), device="cpu"), recipe, lambda message: None)


def inputs(texts: list[str]) -> list[PoolInput]:
    return [PoolInput(pack_ids(pooling_tokenizer().encode(text))) for text in texts]


@pytest.mark.parametrize("causal", [False, True], ids=["both ways", "causal"])
@pytest.mark.parametrize("old", [False, True], ids=["new names", "old names"])
def test_each_kind_is_its_formula_together_and_alone(tmp_path: Path, causal: bool, old: bool) -> None:
    tokenizer = pooling_tokenizer()
    want = {text: hidden_of(body_of(causal), tokenizer.encode(text)) for text in TEXTS}
    for mode, formula in FORMULAS.items():
        options = dict.fromkeys(OLD_NAMES.values(), False) | {OLD_NAMES[mode]: True} if old else {"pooling_mode": mode}
        pooler, facts = load(save(tmp_path / mode, [("Pooling", options)], causal=causal))
        assert facts.pooling is not None
        assert (facts.task, facts.pooling.pooling, facts.pooling.width, facts.pooling.pads) == (
            "embed",
            (mode,),
            WIDTH,
            True,
        )
        together = pooler.run(inputs(TEXTS))
        for row, one, text in zip(together, inputs(TEXTS), TEXTS, strict=True):
            assert (row - formula(want[text])).abs().max() < NEAR, (mode, text)
            assert (row - pooler.run([one])[0]).abs().max() < NEAR, (mode, text)


def test_what_stands_behind_the_pooling(tmp_path: Path) -> None:
    pooler, facts = load(save(tmp_path / "m", CHAINS["dense"]))
    assert facts.pooling is not None
    assert (facts.pooling.width, facts.pooling.normalised) == (6, True)
    weights = torch.Generator().manual_seed(2)
    weight, bias = torch.randn(6, WIDTH, generator=weights), torch.randn(6, generator=weights)
    for row, text in zip(pooler.run(inputs(TEXTS)), TEXTS, strict=True):
        first = hidden_of(body_of(False), pooling_tokenizer().encode(text))[0]
        assert (row - normalize(torch.tanh(weight @ first + bias), dim=0)).abs().max() < NEAR


def test_a_prompt_may_be_left_out_of_the_pooling(tmp_path: Path) -> None:
    text, skip = "query: A cat", 8
    ids = pooling_tokenizer().encode(text)
    hidden = hidden_of(body_of(False), ids)
    for mode in FORMULAS:
        pooler, _ = load(save(tmp_path / mode, [("Pooling", {"pooling_mode": mode, "include_prompt": False})]))
        (row,) = pooler.run([PoolInput(pack_ids(ids), skip=skip)])
        if mode == "weightedmean":  # a token weighs by its place in the whole input
            weights = WEIGHTS[skip : len(ids)]
            want = (hidden[skip:] * weights).sum(dim=0) / weights.sum()
        else:
            want = FORMULAS[mode](hidden[skip:])
        assert (row - want).abs().max() < NEAR, mode
        whole, _ = load(save(tmp_path / f"{mode} whole", [("Pooling", {"pooling_mode": mode})]))
        (row,) = whole.run([PoolInput(pack_ids(ids), skip=skip)])
        assert (row - FORMULAS[mode](hidden)).abs().max() < NEAR, mode


def test_a_cross_encoder_gives_the_activation_of_its_logits(tmp_path: Path) -> None:
    tokenizer = pooling_tokenizer()
    pairs = [("A cat?", "The cat sat."), ("A cat?", "Moon"), ("Why is the sun red?", "ab" * 9)]
    made = [tokenizer(*pair, return_token_type_ids=True) for pair in pairs]
    given = [PoolInput(pack_ids(one["input_ids"]), bytes(one["token_type_ids"])) for one in made]
    kinds: dict[str, tuple[dict[str, Any], Callable[[torch.Tensor], torch.Tensor]]] = {
        "usual": ({}, torch.sigmoid),
        "named": ({"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, lambda x: x),
        "older": ({"sbert_ce_default_activation_function": "torch.nn.modules.activation.Tanh"}, torch.tanh),
    }
    for name, (settings, activation) in kinds.items():
        pooler, facts = load(save_cross_encoder(tmp_path / name, **settings))
        assert (facts.task, facts.pooling and facts.pooling.width, facts.mode) == ("score", 1, "packed")
        alone = BertForSequenceClassification.from_pretrained(tmp_path / name)
        scores = pooler.run(given)
        for row, one in zip(scores, made, strict=True):
            with torch.inference_mode():
                logits = alone(**{key: torch.tensor([value]) for key, value in one.items()}).logits[0]
            assert (row - activation(logits)).abs().max() < NEAR, name
    assert load(save_cross_encoder(tmp_path / "three", labels=3))[0].run(given).shape == (3, 3)


def test_the_longest_input_is_what_the_files_say_and_the_model_can_run(tmp_path: Path) -> None:
    assert load(save(tmp_path / "tokenizer's"))[1].max_context == LONGEST
    assert load(save(tmp_path / "own", body={"max_seq_length": 20}))[1].max_context == 20
    folder = save(tmp_path / "wrong", body={"max_seq_length": 70})  # there are positions for 64
    assert load(folder)[1].max_context == 64


def test_texts_may_be_lower_cased(tmp_path: Path) -> None:
    folder = save(tmp_path / "m", body={"do_lower_case": True})
    recipe = read_recipe(str(folder))
    told: list[Loading | TokenizerRead] = []
    assert recipe is not None
    load_pooler(EngineConfig("", str(folder), device="cpu"), recipe, told.append)
    (parts,) = [message.parts for message in told if isinstance(message, TokenizerRead)]
    assert parts is not None
    tokens = ChatTokenizer.of_parts(parts)
    assert tokens.encode("CAT", special=True) == pooling_tokenizer().encode("cat")
    tokens.close()


@pytest.mark.parametrize(
    ("chain", "why"),
    [
        ([("Pooling", {"pooling_mode": "median"})], "median"),
        ([("Pooling", {}), ("Conv", {})], "Conv"),
        ([("Normalize", {}), ("Pooling", {})], "does not pool"),
        ([("Pooling", {}), ("Dense", {**DENSE[1], "activation_function": "os.system"})], "torch.nn"),
        ([("Pooling", {}), ("Normalize", {"module_input_name": "token_embeddings"})], "token_embeddings"),
    ],
)
def test_what_is_not_known_is_refused_by_name(tmp_path: Path, chain: Any, why: str) -> None:
    with pytest.raises(LoadFailed, match=why):
        load(save(tmp_path / "m", chain))


def test_a_model_in_a_folder_of_its_own_is_refused(tmp_path: Path) -> None:
    folder = save(tmp_path / "m")
    modules = json.loads((folder / "modules.json").read_text())
    modules[0]["path"] = "0_Transformer"
    (folder / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(BadRecipe, match="folder"):
        read_recipe(str(folder))


def test_weights_that_are_missing_and_matter_are_told(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = save(tmp_path / "m")
    file = folder / "model.safetensors"
    weights = load_file(file)
    save_file(
        {name: tensor for name, tensor in weights.items() if not name.startswith("pooler")}, file, {"format": "pt"}
    )
    load(folder)  # a head that nothing here uses
    left = {name: tensor for name, tensor in weights.items() if "layer.1.output.dense" not in name}
    save_file(left, file, {"format": "pt"})
    with pytest.raises(LoadFailed, match="missing"):
        load(folder)


@pytest.mark.parametrize("name", CHAINS)
def test_sentence_transformers_gives_the_same(tmp_path: Path, name: str) -> None:
    library = pytest.importorskip("sentence_transformers")
    prompts = {"prompts": {"query": "query: "}}
    for mode in FORMULAS if name == "plain" else [""]:
        chain = [("Pooling", {"pooling_mode": mode})] if mode else CHAINS[name]
        folder = save(tmp_path / f"m{mode}", chain, said=prompts)
        theirs = library.SentenceTransformer(str(folder), device="cpu").encode(TEXTS, prompt_name="query")
        ours = load(folder)[0].run(inputs([f"query: {text}" for text in TEXTS])).numpy()
        assert np.abs(theirs - ours).max() < NEAR, mode


def test_sentence_transformers_scores_the_same(tmp_path: Path) -> None:
    library = pytest.importorskip("sentence_transformers")
    folder = save_cross_encoder(tmp_path / "m")
    pairs = [("A cat?", "The cat sat."), ("A cat?", "x" * 90), ("y" * 90, "Why?"), ("z" * 90, "u" * 80)]
    theirs = library.CrossEncoder(str(folder), device="cpu").predict(pairs)
    pooler, facts = load(folder)
    tokens = ChatTokenizer(pooling_tokenizer())
    made = [tokens.encode_within(one, facts.max_context, other) for one, other in pairs]
    ours = pooler.run([PoolInput(pack_ids(one.ids), bytes(one.types)) for one in made])[:, 0].numpy()
    tokens.close()
    assert np.abs(theirs - ours).max() < NEAR
