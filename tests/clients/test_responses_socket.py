"""Responses over a WebSocket, with the clients that have one: the official OpenAI client and the Agents SDK."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from agents import Agent, ModelSettings, function_tool, responses_websocket_session, set_tracing_disabled
from agents.models.openai_responses import ResponsesWebSocketError
from conftest import KEY
from server_process import ServerProcess

ENDS = ("response.completed", "response.incomplete", "response.failed", "error")
LONG: Any = {"model": "m", "max_output_tokens": 1500, "ignore_eos": True}
ADD: Any = {
    "type": "function",
    "name": "add",
    "description": "Adds two numbers.",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
        "additionalProperties": False,
    },
    "strict": True,
}


@pytest.fixture(scope="module")
def ai(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as client:
        yield client


def until_end(connection: Any, first: Callable[[Any], None] | None = None) -> Any:
    """The last event of a response; ``first`` is called with the first piece of text."""
    for event in connection:
        if first is not None and event.type == "response.output_text.delta":
            first(event)
            first = None
        if event.type in ENDS:
            return event
    raise AssertionError("the connection has ended")


# --- the official client ------------------------------------------------------------------------------------


def test_turns_with_a_call(ai: openai.OpenAI) -> None:
    with ai.responses.connect() as connection:
        connection.response.create(model="m", input="", instructions="Add.", store=False, generate=False, tools=[ADD])
        warmed = until_end(connection).response
        assert (warmed.status, warmed.output) == ("completed", [])
        connection.response.create(
            model="m",
            previous_response_id=warmed.id,
            instructions="Add.",
            input="What is 2 plus 3?",
            store=False,
            tools=[ADD],
            tool_choice="required",
            parallel_tool_calls=False,
        )
        asked = until_end(connection).response
        (call,) = [item for item in asked.output if item.type == "function_call"]
        assert {type(value) for value in json.loads(call.arguments).values()} == {int}
        connection.response.create(
            model="m",
            previous_response_id=asked.id,
            instructions="Add.",
            input=[{"type": "function_call_output", "call_id": call.call_id, "output": "5"}],
            store=False,
            tools=[ADD],
            max_output_tokens=30,
        )
        told = until_end(connection).response
        assert told.usage.input_tokens_details.cached_tokens >= asked.usage.input_tokens
        connection.response.create(
            model="m", previous_response_id=told.id, instructions="Add.", input="Thanks.", store=False, tools=[ADD],
            max_output_tokens=8,
        )  # fmt: skip
        last = until_end(connection).response
        assert last.usage.input_tokens_details.cached_tokens >= told.usage.input_tokens


def test_a_response_is_cancelled_and_continued(ai: openai.OpenAI) -> None:
    with ai.responses.connect() as connection:
        connection.send({"type": "response.create", "input": "Tell a story.", "store": False, **LONG})
        started = connection.recv()
        assert started.type == "response.created"
        end = until_end(
            connection,
            lambda _: connection.send({"type": "response.cancel", "response_id": started.response.id}),
        )
        assert end.response.status in ("cancelled", "incomplete")
        connection.response.create(
            model="m", previous_response_id=started.response.id, input="Go on.", store=False, max_output_tokens=4
        )
        assert until_end(connection).response.usage.input_tokens_details.cached_tokens > 10


def test_an_error_leaves_the_connection_open(ai: openai.OpenAI) -> None:
    with ai.responses.connect() as connection:
        connection.response.create(model="m", input="Hello", previous_response_id="resp_none", store=False)
        refused = until_end(connection)
        assert refused.error.code == "previous_response_not_found"
        connection.response.create(model="m", input="Hello", temperature=9, store=False)
        assert until_end(connection).error.param == "temperature"
        connection.response.create(model="m", input="Hello", max_output_tokens=4, store=False)
        assert until_end(connection).type in ENDS[:2]


def test_a_key_is_needed(server: ServerProcess) -> None:
    with (
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="another", max_retries=0) as stranger,
        pytest.raises(Exception, match=r"40[13]"),
        stranger.responses.connect(),
    ):
        pass


def test_the_client_reconnects_to_a_server_that_was_restarted(tmp_path: Path) -> None:
    seen: list[Any] = []
    running = ServerProcess(None, tmp_path)
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="x", max_retries=0) as ai:
        running.wait_healthy()
        with ai.responses.connect(on_reconnecting=seen.append, max_retries=100, max_delay=1.0) as connection:
            connection.response.create(model="m", input="My name is Walter.", max_output_tokens=8)
            stored = until_end(connection).response
            running.__exit__()
            with ServerProcess(None, tmp_path, port=running.port), ThreadPoolExecutor() as threads:
                ended = threads.submit(until_end, connection)  # it opens a new connection while it waits for events
                while not seen:
                    time.sleep(0.05)
                connection.response.create(
                    model="m", previous_response_id=stored.id, input="What is it?", max_output_tokens=8
                )
                assert ended.result(60).response.usage.input_tokens_details.cached_tokens > 10


# --- the Agents SDK -----------------------------------------------------------------------------------------

ADDED: list[tuple[int, int]] = []


@function_tool
def add(a: int, b: int) -> str:
    """Adds two numbers."""
    ADDED.append((a, b))
    return str(a + b)


def agent(**settings: Any) -> Agent[None]:
    """An agent with one tool, which it has to call first."""
    set_tracing_disabled(True)
    given: dict[str, Any] = {"tool_choice": "required", "max_tokens": 200, "temperature": 0.0, **settings}
    return Agent(name="m", model="m", instructions="Add.", tools=[add], model_settings=ModelSettings(**given))


@pytest.fixture
async def session(server: ServerProcess) -> AsyncIterator[Any]:
    """A provider whose models share one connection."""
    async with responses_websocket_session(api_key=KEY, base_url=f"{server.url}/v1") as opened:
        yield opened


def cached(result: Any) -> list[tuple[int, int]]:
    """Of each response, the tokens of the prompt and those that were cached."""
    usages = [response.usage for response in result.raw_responses]
    return [(usage.input_tokens, usage.input_tokens_details.cached_tokens) for usage in usages]


@pytest.mark.parametrize("chained", [True, False])
async def test_runs_with_calls(session: Any, chained: bool) -> None:
    ADDED.clear()
    first = await session.run(agent(store=True), "What is 2 plus 3?", auto_previous_response_id=chained)
    assert ADDED
    (_, _), (prompt, reused) = cached(first)
    assert reused >= cached(first)[0][0]
    again: Any = [*first.to_input_list(), {"role": "user", "content": "And 4 plus 5?"}]
    after = {"previous_response_id": first.last_response_id} if chained else {}
    second = await session.run(agent(store=True), "And 4 plus 5?" if chained else again, **after)
    assert len(ADDED) >= 2
    assert all(reused >= prompt for _, reused in cached(second))


async def test_a_streamed_run(session: Any) -> None:
    result = session.run_streamed(agent(store=False, tool_choice="none"), "My name is Walter.")
    kinds = [event.data.type async for event in result.stream_events() if event.type == "raw_response_event"]
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    assert result.final_output


async def test_a_run_that_is_refused_and_the_next_one(session: Any) -> None:
    with pytest.raises((ResponsesWebSocketError, openai.APIError), match="temperature"):
        await session.run(agent(temperature=9.0), "Hello")
    assert (await session.run(agent(tool_choice="none"), "Hello")).final_output


async def test_a_run_that_is_cancelled_and_the_next_one(session: Any, server: ServerProcess) -> None:
    long = agent(tool_choice="none", max_tokens=1500, extra_body={"ignore_eos": True})
    with server.slowed():
        running = asyncio.create_task(session.run(long, "Tell a story."))
        await asyncio.sleep(0.5)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    assert (await session.run(agent(tool_choice="none"), "Hello")).final_output
