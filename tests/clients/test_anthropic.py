"""The official Anthropic client, on a socket."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from conftest import KEY
from server_process import ServerProcess

NAME: Any = [{"role": "user", "content": "My name is Walter."}]
GREEDY: Any = {"temperature": 0}
TOOL: Any = {
    "name": "add",
    "description": "Adds two numbers.",
    "input_schema": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
        "additionalProperties": False,
    },
}


@pytest.fixture(scope="module")
def ai(server: ServerProcess) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key=KEY, max_retries=0) as client:
        yield client


def text(message: anthropic.types.Message) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def test_a_conversation_pays_for_its_new_tokens(ai: anthropic.Anthropic) -> None:
    first = ai.messages.create(model="m", max_tokens=64, messages=NAME, extra_body=GREEDY)
    assert "Walter" in text(first)
    assert first.stop_reason == "end_turn"
    more: Any = [
        *NAME,
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": "What is my name?"},
    ]
    count = ai.messages.count_tokens(model="m", messages=more).input_tokens
    second = ai.messages.create(
        model="m", max_tokens=64, messages=more, extra_body=GREEDY, cache_control={"type": "ephemeral", "ttl": "1h"}
    )
    assert text(second) == "Your name is Walter."
    usage = second.usage
    assert (usage.cache_read_input_tokens or 0) > 10
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0) == count


def test_a_stream(ai: anthropic.Anthropic) -> None:
    with ai.messages.stream(model="m", max_tokens=64, messages=NAME, extra_body=GREEDY) as stream:
        pieces = list(stream.text_stream)
        final = stream.get_final_message()
    assert len(pieces) > 2
    assert "".join(pieces) == text(final)
    assert "Walter" in text(final)
    assert final.usage.output_tokens > 2


def test_a_prefilled_reply_goes_on(ai: anthropic.Anthropic) -> None:
    begun: Any = [
        *NAME,
        {"role": "assistant", "content": "Nice to meet you, Walter!"},
        {"role": "user", "content": "What is my name?"},
        {"role": "assistant", "content": "Your name is"},
    ]
    answer = ai.messages.create(model="m", max_tokens=64, messages=begun, extra_body=GREEDY)
    assert text(answer).strip() == "Walter."


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "add"}])
def test_tools(ai: anthropic.Anthropic, choice: Any) -> None:
    choice = {**choice, "disable_parallel_tool_use": True}
    asked: Any = [{"role": "user", "content": "What is 2 plus 3?"}]
    with ai.messages.stream(
        model="m", max_tokens=300, messages=asked, tools=[TOOL], tool_choice=choice, extra_body=GREEDY
    ) as stream:
        final = stream.get_final_message()
    assert final.stop_reason == "tool_use"
    (call,) = (block for block in final.content if block.type == "tool_use")
    assert set(call.input) == {"a", "b"}
    result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": "5"}
    history: Any = [*asked, {"role": "assistant", "content": final.content}, {"role": "user", "content": [result]}]
    after = ai.messages.create(model="m", max_tokens=30, messages=history, tools=[TOOL], extra_body=GREEDY)
    assert after.role == "assistant"


def test_models(ai: anthropic.Anthropic) -> None:
    assert [model.id for model in ai.models.list()] == ["m"]


def test_errors_are_typed(ai: anthropic.Anthropic, server: ServerProcess) -> None:
    with pytest.raises(anthropic.BadRequestError, match="temperature"):
        ai.messages.create(model="m", max_tokens=5, messages=NAME, extra_body={"temperature": 9})
    with pytest.raises(anthropic.NotFoundError):
        ai.messages.batches.create(requests=[])
    stranger = anthropic.Anthropic(base_url=server.url, api_key="no", max_retries=0)
    with stranger, pytest.raises(anthropic.AuthenticationError):
        stranger.messages.create(model="m", max_tokens=5, messages=NAME)
