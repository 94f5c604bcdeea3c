"""Requests of clients that run in editors, browsers and on desktops, rebuilt from their source: each is answered."""

from __future__ import annotations

from typing import Any

import pytest
from http_context import Site, served

MARK = {"cache_control": {"type": "ephemeral"}}
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
USAGE = {"stream": True, "stream_options": {"include_usage": True}}
SYSTEM = {"role": "system", "content": "You are an agent."}


def text(words: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": words, **more}


def tool(name: str, **more: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": {"path": {"type": ["string", "null"]}}, "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": name, "parameters": schema, **more}}


def call(id: str, name: str, arguments: str = "{}") -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


READ = call("call_1", "read_file", '{"path":"a"}')
SEALED = {"reasoning_text": "Hm.", "reasoning_opaque": "x"}
ASKED = {"role": "user", "content": "Read a."}
CALL_READ: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [READ]}
CALLED = [ASKED, CALL_READ]
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "(see following user message for image)"}

REQUESTS: dict[str, dict[str, Any]] = {
    "roo": {
        "temperature": 0,
        "max_tokens": 8,
        "messages": [
            {"role": "system", "content": [text("You are Roo.", **MARK)]},
            {"role": "user", "content": [text("Look."), text("<environment_details>", **MARK)]},
            {"role": "assistant", "content": None, "tool_calls": [READ], "reasoning_details": [{"type": "x"}]},
            RESULT,
            {"role": "user", "content": [PICTURE, text("<environment_details>", **MARK)]},
        ],
        "tools": [tool("read_file", strict=True), tool("mcp--files--read")],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        **USAGE,
    },
    "roo, binary reasoning": {"messages": [SYSTEM, ASKED], "thinking": {"type": "enabled"}, **USAGE},
    "roo, a prompt to be improved": {"messages": [ASKED]},
    "cline, routed": {
        "messages": [{"role": "system", "content": [text("You are Cline.", **MARK)]}, *CALLED, RESULT],
        "tools": [tool("read_file")],
        "tool_choice": "auto",
        "reasoning": {"enabled": True, "effort": "medium"},
        **USAGE,
    },
    "copilot, beside its sealed reasoning": {
        "messages": [
            {**ASKED, "copilot_cache_control": MARK["cache_control"]},
            {**CALL_READ, "reasoning_text": "Hm.", "reasoning_opaque": "x"},
            RESULT,
        ],
        "tools": [tool("read_file")],
        **USAGE,
    },
    "zed": {
        "messages": [
            {"role": "system", "content": []},
            {"role": "user", "content": [text("Look."), text("a.rs")]},
            {"role": "assistant", "content": [], "tool_calls": [READ], "reasoning_content": "Hm."},
            {"role": "tool", "content": [text("1"), PICTURE], "tool_call_id": "call_1"},
        ],
        "tools": [tool("read_file")],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "max_completion_tokens": 8,
        "temperature": 1.0,
        "prompt_cache_key": "00000000-0000-4000-8000-000000000001",
        "reasoning_effort": "medium",
        **USAGE,
    },
    "zed, a title": {"messages": [*CALLED, {**RESULT, "content": []}, ASKED], "stop": [], "stream": True},
    "goose": {
        "messages": [
            SYSTEM,
            *CALLED,
            {**RESULT, "content": "This tool result included an image that is uploaded in the next message."},
            {"role": "user", "content": [PICTURE]},
        ],
        "tools": [tool("developer__shell"), tool("read_file")],
        "temperature": 0.7,
        "max_tokens": 8,
        **USAGE,
    },
    "continue, autocompletion": {
        "messages": [ASKED],
        "max_tokens": 8,
        "prediction": {"type": "content", "content": "x"},
    },
    "open webui": {"messages": [SYSTEM, ASKED], "stream": True},
    "open webui, a title": {"messages": [ASKED], "stream": False, "max_completion_tokens": 8},
    "open webui, parameters of Ollama": {
        "messages": [ASKED],
        "options": {"num_ctx": 4096},
        "keep_alive": "5m",
        "think": True,
        **USAGE,
    },
    "librechat": {"messages": [SYSTEM, ASKED], "user": "u1", "web_search": True, **USAGE},
    "openrouter": {
        "messages": [ASKED],
        "usage": {"include": True},
        "provider": {"allow_fallbacks": True},
        "transforms": ["middle-out"],
        "reasoning": {"max_tokens": 4, "exclude": False},
    },
    "dashscope": {
        "messages": [SYSTEM, ASKED],
        "metadata": {"sessionId": "s", "promptId": "p"},
        "vl_high_resolution_images": True,
        "enable_thinking": False,
        **USAGE,
    },
    "glm": {"messages": [ASKED], "thinking": {"type": "enabled", "clear_thinking": False}, **USAGE},
    "llama.cpp": {"messages": [ASKED], "cache_prompt": True, "id_slot": -1, "max_tokens": -1},
    "aider, keeping a cache": {
        "messages": [
            {"role": "system", "content": [text("Act.", **MARK)]},
            {"role": "user", "content": [text("map", **MARK)]},
        ],
        "max_tokens": 1,
        "temperature": 0,
        "stream": False,
    },
}


@pytest.mark.parametrize("name", REQUESTS)
@served(any_model=True)
async def test_a_request_is_answered(site: Site, name: str) -> None:
    answer = await site.http.post("/v1/chat/completions", json={"model": "some-model", **REQUESTS[name]})
    assert answer.status_code == 200, answer.text
    assert '"error"' not in answer.text
    if REQUESTS[name].get("stream"):
        assert answer.text.rstrip().endswith("data: [DONE]")


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "once", "stream_options": {"include_usage": True}, "max_tokens": 8},
        {"prompt": ["once"], "logprobs": None, "n": 1, "seed": None, "frequency_penalty": 0, "max_tokens": 8},
    ],
)
@served(any_model=True)
async def test_a_completion_is_answered(site: Site, body: dict[str, Any]) -> None:
    answer = await site.http.post("/v1/completions", json={"model": "some-model", **body})
    assert answer.status_code == 200, answer.text
