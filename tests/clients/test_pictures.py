"""Pictures from the clients that people use, to a server whose scripted model sees."""

from __future__ import annotations

import base64
import hashlib
import os
import struct
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI

TESTS = Path(__file__).parent.parent
SAID = "Hello there, friend."


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">L", len(data)) + name + data + struct.pack(">L", zlib.crc32(name + data))


PICTURE = (
    b"\x89PNG\r\n\x1a\n"
    + chunk(b"IHDR", struct.pack(">LLBBBBB", 2, 2, 8, 0, 0, 0, 0))
    + chunk(b"IDAT", zlib.compress(b"\0\0\0" * 2))
    + chunk(b"IEND", b"")
)
BASE64 = base64.b64encode(PICTURE).decode()
DATA_URL = f"data:image/png;base64,{BASE64}"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    environment = {**os.environ, "PYTHONPATH": f"{TESTS.parent}{os.pathsep}{TESTS}", "OMP_NUM_THREADS": "1"}
    command = [os.environ.get("SERVER_PYTHON", sys.executable), str(TESTS / "seeing_server.py")]
    with subprocess.Popen(
        command, env=environment, cwd=TESTS.parent, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        process.stdin.close()


def shown_in(url: str, session: str) -> list[list[str]]:
    """The digests of the media of each message of a session."""
    messages = httpx.get(f"{url}/v1/sessions/{session}/messages").json()["data"]
    return [[one["digest"] for one in message.get("media", [])] for message in messages]


HAS_IT = [[hashlib.sha256(PICTURE).hexdigest()], []]


def test_openai_chats(url: str) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    parts: Any = [{"type": "text", "text": "See"}, {"type": "image_url", "image_url": {"url": DATA_URL}}]
    made = client.chat.completions.create(
        model="demo", messages=[{"role": "user", "content": parts}], extra_body={"session_id": "openai-chat"}
    )
    assert made.choices[0].message.content == SAID
    assert shown_in(url, "openai-chat") == HAS_IT


def test_openai_responses_and_conversations(url: str) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    picture: Any = {"type": "input_image", "image_url": DATA_URL, "detail": "auto"}
    conversation = client.conversations.create(items=[{"type": "message", "role": "user", "content": [picture]}])
    first = client.responses.create(model="demo", conversation=conversation.id, input="What is it?")
    assert first.output_text == SAID
    items = client.conversations.items.list(conversation.id, order="asc").data
    assert items[0].content[0].image_url == f"/v1/media/{HAS_IT[0][0]}"
    second = client.responses.create(model="demo", input=[{"role": "user", "content": [picture]}])
    third = client.responses.create(model="demo", input="And?", previous_response_id=second.id)
    assert third.output_text == SAID


def test_anthropic_messages_and_results(url: str) -> None:
    client = anthropic.Anthropic(base_url=url, api_key="none")
    block: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": BASE64}}
    use: Any = {"type": "tool_use", "id": "t1", "name": "look", "input": {}}
    result: Any = {"type": "tool_result", "tool_use_id": "t1", "content": [block]}
    made = client.messages.create(
        model="demo",
        max_tokens=32,
        tools=[{"name": "look", "input_schema": {"type": "object"}}],
        messages=[
            {"role": "user", "content": [block, {"type": "text", "text": "See"}]},
            {"role": "assistant", "content": [use]},
            {"role": "user", "content": [result]},
        ],
        extra_body={"session_id": "anthropic"},
    )
    assert made.content[0].text == SAID
    digests = HAS_IT[0]
    assert shown_in(url, "anthropic") == [digests, [], digests, []]


IMAGE_URL = {"type": "image_url", "image_url": {"url": DATA_URL}}
STANDARD = {"type": "image", "base64": BASE64, "mime_type": "image/png"}


@pytest.mark.parametrize("part", [IMAGE_URL, STANDARD], ids=["image_url", "standard"])
@pytest.mark.parametrize("over", ["openai", "responses", "anthropic"])
def test_langchain(url: str, over: str, part: dict[str, Any]) -> None:
    session = f"langchain-{over}-{part['type']}"
    common: Any = {"model": "demo", "api_key": "none"}
    if over == "anthropic":
        model: Any = ChatAnthropic(**common, base_url=url, model_kwargs={"extra_body": {"session_id": session}})
    else:
        model = ChatOpenAI(**common, base_url=f"{url}/v1", use_responses_api=over == "responses")
        if over == "openai":
            model = model.bind(extra_body={"session_id": session})
    answer = model.invoke([HumanMessage([{"type": "text", "text": "See"}, part])])
    assert answer.text == SAID
    if over != "responses":
        assert shown_in(url, session) == HAS_IT


def test_what_is_no_picture_is_a_typed_error(url: str) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    part: Any = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="demo", messages=[{"role": "user", "content": [part]}])
    assert refused.value.param == "messages[0].content[0].image_url.url"
