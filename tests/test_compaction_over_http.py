"""Compaction on a real server: behind a summary every token is that of a forward from scratch over the new
conversation, the summary is written on the cache of the old one, and the old one goes on from its KV.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_process import ServerProcess
from tiny_models import logits, make_tokenizer, model_of, save_model, token_of

from server.chat.compaction import ASKED
from server.schemas.sealed_compaction import unseal_messages

pytestmark = pytest.mark.wide

ROOM = 2048  # tokens, which are bytes
LONG = "one two three five " * 12
LOGPROBS = "message.output_text.logprobs"


class Reader:
    """Asks for greedy responses, and checks each token of them against the model itself."""

    def __init__(self, url: str, model: Any) -> None:
        self._url = url
        self._model = model
        self._tokenizer = make_tokenizer()
        self._tokenizer.model_max_length = ROOM

    def ask(self, prompt: list[int] | None, input: Any, **body: Any) -> tuple[dict[str, Any], list[int]]:
        """A response, and its timeline after ``prompt`` (None: that of the compaction that it begins with)."""
        fields = {"input": input, "temperature": 0, "ignore_eos": True, "max_output_tokens": 6, "include": [LOGPROBS]}
        answer = httpx.post(f"{self._url}/v1/responses", json={**fields, **body}, timeout=120)
        assert answer.status_code == 200, answer.text
        told: dict[str, Any] = answer.json()
        first, last = told["output"][0], told["output"][-1]
        if prompt is None:
            prompt = self.render(self.opened(first))
        reply = [token_of(entry) for entry in last["content"][0]["logprobs"]]
        assert told["usage"]["input_tokens"] == len(prompt)
        assert reply == logits(self._model, [*prompt, *reply])[len(prompt) - 1 : -1].argmax(-1).tolist()
        assert len(reply) == 6
        return told, prompt + reply

    def opened(self, item: dict[str, Any]) -> list[dict[str, str]]:
        """The messages of a compaction."""
        messages = unseal_messages(item["encrypted_content"])
        assert messages is not None
        assert (messages[0].content, messages[1].role) == (ASKED, "assistant")
        return [{"role": message.role, "content": message.content} for message in messages]

    def render(self, messages: list[dict[str, str]]) -> list[int]:
        """The prompt of a whole conversation."""
        ids: list[int] = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        return ids

    def then(self, timeline: list[int], text: str) -> list[int]:
        """The prompt of a user's message after a reply that was cut off."""
        tail = f"<|im_end|>\n<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
        ids: list[int] = self._tokenizer.encode(tail)
        return timeline + ids


def save_with_room(folder: Path) -> Path:
    """The model with a context that holds a conversation and the question for its summary."""
    path = save_model("llama", folder)
    for name, field in (("config.json", "max_position_embeddings"), ("tokenizer_config.json", "model_max_length")):
        file = path / name
        file.write_text(json.dumps({**json.loads(file.read_text()), field: ROOM}))
    return path


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    folder = tmp_path_factory.mktemp("data")
    with ServerProcess(save_with_room(folder), folder, "--dtype", "float32") as server:
        yield Reader(server.url, model_of("llama"))


def test_behind_a_summary_tokens_equal_a_forward_and_the_old_branch_goes_on(reader: Reader) -> None:
    rule = [{"type": "compaction", "compact_threshold": 400}]
    talk = [{"role": "user", "content": "First " + LONG}]
    one, before = reader.ask(reader.render(talk), talk)
    two, after = reader.ask(None, "Second " + LONG, previous_response_id=one["id"], context_management=rule)
    assert two["cache"]["compaction"]["cached_tokens"] == len(before) - 1  # only the question was computed
    three, _ = reader.ask(reader.then(after, "Third"), "Third", previous_response_id=two["id"])
    assert three["usage"]["input_tokens_details"]["cached_tokens"] == len(after) - 1
    back, _ = reader.ask(reader.then(before, "Other"), "Other", previous_response_id=one["id"])
    assert back["usage"]["input_tokens_details"]["cached_tokens"] >= len(before) - 1
    conversation = [
        *reader.opened(two["output"][0]),
        {"role": "assistant", "content": two["output"][1]["content"][0]["text"]},
    ]
    sent = [*two["output"], {"role": "user", "content": "Third"}]
    reader.ask(reader.render([*conversation, {"role": "user", "content": "Third"}]), sent, store=False)


def test_what_is_too_long_for_one_summary_is_folded_and_still_equal(reader: Reader) -> None:
    talk = [{"role": role, "content": f"{number} {LONG}"} for number in range(6) for role in ("user", "assistant")]
    front = {"role": "system", "content": "Be kind."}
    told, _ = reader.ask(None, [*talk, {"role": "user", "content": "And?"}], truncation="auto")
    assert told["cache"]["compaction"]["summaries"] > 1
    body = {"input": [front, *talk, {"role": "user", "content": "And?"}]}
    refused = httpx.post(f"{reader._url}/v1/responses", json=body, timeout=120)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
