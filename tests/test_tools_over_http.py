"""Tools on a real server with the demo model, whose template knows none: calls are made right by their grammar."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import openai
import pytest
from server_process import ServerProcess

from server.log.portable import PortableLog

pytestmark = pytest.mark.wide

KEYS = {"ann": "key-a", "bob": "key-b"}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {
                "unit": {"enum": ["C", "F"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
                "exact": {"type": "boolean"},
            },
            "required": ["unit", "days", "exact"],
            "additionalProperties": False,
        },
    },
}
CLOCK: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "clock",
        "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
    },
}
NAMED = {"type": "function", "function": {"name": "weather"}}
ASKED: dict[str, Any] = {"role": "user", "content": "How is the weather?"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    keys = [part for name, key in KEYS.items() for part in ("--api-key", f"{name}={key}")]
    with ServerProcess(None, tmp_path_factory.mktemp("data"), *keys) as running:
        yield running


def ask(server: ServerProcess, tenant: str = "ann", path: str = "/v1/chat/completions", **body: Any) -> Any:
    body = {"temperature": 0, "max_tokens": 500, **body}
    return server.answer(path, body, authorization=f"Bearer {KEYS[tenant]}")


def called(choice: dict[str, Any]) -> list[tuple[str, Any]]:
    assert choice["finish_reason"] == "tool_calls"
    functions = [call["function"] for call in choice["message"]["tool_calls"]]
    return [(function["name"], json.loads(function["arguments"])) for function in functions]


def check(arguments: dict[str, Any]) -> None:
    assert arguments.keys() == {"unit", "days", "exact"}
    assert arguments["unit"] in ("C", "F")
    assert arguments["days"] in range(1, 10)
    assert arguments["exact"] in (True, False)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_forced_call_obeys_its_schema(server: ServerProcess, seed: int, choice: Any) -> None:
    body = {"messages": [ASKED], "tools": [WEATHER, CLOCK], "tool_choice": choice, "parallel_tool_calls": False}
    answer = ask(server, temperature=1, seed=seed, **body)
    ((name, arguments),) = called(answer["choices"][0])
    assert choice == "required" or name == "weather"
    if name == "weather":
        check(arguments)


def test_the_official_client_streams_a_call(server: ServerProcess) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEYS["ann"], max_retries=0)
    messages: Any = [ASKED]
    tools: Any = [WEATHER]
    with client.chat.completions.stream(
        model="m",
        messages=messages,
        tools=tools,
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=500,
        seed=1,
    ) as stream:
        pieces = [event.arguments_delta for event in stream if event.type == "tool_calls.function.arguments.delta"]
        message = stream.get_final_completion().choices[0].message
    assert message.tool_calls is not None
    (call,) = message.tool_calls
    assert call.function.arguments == "".join(pieces)
    check(json.loads(call.function.arguments))


def test_a_session_with_a_call_computes_its_new_tokens_only_and_right(server: ServerProcess) -> None:
    first = ask(server, session_id="s", messages=[ASKED], tools=[WEATHER], tool_choice=NAMED)
    call = first["choices"][0]["message"]["tool_calls"][0]
    result = {"role": "tool", "tool_call_id": call["id"], "content": "My name is Walter."}
    question = {"role": "user", "content": "What is my name?"}
    second = ask(server, session_id="s", messages=[result, question], tool_choice="none", max_tokens=12)
    logged = first["usage"]["total_tokens"] - 1  # the last token was sampled, and never fed
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= logged - 1
    headers = {"authorization": f"Bearer {KEYS['ann']}"}
    capsule = httpx.get(f"{server.url}/v1/sessions/s/export?kv=false", headers=headers).content
    with zipfile.ZipFile(io.BytesIO(capsule)) as files:
        log = msgspec.json.decode(files.read("turns.json"), type=PortableLog)
    prompt = [*log.tokens][: second["usage"]["prompt_tokens"]]
    # Another tenant shares no cache: the same ids, all computed at once, are answered alike.
    anew = ask(server, "bob", "/v1/completions", prompt=prompt, max_tokens=12)
    assert anew["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert anew["choices"][0]["text"] == second["choices"][0]["message"]["content"]
