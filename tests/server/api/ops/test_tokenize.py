"""The tokenizer and the template by themselves, and what requests say of the cache."""

from __future__ import annotations

from importlib import metadata
from typing import Any

import pytest
from http_context import HELLO, Site, demo_tokens, events, served

TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


async def post(site: Site, path: str, **body: Any) -> Any:
    response = await site.http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


@served()
async def test_text_there_and_back(site: Site) -> None:
    text = "Hello there, 世界!"
    told = await post(site, "/tokenize", prompt=text, model="demo")
    ids = demo_tokens().encode(text, special=True)
    assert told == {"count": len(ids), "max_model_len": 2048, "tokens": ids, "token_strs": None}
    assert await post(site, "/detokenize", tokens=ids) == {"prompt": text}
    strings = (await post(site, "/tokenize", prompt="Hello there", return_token_strs=True))["token_strs"]
    assert "".join(strings).replace("Ġ", " ") == "Hello there"
    bare = await post(site, "/tokenize", prompt=text, add_special_tokens=False)
    assert bare["tokens"] == demo_tokens().encode(text, special=False)
    assert (await post(site, "/tokenize", prompt=""))["tokens"] == []
    assert await post(site, "/detokenize", tokens=[]) == {"prompt": ""}


@served()
async def test_chats_as_the_engine_gets_them(site: Site) -> None:
    chat: dict[str, Any] = {"messages": HELLO, "tools": [TOOL]}
    assert (await site.chat(**chat)).status_code == 200
    ids = site.prompt_ids(0)
    assert (await post(site, "/tokenize", **chat))["tokens"] == ids
    rendered = await post(site, "/apply-template", **chat)
    assert rendered == {"prompt": demo_tokens().decode(ids), "tokens": ids}
    closed = (await post(site, "/tokenize", **chat, add_generation_prompt=False))["tokens"]
    assert closed == ids[: len(closed)]
    assert len(closed) < len(ids)
    begun = [*HELLO, {"role": "assistant", "content": "Well,"}]
    goes_on = (await post(site, "/tokenize", messages=begun, continue_final_message=True))["tokens"]
    assert demo_tokens().decode(goes_on).endswith("Well,")
    assert len(site.engine.submitted) == 1


@served()
async def test_the_prompt_of_a_sessions_next_turn(site: Site) -> None:
    await site.chat(session_id="s")
    rendered = await post(site, "/apply-template", session_id="s", messages=HELLO)
    await site.chat(session_id="s")
    assert rendered["tokens"] == site.prompt_ids(1)
    assert len((await site.http.get("/v1/sessions/s/turns")).json()["data"]) == 2


@served()
async def test_what_a_remote_tokenizer_asks(site: Site) -> None:
    info = (await site.http.get("/tokenizer_info")).json()
    assert set(info) == {"bos_token", "eos_token", "pad_token", "unk_token", "chat_template"}
    assert (await post(site, "/tokenize", prompt=info["eos_token"], add_special_tokens=False))["count"] == 1
    assert "messages" in info["chat_template"]


@served()
async def test_the_version(site: Site) -> None:
    assert (await site.http.get("/version")).json() == {"version": metadata.version("warmturn")}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": HELLO}, "prompt"),
        ("/tokenize", {"prompt": "x", "tools": [TOOL]}, "tools"),
        ("/tokenize", {"prompt": "x" * 40_000}, "prompt"),
        ("/tokenize", {"prompt": "x", "model": "other"}, "model"),
        ("/tokenize", {"messages": HELLO, "add_special_tokens": True}, "add_special_tokens"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": HELLO, "continue_final_message": True}, "messages"),
        ("/tokenize", {"messages": HELLO, "chat_template": "x"}, "chat_template"),
        ("/tokenize", {"messages": HELLO, "chat_template_kwargs": {"x": 1}}, "chat_template_kwargs"),
        (
            "/tokenize",
            {"messages": [{"role": "tool", "content": "x", "tool_call_id": "c"}]},
            "messages[0].tool_call_id",
        ),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [1024]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": [1] * 2049}, "tokens"),
        ("/apply-template", {}, "messages"),
        ("/apply-template", {"messages": HELLO, "session_id": "a b"}, "session_id"),
    ],
)
@served()
async def test_bad_requests(site: Site, path: str, body: dict[str, Any], param: str) -> None:
    response = await site.http.post(path, json=body)
    assert response.status_code == (404 if param == "model" else 400), response.text
    assert response.json()["error"]["param"] == param


@served({"ann": "key-a"})
async def test_nothing_without_a_key(site: Site) -> None:
    for method, path in (
        ("POST", "/tokenize"),
        ("POST", "/detokenize"),
        ("POST", "/apply-template"),
        ("GET", "/version"),
        ("GET", "/tokenizer_info"),
    ):
        response = await site.http.request(method, path, json={"prompt": "x"})
        assert response.status_code == 401


@served()
async def test_what_other_servers_have_is_not_here(site: Site) -> None:
    for path in ("/v1/images/generations", "/v1/audio/speech", "/v1/moderations"):
        response = await site.http.post(path, json={"input": "x"})
        error = response.json()["error"]
        assert (response.status_code, error["type"]) == (404, "invalid_request_error")
        assert set(error) == {"message", "type", "param", "code"}


@served()
async def test_what_is_said_of_the_cache(site: Site) -> None:
    assert (await site.chat(prompt_cache_key="k", prompt_cache_retention="24h")).status_code == 200
    assert (await site.complete(cache_salt="x", prompt_cache_options={"ttl": "30m"})).status_code == 200
    assert (await site.complete(cache_salt="y")).status_code == 200
    chat, salted, other = site.engine.submitted
    assert (chat.salt, other.keep_until) == ("", 0.0)
    assert chat.keep_until - salted.keep_until > 80_000
    assert len({salted.salt, other.salt, "", "x", "y"}) == 5
    for body in ({"session_id": "s", "cache_salt": "x"}, {"cache_salt": ""}):
        response = await site.chat(**body)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "cache_salt")
    named = await site.chat(headers={"X-Session-ID": "s", "X-Session-Create": "true"}, cache_salt="x")
    assert named.json()["error"]["param"] == "cache_salt"
    explicit = await site.chat(prompt_cache_options={"mode": "explicit"})
    assert explicit.status_code == 200


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@served()
async def test_obfuscated_pieces_are_of_one_length(site: Site, path: str) -> None:
    what = {"messages": HELLO} if "chat" in path else {"prompt": "Once"}
    options = {"include_obfuscation": True, "include_usage": True}
    text = (await site.http.post(path, json={**what, "stream": True, "stream_options": options})).text
    sizes = {len(block) for block in text.split("\n\n") if '"choices":[{' in block}
    chunks = [chunk for chunk in events(text) if chunk != "[DONE]"]
    assert all(("obfuscation" in chunk) == bool(chunk["choices"]) for chunk in chunks)
    assert len({size % 64 for size in sizes}) == 1
    pads = [chunk["obfuscation"] for chunk in chunks if chunk["choices"] and len(chunk["obfuscation"]) > 8]
    assert len(set(pads)) == len(pads)
    plain = (await site.http.post(path, json={**what, "stream": True})).text
    assert "obfuscation" not in plain
