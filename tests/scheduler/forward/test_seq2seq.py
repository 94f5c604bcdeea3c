"""Encoder-decoder models through the engine: each reply is that of a from-scratch forward of encoder and decoder."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import TWO_PARTS, make_model, make_tokenizer

from scheduler.core.engine_core import EngineCore
from scheduler.engine_assembly import build_engine
from scheduler.engine_config import EngineConfig
from scheduler.model.loader import load, prepare
from scheduler.protocol import Submit, pack_ids
from scheduler.sampling_params import Sampling, Stopping

CONFIG = EngineConfig(address="", model="", kv_memory=1 << 20, max_step_tokens=16)


def greedy(model: Any, source: list[int], count: int) -> list[int]:
    ids = [256]
    with torch.no_grad():
        for _ in range(count):
            out = model(input_ids=torch.tensor([source]), decoder_input_ids=torch.tensor([ids]), use_cache=False)
            ids.append(int(out.logits[0, -1].argmax()))
    return ids[1:]


def submit(engine: EngineCore, turn: str, source: list[int], count: int, **more: Any) -> str | None:
    stopping = Stopping(max_tokens=count, ignore_eos=True)
    refused = engine.submit(Submit(turn, "a", pack_ids(source), None, Sampling(temperature=0.0), stopping, **more))
    return refused.code if refused else None


def run(engine: EngineCore) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {}
    while not engine.idle:
        for delta in engine.step().deltas:
            tokens.setdefault(delta.turn, []).extend(delta.tokens)
        engine.check_integrity()
    return tokens


@pytest.mark.parametrize("name", TWO_PARTS)
def test_interleaved_requests(name: str) -> None:
    model = make_model(name)
    engine, facts = build_engine(CONFIG, prepare(model, make_tokenizer()))
    assert facts.encoder_decoder
    rng = random.Random(1)
    sources = [[rng.randrange(200) for _ in range(rng.choice((3, 9, 9, 20)))] for _ in range(8)]
    counts = [rng.randint(1, 12) for _ in sources]
    got: dict[str, list[int]] = {}
    for i, source in enumerate(sources):
        submit(engine, str(i), source, counts[i])
        if i % 3 == 0:
            for delta in engine.step().deltas:
                got.setdefault(delta.turn, []).extend(delta.tokens)
    for turn, tokens in run(engine).items():
        got.setdefault(turn, []).extend(tokens)
    for i, source in enumerate(sources):
        assert got[str(i)] == greedy(model, source, counts[i])
    assert len(engine.scheduler.store.residency) == 0  # nothing outlives its request


def test_prompt_and_reply_have_a_context_each() -> None:
    model = make_model("bart")
    engine, facts = build_engine(CONFIG, prepare(model, make_tokenizer()))
    assert facts.max_context == 64
    assert submit(engine, "a", [5] * 60, 60) is None
    assert submit(engine, "b", [5] * 65, 1) == "context_length_exceeded"
    assert submit(engine, "c", [5], 64) == "context_length_exceeded"
    assert submit(engine, "d", [5], 1, prompt_logprobs=0) == "invalid_prompt"
    assert len(run(engine)["a"]) == 60


def test_a_saved_encoder_decoder_is_loaded_as_one(tmp_path: Path) -> None:
    make_model("bart").save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    loaded = load(EngineConfig(address="", model=str(tmp_path)), lambda _: None)
    assert loaded.model.config.is_encoder_decoder
    assert loaded.start == (256,)


@pytest.mark.parametrize("name", TWO_PARTS)
def test_a_grammar_is_obeyed(name: str) -> None:
    engine, _ = build_engine(CONFIG, prepare(make_model(name), make_tokenizer()))
    source, grammar = pack_ids([70, 71, 72]), "start: /[a-c]{5}[x-z]/"
    assert engine.submit(Submit("t", "a", source, None, Sampling(seed=3), grammar=grammar)) is None
    text = ""
    while not engine.idle:
        text += "".join(delta.text for delta in engine.step().deltas)
    assert len(text) == 6
    assert {*text[:5]} <= {*"abc"}
    assert text[5] in "xyz"
