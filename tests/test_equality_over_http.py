"""Equality from the outside: a real server's greedy tokens are those of a from-scratch transformers forward.

Six architectures, 32 interleaved chats of 4 turns, an edited third message, n = 4, with memory for all and for few.
Most are slow: what an architecture changes is in the engine, where ``scheduler/core/test_equality.py`` has all of them.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from server_process import ServerProcess
from tiny_models import logits, make_tokenizer, model_of, save_model, token_of

ARCHITECTURES = ("llama", "qwen3", "gemma3", "gpt_oss", "deepseek_v3", "llama4")
MARKS: dict[tuple[str, str], Any] = {
    ("llama", "for all"): pytest.mark.wide,
    ("gemma3", "for few"): [],
    ("deepseek_v3", "for few"): pytest.mark.wide,
}
MEMORY = {"for all": (), "for few": ("--kv-memory", "1M", "--host-memory", "1M")}
SESSIONS, TURNS = 32, 4

Message = dict[str, Any]


class Chats:
    """Chats against one server, each reply checked token by token against the model itself."""

    def __init__(self, client: httpx.AsyncClient, model: Any) -> None:
        self._client = client
        self._model = model
        self._tokenizer = make_tokenizer()
        self.checked = 0

    async def chat(self, number: int, turns: int) -> None:
        """One chat; in the last turn the third message is edited first."""
        rng = random.Random(number)
        messages: list[Message] = []
        for turn in range(turns):
            await asyncio.sleep(rng.random() / 50)
            messages.append({"role": "user", "content": self._words(rng)})
            reply = await self._ask(messages, rng.randint(2, 8))
            messages.append({"role": "assistant", "content": reply})
            if turn == turns - 2:
                messages[2:] = [{"role": "user", "content": self._words(rng)}]
                messages.append({"role": "assistant", "content": await self._ask(messages, 3)})

    async def four_choices(self, number: int) -> None:
        """n = 4 at temperature 0: four equal choices."""
        messages = [{"role": "user", "content": self._words(random.Random(number))}]
        body = self._body(messages, 6) | {"n": 4}
        choices = (await self._post(body))["choices"]
        assert [c["index"] for c in choices] == [0, 1, 2, 3]
        for choice in choices:
            self._check(self._render(messages), choice)

    async def _ask(self, messages: list[Message], tokens: int) -> str:
        answer = await self._post(self._body(messages, tokens))
        (choice,) = answer["choices"]
        prompt = self._render(messages)
        assert answer["usage"]["prompt_tokens"] == len(prompt)
        self._check(prompt, choice)
        text: str = choice["message"]["content"]
        return text

    def _check(self, prompt: list[int], choice: dict[str, Any]) -> None:
        """Each token is the most likely one after all before it, says one forward without a cache."""
        tokens = [token_of(entry) for entry in choice["logprobs"]["content"]]
        rows = logits(self._model, [*prompt, *tokens])[len(prompt) - 1 : -1]
        assert tokens == rows.argmax(-1).tolist()
        for entry, row in zip(choice["logprobs"]["content"], rows, strict=True):
            assert entry["logprob"] == pytest.approx(torch.log_softmax(row, -1).max().item(), abs=1e-3)
        self.checked += len(tokens)

    async def _post(self, body: dict[str, Any]) -> dict[str, Any]:
        response = await self._client.post("/v1/chat/completions", json=body)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def _body(self, messages: list[Message], tokens: int) -> dict[str, Any]:
        return {
            "model": "m",
            "messages": messages,
            "max_tokens": tokens,
            "temperature": 0,
            "logprobs": True,
            "ignore_eos": True,
        }

    def _render(self, messages: list[Message]) -> list[int]:
        ids: list[int] = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        return ids

    @staticmethod
    def _words(rng: random.Random) -> str:
        return " ".join(rng.choice(("red", "green", "blue", "one", "two", "three")) for _ in range(rng.randint(1, 6)))


async def _everything(url: str, model: Any) -> int:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as client:
        chats = Chats(client, model)
        await asyncio.gather(*(chats.chat(i, TURNS) for i in range(SESSIONS)))
        await asyncio.gather(*(chats.four_choices(i) for i in range(4)))
    return chats.checked


@pytest.mark.parametrize(
    ("name", "memory"),
    [
        pytest.param(name, memory, marks=MARKS.get((name, memory), pytest.mark.slow))
        for memory in MEMORY
        for name in ARCHITECTURES
    ],
)
def test_tokens_over_http_equal_a_forward_from_scratch(name: str, memory: str, tmp_path: Path) -> None:
    model = save_model(name, tmp_path)
    with ServerProcess(model, tmp_path, "--dtype", "float32", *MEMORY[memory]) as server:
        checked = asyncio.run(_everything(server.url, model_of(name)))
        assert checked > SESSIONS * TURNS * 2
        reused = server.metric("warmturn_cached_tokens_total")
        assert reused > 0
        if memory == "for few":
            assert server.metric("warmturn_evictions_total") > 0
        assert server.metric("warmturn_running") == 0
    assert server.process.returncode == 0
