"""Ollama's Python client, unmodified: chats, tools, formats, streams, and what it asks of a model."""

from __future__ import annotations

import ollama
import pytest
from conftest import KEY
from server_process import ServerProcess


@pytest.fixture
def client(server: ServerProcess) -> ollama.Client:
    return ollama.Client(host=server.url, headers={"authorization": f"Bearer {KEY}"})


HELLO = [{"role": "user", "content": "My name is Ann."}]


def weather(city: str) -> str:
    """Tell the weather.

    Args:
        city: The city.
    """
    return f"Rain in {city}."


def test_chats_whole_and_streamed(client: ollama.Client) -> None:
    options = {"temperature": 0, "num_predict": 24}
    reply = client.chat("demo", messages=HELLO, options=options)
    assert reply.message.content
    assert reply.done_reason in ("stop", "length")
    pieces = [*client.chat("demo", messages=HELLO, options=options, stream=True)]
    assert "".join(piece.message.content or "" for piece in pieces) == reply.message.content
    assert pieces[-1].eval_count == reply.eval_count


def test_generate(client: ollama.Client) -> None:
    options = {"temperature": 0, "num_predict": 8}
    assert client.generate("demo", "Hello", system="Be kind.", options=options).response
    assert client.generate("demo", "Hello", raw=True, options=options).eval_count == 8
    assert client.generate("demo", "").done_reason == "load"


def test_tools_and_formats(client: ollama.Client) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    options = {"temperature": 0, "num_predict": 48}
    assert client.chat("demo", messages=HELLO, format=schema, options=options).message.content
    reply = client.chat("demo", messages=HELLO, tools=[weather], options=options)
    asked = {"role": "assistant", "tool_calls": [{"function": {"name": "weather", "arguments": {"city": "Oslo"}}}]}
    result = {"role": "tool", "tool_name": "weather", "content": weather("Oslo")}
    assert client.chat("demo", messages=[*HELLO, asked, result], tools=[weather], options=options).done
    assert reply.done


def test_what_it_asks_of_a_model(client: ollama.Client) -> None:
    assert [model.model for model in client.list().models] == ["m"]
    assert [model.model for model in client.ps().models] == ["m"]
    shown = client.show("demo")
    assert shown.capabilities
    assert "completion" in shown.capabilities


def test_errors_are_its_own(client: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError, match="images") as caught:
        client.chat("demo", messages=[{"role": "user", "content": "a", "images": [b"aaaa"]}])
    assert caught.value.status_code == 400
