"""The main job on real input: the demo model, served as `make serve` does, used through the official client."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from server_process import ServerProcess, until

Message = dict[str, Any]
NAMED = {"X-Session-ID": "paris", "X-Session-Create": "true"}


@pytest.fixture(scope="module")
def server(demo_server: ServerProcess) -> ServerProcess:
    return demo_server


@asynccontextmanager
async def client(server: ServerProcess) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as opened:
        yield opened


def ask(server: ServerProcess, body: dict[str, Any], **headers: str) -> Any:
    return server.answer("/v1/chat/completions", {"temperature": 0, **body}, **headers)


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def test_recall_in_turn_three_with_new_messages_only(server: ServerProcess) -> None:
    ask(server, {"session_id": "walter", "messages": [user("My name is Walter.")]})
    ask(server, {"session_id": "walter", "messages": [user("My secret code is 4821.")]})
    answer = ask(server, {"session_id": "walter", "messages": [user("What is my name?")]})
    assert answer["choices"][0]["message"]["content"] == "Your name is Walter."
    assert answer["session_id"] == "walter"
    stranger = ask(server, {"messages": [user("What is my name?")]})
    assert "Walter" not in stranger["choices"][0]["message"]["content"]


def test_full_history_reuses_all_but_at_most_one_token(server: ServerProcess) -> None:
    messages: list[Message] = []
    known = 0  # tokens of the last prompt and reply
    for text in ("I live in Paris.", "Add rice to my shopping list.", "My pet is called Rex.", "Where do I live?"):
        messages.append(user(text))
        answer = ask(server, {"messages": messages}, **NAMED)
        usage = answer["usage"]
        assert known - 1 <= usage["prompt_tokens_details"]["cached_tokens"] <= max(known, 7)
        known = usage["prompt_tokens"] + usage["completion_tokens"]
        messages.append(answer["choices"][0]["message"])
    assert messages[-1]["content"] == "You live in Paris."


def test_an_edited_message_rewinds(server: ServerProcess) -> None:
    first = [user("My name is Emma."), {"role": "assistant", "content": "Nice to meet you, Emma!"}]
    one = ask(server, {"messages": [*first, user("My favorite color is blue.")]}, **{**NAMED, "X-Session-ID": "emma"})
    two = ask(server, {"messages": [*first, user("What is my name?")]}, **{**NAMED, "X-Session-ID": "emma"})
    assert two["choices"][0]["message"]["content"] == "Your name is Emma."
    assert 0 < two["usage"]["prompt_tokens_details"]["cached_tokens"] < one["usage"]["prompt_tokens"]


def test_64_streams_at_once_say_what_they_say_alone(server: ServerProcess) -> None:
    names = [f"{a}{b}" for a in ("Bo", "Ka", "Li", "Mi", "Ta", "Vo", "Ra", "So") for b in "bdfgklmn"]

    async def story(api: openai.AsyncOpenAI, name: str) -> str:
        said: list[Any] = []
        replies = ""
        for text in (f"My name is {name}.", "Add milk to my shopping list.", "What is my name?"):
            said.append(user(text))
            stream = await api.chat.completions.create(model="m", messages=said, temperature=0, stream=True)
            reply = "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])
            said.append({"role": "assistant", "content": reply})
            replies += reply + "\n"
        return replies

    async def everything() -> None:
        async with client(server) as api:
            together = await asyncio.gather(*(story(api, name) for name in names))
            for name, said in list(zip(names, together, strict=True))[::8]:
                assert await story(api, name) == said

    asyncio.run(everything())


def endless(server: ServerProcess, **more: Any) -> dict[str, Any]:
    """A request that runs until it is stopped."""
    return {"messages": [user("Tell me a joke.")], "ignore_eos": True, "temperature": 0, "max_tokens": 1900, **more}


def running(server: ServerProcess) -> float:
    return server.metric("warmturn_running")


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_is_out_of_the_batch_and_its_kv_stays(server: ServerProcess, stream: bool) -> None:
    text = f"My lucky number is {4711 + stream}."
    before = server.metric("warmturn_generated_tokens_total")

    async def leave() -> None:
        async with httpx.AsyncClient(base_url=server.url) as api:
            body = endless(server, stream=stream, messages=[user(text)])
            task = asyncio.create_task(api.post("/v1/chat/completions", json=body, timeout=60))
            while running(server) < 1:
                await asyncio.sleep(0.01)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(leave())
    until(lambda: running(server) == 0, 2.0)
    assert server.metric("warmturn_generated_tokens_total") - before < 1900
    again = ask(server, {"messages": [user(text)]})
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == again["usage"]["prompt_tokens"] - 1


def test_a_turn_that_is_stopped_is_a_turn_and_the_next_one_reuses_all_of_it(server: ServerProcess) -> None:
    async def stop() -> list[str | None]:
        async with client(server) as api:
            body = endless(server, session_id="stopped")
            extra = {name: body.pop(name) for name in ("ignore_eos", "session_id")}
            stream = await api.chat.completions.create(model="m", stream=True, extra_body=extra, **body)
            said: list[str | None] = []
            asking = None
            async for chunk in stream:
                said += [choice.delta.content for choice in chunk.choices]
                ends = [choice.finish_reason for choice in chunk.choices]
                if len(said) > 200 and asking is None:
                    asking = asyncio.create_task(asyncio.to_thread(server.post, "/v1/sessions/stopped/cancel", {}))
            assert asking is not None
            assert (await asking).json()["cancelled"]
            assert ends == ["cancelled"]
            return said

    said = "".join(text or "" for text in asyncio.run(stop()))
    (turn,) = httpx.get(f"{server.url}/v1/sessions/stopped/turns").json()["data"]
    assert turn["finish_reason"] == "cancelled"
    assert 200 <= turn["completion_tokens"] < 1900
    kept = httpx.get(f"{server.url}/v1/sessions/stopped/messages").json()["data"]
    assert [message["content"] for message in kept] == ["Tell me a joke.", said]
    usage = ask(server, {"session_id": "stopped", "messages": [user("What is my name?")]})["usage"]
    length = turn["prompt_tokens"] + turn["completion_tokens"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == length - 1  # the last token was never fed
    assert usage["prompt_tokens"] < length + 40


def test_a_request_that_does_not_say_draws_as_the_model_says(server: ServerProcess) -> None:
    told = httpx.get(f"{server.url}/v1/models").json()["data"][0]["warmturn"]["generation"]
    assert (told["source"], told["temperature"]) == ("model", 0.0)
    body = {"messages": [user("Tell me a joke.")], "n": 4, "ignore_eos": True, "max_tokens": 60}

    def choices(**more: Any) -> set[str]:
        answer = server.post("/v1/chat/completions", {**body, **more}).json()
        return {choice["message"]["content"] for choice in answer["choices"]}

    assert len(choices()) == len(choices(temperature=None)) == 1
    assert len(choices(temperature=1.5)) > 1


def test_a_busy_session_is_a_409_and_an_unnamed_twin_forks(server: ServerProcess) -> None:
    with httpx.stream(
        "POST", f"{server.url}/v1/chat/completions", json=endless(server, stream=True, session_id="b")
    ) as r:
        chunks = r.iter_bytes()
        next(chunks)
        busy = server.post("/v1/chat/completions", {"session_id": "b", "messages": [user("Hi there.")]})
        assert busy.status_code == 409
        assert busy.json()["error"]["code"] == "session_busy"
        twin = ask(server, {"messages": [user("Tell me a joke.")]})
        assert twin["usage"]["prompt_tokens_details"]["cached_tokens"] == twin["usage"]["prompt_tokens"] - 1
    until(lambda: running(server) == 0)


def test_engine_death_is_an_error_event_then_503_then_a_fresh_engine(server: ServerProcess) -> None:
    ask(server, {"session_id": "survivor", "messages": [user("My name is Felix.")]})
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=endless(server, stream=True), timeout=60) as r:
        lines = r.iter_lines()
        next(lines)
        os.kill(server.engine_pid(), signal.SIGKILL)
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert events[-1]["error"]["type"] == "server_error"
    refused = server.post("/v1/chat/completions", {"messages": [user("Hello!")]})
    assert refused.status_code == 503
    assert int(refused.headers["retry-after"]) >= 1
    assert httpx.get(f"{server.url}/health").status_code == 503
    server.wait_healthy()
    answer = ask(server, {"session_id": "survivor", "messages": [user("What is my name?")]})
    assert answer["choices"][0]["message"]["content"] == "Your name is Felix."


def test_sessions_outlive_servers_that_are_killed_drained_and_ended(tmp_path: Path) -> None:
    with ServerProcess(None, tmp_path) as server:
        ask(server, {"session_id": "s", "messages": [user("My name is Grace.")]})
        ask(server, {"session_id": "s", "messages": [user("Add tea to my shopping list.")]})
        engine = Path("/proc", str(server.engine_pid()), "status")
        os.kill(server.process.pid, signal.SIGKILL)  # no farewell
        server.process.wait()
        until(lambda: not engine.exists() or "State:\tZ" in engine.read_text())
    with ServerProcess(None, tmp_path, "--drain-seconds", "100") as server:
        answer = ask(server, {"session_id": "s", "messages": [user("What is my name?")]})
        assert answer["choices"][0]["message"]["content"] == "Your name is Grace."
        let_a_stream_end(server)
    with ServerProcess(None, tmp_path, "--drain-seconds", "0", "--max-running", "1", "--max-queued", "1") as server:
        messages = httpx.get(f"{server.url}/v1/sessions/s/messages").json()["data"]
        assert [m["role"] for m in messages] == ["user", "assistant"] * 4
        fill_the_queue(server)
        answer = ask(server, {"session_id": "s", "messages": [user("What is my name?")]})
        assert answer["usage"]["prompt_tokens"] > 800
        end_what_runs_too_long(server)


def let_a_stream_end(server: ServerProcess) -> None:
    """SIGTERM: new turns are refused, and the one that runs gets its time."""
    body = endless(server, stream=True, session_id="s", max_tokens=800)
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=60) as r:
        lines = (line for line in r.iter_lines() if line)
        next(lines)
        server.process.terminate()
        until(lambda: httpx.get(f"{server.url}/health").json() == {"status": "stopping"})
        refused = server.post("/v1/chat/completions", {"messages": [user("Hello!")]})
        assert (refused.status_code, int(refused.headers["retry-after"]) >= 1) == (503, True)
        *_, last, done = lines
    assert (json.loads(last[6:])["choices"][0]["finish_reason"], done) == ("length", "data: [DONE]")
    assert server.process.wait(60) == 0


def fill_the_queue(small: ServerProcess) -> None:
    """Where one turn may run and one may wait, a full queue is a 429."""

    async def crowd() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=small.url, timeout=60) as api:
            body = endless(small, max_tokens=300)
            return await asyncio.gather(*(api.post("/v1/chat/completions", json=body) for _ in range(6)))

    answers = asyncio.run(crowd())
    assert {a.status_code for a in answers} == {200, 429}
    for refused in (a for a in answers if a.status_code == 429):
        assert refused.json()["error"]["code"] == "queue_full"
        assert int(refused.headers["retry-after"]) >= 1


def end_what_runs_too_long(server: ServerProcess) -> None:
    """SIGTERM where nothing is waited for."""
    body = endless(server, stream=True, session_id="t")
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=60) as r:
        lines = (line for line in r.iter_lines() if line)
        next(lines)
        server.process.terminate()
        *_, last = lines
    assert json.loads(last[6:])["error"]["type"] == "server_error"
    assert server.process.wait(60) == 0
