"""The official client's resources for responses and conversations, all of their verbs, against the app."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import openai
import pytest
from http_context import Site, served

CALLED = 'Let me see.<tool_call>\n{"name": "weather", "arguments": {"days": 2}}\n</tool_call>'
TOOLS: Any = [{"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": False}]


@asynccontextmanager
async def client(site: Site) -> AsyncIterator[openai.AsyncOpenAI]:
    """The client over the app, without a socket and without retries."""
    transport: Any = httpx2.ASGITransport(site.app)
    async with httpx2.AsyncClient(transport=transport) as http:
        yield openai.AsyncOpenAI(api_key="key-a", base_url="http://warm/v1", http_client=http, max_retries=0)


@served({"ann": "key-a"})
async def test_responses(site: Site) -> None:
    async with client(site) as ai:
        one = await ai.responses.create(model="demo", input="Hello", metadata={"a": "b"})
        assert one.output_text == "Hello there, friend."
        assert await ai.responses.retrieve(one.id, include=["message.output_text.logprobs"]) == one
        asked = [item async for item in ai.responses.input_items.list(one.id, limit=1)]
        assert [item.type for item in asked] == ["message"]
        counted = await ai.responses.input_tokens.count(model="demo", input="Hello")
        assert one.usage is not None
        assert counted.input_tokens == one.usage.input_tokens
        queued = await ai.responses.create(model="demo", input="Hello", background=True)
        while (done := await ai.responses.retrieve(queued.id)).status != "completed":
            await asyncio.sleep(0.01)
        assert done.output_text == one.output_text
        assert (await ai.responses.cancel(queued.id)).status == "completed"
        await ai.responses.delete(one.id)
        with pytest.raises(openai.NotFoundError):
            await ai.responses.retrieve(one.id)
        with pytest.raises(openai.BadRequestError, match="previous_response_id"):
            await ai.responses.create(model="demo", input="x", previous_response_id=one.id)


@served({"ann": "key-a"})
async def test_the_stream_helper_puts_calls_together(site: Site) -> None:
    site.engine.reply = CALLED
    async with client(site) as ai:
        async with ai.responses.stream(model="demo", input="Weather?", tools=TOOLS) as stream:
            seen = [event.type async for event in stream]
            final = await stream.get_final_response()
        assert seen.count("response.output_item.done") == 2
        said, call = final.output
        assert said.type == "message"
        assert call.type == "function_call"
        assert (call.name, call.arguments.replace(" ", "")) == ("weather", '{"days":2}')
        site.engine.reply = "Sunny."
        output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sun"}
        told = await ai.responses.create(model="demo", input=[output], previous_response_id=final.id, tools=TOOLS)
        assert told.output_text == "Sunny."
        resent: Any = [{"role": "user", "content": "Weather?"}, *(item.to_dict() for item in final.output), output]
        whole = await ai.responses.create(model="demo", input=resent, tools=TOOLS, store=False)
        assert whole.usage is not None
        assert told.usage is not None
        assert whole.usage.input_tokens == told.usage.input_tokens
        background = await ai.responses.create(model="demo", input="Hi", background=True)
        async with ai.responses.stream(response_id=background.id) as stream:
            assert [event.type async for event in stream][-1] == "response.completed"


@served({"ann": "key-a"})
async def test_conversations(site: Site) -> None:
    async with client(site) as ai:
        made = await ai.conversations.create(items=[{"role": "user", "content": "My name is Bo."}], metadata={"a": "b"})
        assert (await ai.conversations.retrieve(made.id)).metadata == {"a": "b"}
        assert (await ai.conversations.update(made.id, metadata={})).metadata == {}
        added = await ai.conversations.items.create(made.id, items=[{"role": "user", "content": "Hello."}])
        reply = await ai.responses.create(model="demo", conversation=made.id, input="And?")
        listed = [item async for item in ai.conversations.items.list(made.id, order="asc", limit=1)]
        assert [item.id for item in listed][1] == added.data[0].id
        assert listed[-1].id == reply.output[0].id
        got = await ai.conversations.items.retrieve(str(listed[0].id), conversation_id=made.id)
        assert got == listed[0]
        assert (await ai.conversations.items.delete(str(got.id), conversation_id=made.id)).id == made.id
        assert len([item async for item in ai.conversations.items.list(made.id)]) == 3
        assert (await ai.conversations.delete(made.id)).deleted is True
        with pytest.raises(openai.NotFoundError):
            await ai.conversations.retrieve(made.id)
