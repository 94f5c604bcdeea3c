"""The official client against the app: it chats, streams and gets its own typed errors."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import openai
import pytest
from http_context import HELLO, Site, reply_ids, served

from server.engine.engine import TurnRefused


@asynccontextmanager
async def client(site: Site, key: str = "key-a") -> AsyncIterator[openai.AsyncOpenAI]:
    """The client over the app, without a socket and without retries."""
    transport: Any = httpx2.ASGITransport(site.app)
    async with httpx2.AsyncClient(transport=transport) as http:
        yield openai.AsyncOpenAI(api_key=key, base_url="http://warm/v1", http_client=http, max_retries=0)


@served({"ann": "key-a"})
async def test_it_chats_and_streams(site: Site) -> None:
    messages: Any = HELLO
    async with client(site) as ai:
        whole = await ai.chat.completions.create(model="demo", messages=messages, logprobs=True, top_logprobs=2, n=2)
        assert [c.message.content for c in whole.choices] == ["Hello there, friend."] * 2
        assert whole.usage is not None
        assert whole.usage.prompt_tokens_details is not None
        assert whole.choices[0].logprobs is not None
        stream = await ai.chat.completions.create(
            model="demo", messages=messages, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Hello there, friend."
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == len(reply_ids()) + 1


@served({"ann": "key-a"})
async def test_it_completes_lists_and_continues_sessions(site: Site) -> None:
    messages: Any = HELLO
    async with client(site) as ai:
        completion = await ai.completions.create(model="demo", prompt="Once", logprobs=1, echo=True)
        assert completion.choices[0].text == "OnceHello there, friend."
        assert [model.id async for model in ai.models.list()] == ["demo"]
        assert (await ai.models.retrieve("demo")).id == "demo"
        for _ in range(2):
            reply = await ai.chat.completions.create(model="demo", messages=messages, extra_body={"session_id": "s"})
        assert reply.usage is not None
        assert reply.usage.prompt_tokens_details is not None
        assert (reply.usage.prompt_tokens_details.cached_tokens or 0) > 14
        assert reply.model_extra is not None
        assert set(reply.model_extra) == {"session_id", "cache"}


@served({"ann": "key-a"})
async def test_it_gets_its_typed_errors(site: Site) -> None:
    messages: Any = HELLO
    async with client(site, "wrong") as ai:
        with pytest.raises(openai.AuthenticationError):
            await ai.models.list()
    async with client(site) as ai:
        with pytest.raises(openai.NotFoundError) as missing:
            await ai.chat.completions.create(model="other", messages=messages)
        assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
        with pytest.raises(openai.BadRequestError) as wrong:
            await ai.chat.completions.create(model="demo", messages=messages, temperature=9)
        assert wrong.value.param == "temperature"
        site.engine.refusal = TurnRefused("queue_full", "The queue is full.", 1)
        with pytest.raises(openai.RateLimitError):
            await ai.chat.completions.create(model="demo", messages=messages, stream=True)
        site.engine.refusal, site.engine.ends_badly = None, RuntimeError("x")
        with pytest.raises(openai.InternalServerError):
            await ai.chat.completions.create(model="demo", messages=messages)
        with pytest.raises(openai.APIError, match="The server failed"):
            async for _ in await ai.chat.completions.create(model="demo", messages=messages, stream=True):
                pass


@served({"ann": "key-a"})
async def test_it_streams_calls_of_tools_and_answers_them(site: Site) -> None:
    messages: Any = [{"role": "user", "content": "How is Rome?"}]
    function = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
    tools: Any = [{"type": "function", "function": function}]
    said = 'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    site.engine.reply = f"{said}\n{said[12:]}"
    async with client(site) as ai:
        async with ai.chat.completions.stream(model="demo", messages=messages, tools=tools) as stream:
            deltas = [e.arguments_delta async for e in stream if e.type == "tool_calls.function.arguments.delta"]
            message = (await stream.get_final_completion()).choices[0].message
        assert message.content == "Let me see."
        assert message.tool_calls is not None
        assert [(c.function.name, c.function.arguments) for c in message.tool_calls] == [
            ("weather", '{"city": "Rome"}')
        ] * 2
        assert "".join(deltas) == '{"city": "Rome"}' * 2
        site.engine.reply = "Sunny."
        results: Any = [{"role": "tool", "tool_call_id": c.id, "content": "Sun."} for c in message.tool_calls]
        told: Any = message.model_dump(
            exclude={"tool_calls": {"__all__": {"function": {"parsed_arguments"}}}, "parsed": True}
        )
        final = await ai.chat.completions.create(model="demo", messages=[*messages, told, *results], tools=tools)
        assert final.choices[0].message.content == "Sunny."
        assert final.choices[0].finish_reason == "stop"
