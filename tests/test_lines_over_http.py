"""Lines on a real server: every token of a continued conversation is that of a forward from scratch over the same ids,
also where the text of a reply would be other ids; and after a restart the line goes on from its KV on disk.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from server_process import ServerProcess
from tiny_models import logits, model_of, save_model

pytestmark = pytest.mark.wide

TURNS = 5
HINT = {"x-openwebui-chat-id": "chat"}


class Agent:
    """A client that sends its whole history as text. The model is random: its replies are bytes rather than words."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.messages: list[dict[str, Any]] = []
        self.timeline: list[int] = []

    def ask(self, url: str, headers: dict[str, str]) -> dict[str, Any]:
        """The receipt of a reply, each of whose tokens is the likeliest."""
        self.messages.append({"role": "user", "content": f"And {len(self.messages)}?"})
        body = {"messages": self.messages, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        answer = httpx.post(
            f"{url}/v1/chat/completions", json={**body, "return_token_ids": True}, headers=headers, timeout=120
        )
        assert answer.status_code == 200, answer.text
        told: dict[str, Any] = answer.json()
        prompt, reply = told["prompt_token_ids"], told["choices"][0]["token_ids"]
        assert reply == logits(self.model, [*prompt, *reply])[len(prompt) - 1 : -1].argmax(-1).tolist()
        cache: dict[str, Any] = {**told["cache"], "appends": prompt[: len(self.timeline)] == self.timeline}
        self.timeline = prompt + reply
        self.messages.append({"role": "assistant", "content": told["choices"][0]["message"]["content"]})
        return cache


@pytest.mark.slow
def test_a_continued_line_equals_a_forward_from_scratch_also_after_a_restart(tmp_path: Path) -> None:
    model = save_model("llama", tmp_path)
    agent, other = Agent(model_of("llama")), Agent(model_of("llama"))
    with ServerProcess(model, tmp_path) as server:
        for turn in range(TURNS):
            cache = agent.ask(server.url, HINT)
            assert (cache["appends"], cache["miss"], cache["line"]["turns"]) == (True, None, turn)
            without = other.ask(server.url, {})
        assert not without["appends"]  # its replies are other ids as text: this test would see that
        name = cache["line"]["id"]
    with ServerProcess(model, tmp_path) as server:
        cache = agent.ask(server.url, HINT)
        assert (cache["appends"], cache["line"]["id"], cache["line"]["turns"]) == (True, name, TURNS)
        assert (cache["recomputed"], cache["miss"], cache["reused"]["disk"] > 0) == (0, None, True)
        assert httpx.get(f"{server.url}/v1/sessions/{name}").json()["turns"] == TURNS + 1
        assert httpx.delete(f"{server.url}/v1/sessions/{name}").status_code == 200
        assert agent.ask(server.url, HINT)["line"]["outcome"] == "begun"
