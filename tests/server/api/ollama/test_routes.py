"""Ollama's API: chats and completions, streamed as lines of JSON; bad requests in its error format."""

from __future__ import annotations

import json
from typing import Any

import pytest
from http_context import HELLO, Site, served

from scheduler.protocol import unpack_ids
from server.engine.engine import TurnRefused

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


async def lines(site: Site, path: str, **body: Any) -> list[Any]:
    """The objects of a stream."""
    response = await site.http.post(path, json=body)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("application/x-ndjson")
    return [json.loads(line) for line in response.text.splitlines()]


async def whole(site: Site, path: str, **body: Any) -> Any:
    response = await site.http.post(path, json={"stream": False, **body})
    assert response.status_code == 200, response.text
    return response.json()


@served()
async def test_a_chat_is_streamed_unless_it_says_otherwise(site: Site) -> None:
    *pieces, last = await lines(site, "/api/chat", model="demo", messages=HELLO)
    assert "".join(piece["message"]["content"] for piece in pieces) == "Hello there, friend."
    assert all(piece["done"] is False and piece["message"]["role"] == "assistant" for piece in pieces)
    assert last["done"] is True
    assert last["done_reason"] == "stop"
    assert last["prompt_eval_count"] > 0
    assert last["eval_count"] > 1
    assert last["total_duration"] >= last["prompt_eval_duration"] + last["eval_duration"] - 1
    answer = await whole(site, "/api/chat", model="demo:latest", messages=HELLO)
    assert answer["message"] == {"role": "assistant", "content": "Hello there, friend."}
    assert answer["done_reason"] == "stop"
    assert answer["eval_count"] == last["eval_count"]
    assert "cache" in answer


@pytest.mark.parametrize("content_type", ["application/x-www-form-urlencoded", ""])
@served()
async def test_a_body_that_curl_does_not_name_json_is_taken_but_not_from_a_web_page(
    site: Site, content_type: str
) -> None:
    body = json.dumps({"model": "demo", "messages": HELLO, "stream": False})
    headers = {"content-type": content_type}
    response = await site.http.post("/api/chat", content=body, headers=headers)
    assert response.status_code == 200, response.text
    assert response.json()["message"]["content"] == "Hello there, friend."
    for origin in ("null", "https://example.org"):
        refused = await site.http.post("/api/chat", content=body, headers={**headers, "origin": origin})
        assert refused.status_code == 415


@served()
async def test_a_prompt_is_a_chat_unless_it_is_raw(site: Site) -> None:
    *pieces, last = await lines(site, "/api/generate", prompt="Hello", system="Be kind.")
    assert "".join(piece["response"] for piece in pieces) == "Hello there, friend."
    assert last["done_reason"] == "stop"
    tokens = site.context.tokens
    assert "Be kind." in tokens.decode(unpack_ids(site.engine.submitted[-1].prompt))
    raw = await whole(site, "/api/generate", prompt="Hello", raw=True)
    assert raw["response"] == "Hello there, friend."
    assert tokens.decode(unpack_ids(site.engine.submitted[-1].prompt)) == "Hello"


@served()
async def test_options_become_sampling_and_limits(site: Site) -> None:
    options = {
        "num_predict": 3,
        "temperature": 0,
        "top_k": 0,
        "top_p": 0.5,
        "repeat_penalty": 1.25,
        "seed": 7,
        "stop": "x",
        "num_ctx": 4096,
        "mirostat": 0,
    }
    answer = await whole(site, "/api/chat", messages=HELLO, options=options, keep_alive="5m")
    assert answer["done_reason"] == "length"
    assert answer["eval_count"] == 3
    submit = site.engine.submitted[-1]
    sampling = submit.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.repetition_penalty, sampling.seed) == (
        0.0,
        0,
        0.5,
        1.25,
        7,
    )
    assert submit.stopping.max_tokens == 3
    assert submit.stopping.stop == ("x",)


@served()
async def test_calls_have_objects_as_arguments_and_their_results_find_them(site: Site) -> None:
    site.engine.reply = CALL
    *pieces, last = await lines(site, "/api/chat", messages=HELLO, tools=[WEATHER])
    calls = [call for piece in pieces for call in piece["message"].get("tool_calls", ())]
    assert [call["function"]["arguments"] for call in calls] == [{"city": "Oslo"}]
    assert last["done_reason"] == "stop"
    answer = await whole(site, "/api/chat", messages=HELLO, tools=[WEATHER])
    assert answer["message"]["tool_calls"][0]["function"]["name"] == "weather"
    assert answer["message"]["content"] == ""
    plain = {"function": {"name": "weather", "arguments": {"city": "Oslo"}}}
    site.engine.reply = "Rain."
    for call, result in (
        (plain, {"role": "tool", "content": "rain", "tool_name": "weather"}),
        (plain, {"role": "tool", "content": "rain", "name": "weather"}),
        (plain, {"role": "tool", "content": "rain"}),
        ({**plain, "id": "c9"}, {"role": "tool", "content": "rain", "tool_call_id": "c9"}),
    ):
        asked = {"role": "assistant", "content": "", "tool_calls": [call]}
        told = await whole(site, "/api/chat", messages=[*HELLO, asked, result], tools=[WEATHER])
        assert told["message"]["content"] == "Rain."
    response = await site.http.post("/api/chat", json={"messages": [*HELLO, {"role": "tool", "content": "rain"}]})
    assert response.status_code == 400
    assert response.json() == {"error": "messages[1] answers no call of the message before it."}


@served()
async def test_a_format_is_enforced(site: Site) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    for form in ("json", schema):
        await whole(site, "/api/chat", messages=HELLO, format=form)
        assert site.engine.submitted[-1].grammar
    await whole(site, "/api/chat", messages=HELLO, format="")
    assert not site.engine.submitted[-1].grammar


@served()
async def test_without_messages_or_a_prompt_the_model_is_named_as_loaded(site: Site) -> None:
    answer = await whole(site, "/api/chat", model="demo")
    assert (answer["done"], answer["done_reason"]) == (True, "load")
    assert answer["message"] == {"role": "assistant", "content": ""}
    answer = await whole(site, "/api/generate", model="demo", keep_alive=0)
    assert (answer["response"], answer["done_reason"]) == ("", "unload")
    assert not site.engine.submitted


@served()
async def test_logprobs_come_with_the_pieces(site: Site) -> None:
    answer = await whole(site, "/api/chat", messages=HELLO, logprobs=True, top_logprobs=2)
    assert len(answer["logprobs"]) == answer["eval_count"]
    assert len(answer["logprobs"][0]["top_logprobs"]) == 2
    raw = await whole(site, "/api/generate", prompt="Hello", raw=True, logprobs=True)
    assert "top_logprobs" not in raw["logprobs"][0]


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/api/chat", {"messages": [{"role": "user", "content": "a", "images": ["x"]}]}, "messages[0].images"),
        ("/api/chat", {"messages": [{"role": "mother", "content": "a"}]}, "messages[0].role"),
        ("/api/chat", {"messages": HELLO, "options": {"mirostat": 2}}, "options.mirostat"),
        ("/api/chat", {"messages": HELLO, "options": {"temperature": "hot"}}, "options.temperature"),
        ("/api/chat", {"messages": HELLO, "new": 1}, "new"),
        ("/api/generate", {"prompt": "a", "context": [1, 2]}, "context"),
        ("/api/generate", {"prompt": "a", "template": "b"}, "template"),
        ("/api/generate", {"prompt": "a", "raw": True, "system": "b"}, "system"),
        ("/api/chat", {"messages": HELLO, "format": {"type": "nothing"}}, "format is not valid"),
    ],
)
@served()
async def test_what_cannot_be_done_is_refused_by_name(site: Site, path: str, body: Any, said: str) -> None:
    response = await site.http.post(path, json=body)
    assert response.status_code == 400
    assert [*response.json()] == ["error"]
    assert said in response.json()["error"]


@served()
async def test_another_model_and_a_full_queue_are_told_in_its_format(site: Site) -> None:
    response = await site.http.post("/api/chat", json={"model": "other", "messages": HELLO})
    assert response.status_code == 404
    assert [*response.json()] == ["error"]
    site.engine.refusal = TurnRefused("queue_full", "The queue is full.")
    response = await site.http.post("/api/chat", json={"messages": HELLO})
    assert response.status_code == 429
    assert response.json() == {"error": "The queue is full."}
    assert "retry-after" in response.headers


@served(ollama=False)
async def test_it_can_be_switched_off(site: Site) -> None:
    assert (await site.http.post("/api/chat", json={"messages": HELLO})).status_code == 404
    assert (await site.http.get("/api/tags")).status_code == 404
    assert (await site.chat()).status_code == 200
