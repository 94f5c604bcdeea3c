"""LiteLLM as a library, by each of the two APIs."""

from __future__ import annotations

from typing import Any

import litellm
import pytest
from conftest import KEY
from server_process import ServerProcess

NAME: Any = [{"role": "user", "content": "My name is Walter."}]
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}},
            "required": ["a"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(params=["openai", "hosted_vllm", "anthropic"])
def api(request: Any, server: ServerProcess) -> dict[str, Any]:
    base = server.url if request.param == "anthropic" else f"{server.url}/v1"
    return {"model": f"{request.param}/m", "api_base": base, "api_key": KEY, "temperature": 0, "max_tokens": 200}


def test_chat(api: dict[str, Any]) -> None:
    first = litellm.completion(messages=NAME, **api)
    more = [*NAME, first.choices[0].message, {"role": "user", "content": "What is my name?"}]
    second = litellm.completion(messages=more, **api)
    assert second.choices[0].message.content == "Your name is Walter."
    assert second.usage.prompt_tokens_details.cached_tokens > 10


def test_stream(api: dict[str, Any]) -> None:
    chunks = list(litellm.completion(messages=NAME, stream=True, stream_options={"include_usage": True}, **api))
    assert "Walter" in "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert chunks[-1].usage.completion_tokens > 2


def test_tools(api: dict[str, Any]) -> None:
    answer = litellm.completion(messages=NAME, tools=[TOOL], tool_choice="required", parallel_tool_calls=False, **api)
    assert answer.choices[0].finish_reason == "tool_calls"
    assert '"a"' in answer.choices[0].message.tool_calls[0].function.arguments


def test_text_completion(server: ServerProcess) -> None:
    answer = litellm.text_completion(
        model="text-completion-openai/m", prompt="Hello", max_tokens=5, api_base=f"{server.url}/v1", api_key=KEY
    )
    assert answer.usage.completion_tokens <= 5


def test_errors_are_typed(api: dict[str, Any]) -> None:
    with pytest.raises(litellm.AuthenticationError):
        litellm.completion(messages=NAME, num_retries=0, **{**api, "api_key": "no"})
    with pytest.raises(litellm.BadRequestError):
        litellm.completion(messages=NAME, num_retries=0, **{**api, "temperature": 9.0})
