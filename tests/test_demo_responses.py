"""Responses and conversations of a real server with the demo model, through the official client, across restarts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest
from openai_document import faults
from server_process import ServerProcess

pytestmark = pytest.mark.wide


def client(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def goes_on(response: Any, past: Any) -> bool:
    """Whether nothing of the past was computed again but its last token, which was never fed."""
    return bool(response.usage.input_tokens_details.cached_tokens >= past.usage.total_tokens - 1)


@pytest.mark.slow
def test_a_follow_up_costs_its_new_tokens_also_after_a_restart(tmp_path: Path) -> None:
    with ServerProcess(None, tmp_path) as first, client(first) as ai:
        one = ai.responses.create(input="My name is Walter.", temperature=0)
        for fact in (
            "My secret code is 4821.",
            "I live in Paris.",
            "My favorite color is blue.",
            "My pet is called Rex.",
        ):
            two = one = ai.responses.create(input=fact, previous_response_id=one.id, temperature=0)
        conversation = ai.conversations.create(items=[{"role": "user", "content": "My name is Emma."}])
        three = ai.responses.create(conversation=conversation.id, input="My code is 77.", temperature=0)
    with ServerProcess(None, tmp_path) as again, client(again) as ai:
        told = ai.responses.create(input="What is my name?", previous_response_id=two.id, temperature=0)
        assert told.output_text == "Your name is Walter."
        assert goes_on(told, two), told.usage
        assert told.to_dict()["cache"]["reused"]["disk"] > 0  # type: ignore[index]
        fork = ai.responses.create(input="Where do I live?", previous_response_id=two.id, temperature=0)
        assert fork.output_text == "You live in Paris."
        assert goes_on(fork, two), fork.usage
        assert fork.id.rpartition("_")[0] != told.id.rpartition("_")[0] == two.id.rpartition("_")[0]
        named = ai.responses.create(conversation=conversation.id, input="What is my name?", temperature=0)
        assert named.output_text == "Your name is Emma."
        assert goes_on(named, three), named.usage
        assert ai.responses.retrieve(two.id) == two
        assert not faults("Response", named.to_dict())


def test_a_format_holds_and_a_stream_adds_up(demo_server: ServerProcess) -> None:
    schema: dict[str, Any] = {"type": "object", "properties": {"name": {"enum": ["Ada", "Bo"]}}, "required": ["name"]}
    schema["additionalProperties"] = False
    text: Any = {"format": {"type": "json_schema", "name": "person", "schema": schema, "strict": True}}
    with client(demo_server) as ai:
        asked: Any = {
            "model": "m",
            "input": "My name is Ada.",
            "temperature": 0,
            "text": text,
            "max_output_tokens": 200,
        }
        with ai.responses.stream(**asked) as stream:
            told = list(stream)
        final: Any = told[-1]
        assert told[0].type == "response.created"
        assert final.type == "response.completed", final
        assert json.loads(final.response.output_text).keys() == {"name"}
        deltas = [event.delta for event in told if event.type == "response.output_text.delta"]
        assert "".join(deltas) == final.response.output_text


def test_a_required_function_is_called_and_its_output_is_read(demo_server: ServerProcess) -> None:
    tools: Any = [
        {
            "type": "function",
            "name": "weather",
            "parameters": {"type": "object", "properties": {"days": {"type": "integer"}}, "required": ["days"]},
            "strict": True,
        }
    ]
    with client(demo_server) as ai:
        asked: Any = {"tools": tools, "temperature": 0, "max_output_tokens": 200, "parallel_tool_calls": False}
        called = ai.responses.create(input="Weather?", tool_choice="required", **asked)
        call: Any = called.output[-1]
        assert (call.type, call.name) == ("function_call", "weather")
        output: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}]
        told = ai.responses.create(input=output, previous_response_id=called.id, tool_choice="none", **asked)
        assert told.output[0].type == "message"
        assert goes_on(told, called), told.usage
        assert [item.type for item in ai.responses.input_items.list(told.id)] == ["function_call_output"]


def test_a_response_in_the_background_is_followed_and_cancelled(demo_server: ServerProcess) -> None:
    with client(demo_server) as ai:
        long: Any = {"ignore_eos": True, "min_tokens": 1000}
        queued = ai.responses.create(input="Tell me all.", background=True, max_output_tokens=1000, extra_body=long)
        assert queued.status == "queued"
        seen = []
        for event in ai.responses.retrieve(queued.id, stream=True, starting_after=1):
            seen.append(event.sequence_number)
            if len(seen) == 5:
                break
        assert seen == [2, 3, 4, 5, 6]
        cancelled = ai.responses.cancel(queued.id)
        assert cancelled.status == "cancelled"
        assert ai.responses.retrieve(queued.id) == cancelled
        done: Any = ai.responses.create(input="Hello", background=True, stream=True, temperature=0)
        live: list[Any] = [event.to_dict() for event in done]
        later: Any = ai.responses.retrieve(live[0]["response"]["id"], stream=True, starting_after=3)
        assert [event.to_dict() for event in later] == live[4:]
