"""The demo model in bfloat16 with every fast path on, against a plain float32 forward of the same weights."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from cache.memory.memory_tier import MemoryTier
from cache.pages.pool import PagePool
from cache.pages.session import SessionCache
from cache.store import SessionStore
from scheduler.model.loader import PAGE_SIZE, LoadedModel, prepare
from scheduler.model.runner import ModelRunner

DEMO = Path(__file__).resolve().parents[3] / "server" / "demo"
DRIFT = 3e-2  # root mean square over the spread of the logits; measured 0.009
DIALOGUES = (
    ("My name is Walter.", "My secret code is 4821.", "What is my name?", "What is my secret code?"),
    ("Hello!", "My name is Anna.", "What is my name?"),
    ("My secret code is 7305.", "My name is Peter.", "What is my secret code?", "What is my name?"),
)


@pytest.fixture(scope="module")
def served() -> LoadedModel:
    """The demo model as a server in bfloat16 loads it."""
    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.bfloat16).eval()
    return prepare(model, AutoTokenizer.from_pretrained(DEMO))


@pytest.fixture(scope="module")
def plain() -> Any:
    """The same weights, rounded to bfloat16, in float32."""
    return AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.bfloat16).float().eval()


class Talk:
    """One session, resumed turn after turn."""

    def __init__(self, served: LoadedModel) -> None:
        tier = MemoryTier(64, PAGE_SIZE, torch.device("cpu"))
        self._runner = ModelRunner(served.verdict.mode, tier, served.rope)
        self._store = SessionStore(PagePool(tier, MemoryTier(0, PAGE_SIZE, torch.device("cpu"))), None, None)
        self._session = SessionCache("talk", None)
        self._session.token_ids = array("i")
        self._session.warm = self._session.running = True

    def feed(self, tokens: list[int]) -> torch.Tensor:
        """The logits ``[len(tokens), V]`` of what comes next."""
        self._session.token_ids.extend(tokens)
        self._store.reserve(self._session, len(self._session.token_ids))
        return self._runner.run([(self._session, len(tokens))], range(len(tokens)))


@pytest.mark.parametrize("words", DIALOGUES, ids=lambda words: words[0])
def test_a_conversation_says_what_float32_says(served: LoadedModel, plain: Any, words: tuple[str, ...]) -> None:
    assert served.verdict.mode.fusion, "the demo model's layers do not run as programs"
    messages: list[dict[str, str]] = []
    talk, fed, got = Talk(served), list[int](), list[torch.Tensor]()
    for text in words:
        messages.append({"role": "user", "content": text})
        ids = served.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert ids[: len(fed)] == fed
        new, reply = ids[len(fed) :], list[int]()
        while len(reply) < 40:
            logits = talk.feed(new)
            got.append(logits)
            fed += new
            token = int(logits[-1].argmax())
            with torch.inference_mode():
                want = plain(torch.tensor([fed])).logits[0]
            assert token == int(want[-1].argmax())
            if token in served.eos_token_ids:
                break
            reply.append(token)
            new = [token]
        messages.append({"role": "assistant", "content": served.tokenizer.decode(reply)})
    drift = (torch.cat(got) - want).square().mean().sqrt() / want.std()
    assert drift < DRIFT, drift
