"""The official OpenAI client, on a socket: chats, streams, tools, structured output, completions, models, responses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from conftest import KEY
from pydantic import BaseModel
from server_process import ServerProcess

NAME: Any = [{"role": "user", "content": "My name is Walter."}]
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}


class Person(BaseModel):
    name: str
    age: int


@pytest.fixture(scope="module")
def ai(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as client:
        yield client


def test_chat(ai: openai.OpenAI) -> None:
    first = ai.chat.completions.create(model="m", messages=NAME, temperature=0)
    reply = first.choices[0].message.content
    assert reply is not None
    assert "Walter" in reply
    more: Any = [*NAME, first.choices[0].message.to_dict(), {"role": "user", "content": "What is my name?"}]
    second = ai.chat.completions.create(model="m", messages=more, temperature=0)
    assert second.choices[0].message.content == "Your name is Walter."
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    assert (second.usage.prompt_tokens_details.cached_tokens or 0) > 10


def test_stream(ai: openai.OpenAI) -> None:
    whole = ai.chat.completions.create(model="m", messages=NAME, temperature=0)
    chunks = list(
        ai.chat.completions.create(
            model="m",
            messages=NAME,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True, "include_obfuscation": True},
        )
    )
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert chunks[-1].usage is not None
    assert all(chunk.obfuscation is not None for chunk in chunks if chunk.choices)


def test_stream_helper(ai: openai.OpenAI) -> None:
    with ai.chat.completions.stream(model="m", messages=NAME, temperature=0) as stream:
        events = [event.type for event in stream]
        final = stream.get_final_completion()
    assert "content.delta" in events
    assert "Walter" in (final.choices[0].message.content or "")


def test_many_choices_with_logprobs(ai: openai.OpenAI) -> None:
    answer = ai.chat.completions.create(
        model="m", messages=NAME, n=3, seed=1, temperature=1.2, logprobs=True, top_logprobs=2
    )
    assert len(answer.choices) == 3
    for choice in answer.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.content


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
def test_tools(ai: openai.OpenAI, choice: Any) -> None:
    asked: Any = [{"role": "user", "content": "What is 2 plus 3?"}]
    answer = ai.chat.completions.create(
        model="m", messages=asked, tools=[TOOL], tool_choice=choice, parallel_tool_calls=False, temperature=0
    )
    assert answer.choices[0].finish_reason == "tool_calls"
    calls = answer.choices[0].message.tool_calls
    assert calls is not None
    assert len(calls) == 1
    assert calls[0].type == "function"
    assert {type(value) for value in json.loads(calls[0].function.arguments).values()} == {int}
    result: Any = {"role": "tool", "tool_call_id": calls[0].id, "content": "5"}
    history: Any = [*asked, answer.choices[0].message.to_dict(), result]
    after = ai.chat.completions.create(model="m", messages=history, tools=[TOOL], max_tokens=30)
    assert after.choices[0].message.role == "assistant"


def test_streamed_tools(ai: openai.OpenAI) -> None:
    asked: Any = [{"role": "user", "content": "What is 2 plus 3?"}]
    with ai.chat.completions.stream(
        model="m", messages=asked, tools=[TOOL], tool_choice="required", parallel_tool_calls=False, temperature=0
    ) as stream:
        names = {event.type for event in stream}
        final = stream.get_final_completion()
    assert "tool_calls.function.arguments.delta" in names
    calls = final.choices[0].message.tool_calls
    assert calls is not None
    assert set(calls[0].function.parsed_arguments) == {"a", "b"}  # type: ignore[call-overload]


def test_parse(ai: openai.OpenAI, terse: dict[str, int]) -> None:
    asked: Any = [{"role": "user", "content": "Tell me of a person."}]
    answer = ai.chat.completions.parse(
        model="m", messages=asked, response_format=Person, temperature=0, logit_bias=terse, max_tokens=200
    )
    assert isinstance(answer.choices[0].message.parsed, Person)


def test_completions(ai: openai.OpenAI) -> None:
    answer = ai.completions.create(model="m", prompt=["Hello", "Once"], max_tokens=5, echo=True, logprobs=2)
    assert [choice.text[:4] for choice in answer.choices] == ["Hell", "Once"]
    pieces = list(ai.completions.create(model="m", prompt="Hello", max_tokens=5, stream=True, temperature=0))
    assert len(pieces) > 1


def test_models(ai: openai.OpenAI) -> None:
    assert [model.id for model in ai.models.list()] == ["m"]
    assert ai.models.retrieve("m").id == "m"


def test_errors_are_typed(ai: openai.OpenAI, server: ServerProcess) -> None:
    with pytest.raises(openai.BadRequestError) as wrong:
        ai.chat.completions.create(model="m", messages=NAME, temperature=9)
    assert wrong.value.param == "temperature"
    with pytest.raises(openai.BadRequestError):  # of a model that chats
        ai.embeddings.create(model="m", input="x")
    with pytest.raises(openai.NotFoundError):
        ai.moderations.create(input="x")
    stranger = openai.OpenAI(base_url=f"{server.url}/v1", api_key="no", max_retries=0)
    with stranger, pytest.raises(openai.AuthenticationError):
        stranger.models.list()


def test_sessions(ai: openai.OpenAI) -> None:
    ai.chat.completions.create(model="m", messages=NAME, temperature=0, extra_body={"session_id": "w"})
    asked: Any = [{"role": "user", "content": "What is my name?"}]
    answer = ai.chat.completions.create(model="m", messages=asked, temperature=0, extra_body={"session_id": "w"})
    assert answer.choices[0].message.content == "Your name is Walter."


def test_responses(ai: openai.OpenAI) -> None:
    first = ai.responses.create(model="m", input="My name is Walter.", temperature=0)
    assert "Walter" in first.output_text
    second = ai.responses.create(model="m", input="What is my name?", previous_response_id=first.id, temperature=0)
    assert second.output_text == "Your name is Walter."
    with ai.responses.stream(
        model="m", input="What is my name?", previous_response_id=first.id, temperature=0
    ) as stream:
        kinds = [event.type for event in stream]
        assert stream.get_final_response().output_text == "Your name is Walter."
    assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
    assert ai.responses.retrieve(first.id).output_text == first.output_text
    ai.responses.delete(second.id)
    with pytest.raises(openai.NotFoundError):
        ai.responses.retrieve(second.id)


def test_conversations(ai: openai.OpenAI) -> None:
    conversation = ai.conversations.create(
        items=[
            {"type": "message", "role": "user", "content": "My name is Walter."},
            {"type": "message", "role": "assistant", "content": "Nice to meet you, Walter!"},
        ]
    )
    answer = ai.responses.create(model="m", input="What is my name?", conversation=conversation.id, temperature=0)
    assert answer.output_text == "Your name is Walter."
    items = list(ai.conversations.items.list(conversation.id, order="asc"))
    assert len(items) == 4
    ai.conversations.delete(conversation.id)
