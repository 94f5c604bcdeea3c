"""Bad input, kind by kind: each is a 4xx in shape that names the parameter and repeats nothing, and harms nobody.

The kinds are those that have taken servers down elsewhere, and their neighbours. To add one, add a row.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from http_context import HELLO, Site, served

CANARY = "c4n4ry"
CHAT, COMPLETIONS, SESSIONS = "/v1/chat/completions", "/v1/completions", "/v1/sessions"
INT32, INT64 = 2**31, 2**63
JSON = {"content-type": "application/json"}


@dataclass(frozen=True)
class Kind:
    """One bad request. ``param`` is what the error names; ``status`` is 400 where nothing else is said."""

    title: str
    param: str | None
    body: Any = None  # bytes as they are, anything else as JSON
    path: str = CHAT
    method: str = "POST"
    status: int = 400
    headers: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.title


def chat(title: str, param: str | None, **body: Any) -> Kind:
    return Kind(title, param, {"messages": HELLO, **body})


def said(title: str, param: str, *messages: Any) -> Kind:
    return Kind(title, param, {"messages": list(messages)})


def completion(title: str, param: str | None, **body: Any) -> Kind:
    return Kind(title, param, {"prompt": "Once", **body}, COMPLETIONS)


def raw(title: str, data: bytes, status: int = 400, param: str | None = None, **headers: str) -> Kind:
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    return Kind(title, param, data, status=status, headers={**JSON, **sent})


def nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(depth):
        value = {"a": value}
    return value


GOOD_BYTES = json.dumps({"messages": HELLO}).encode()
BYTES = [
    raw("nothing", b""),
    raw("half an object", b'{"messages": ['),
    raw("two objects", b"{}{}"),
    raw("an array", b"[]"),
    raw("null", b"null"),
    raw("a number", b"5"),
    raw("a string", b'"' + CANARY.encode() + b'"'),
    raw("single quotes", b"{'messages': []}"),
    raw("a trailing comma", b'{"messages": [],}'),
    raw("a comment", b'{"messages": [] /* ' + CANARY.encode() + b" */}"),
    raw("a byte order mark", b"\xef\xbb\xbf" + GOOD_BYTES),
    raw("UTF-16", GOOD_BYTES.decode().encode("utf-16")),
    raw("bytes that are not UTF-8", b'{"messages": "\xff\xfe"}'),
    raw("overlong UTF-8", b'{"messages": "\xc0\xaf"}'),
    raw("a surrogate in UTF-8", b'{"messages": "\xed\xa0\x80"}'),
    raw(
        "a lone surrogate escaped",
        rb'{"messages": [{"role": "user", "content": "\ud83d"}]}',
        param="messages[0].content",
    ),
    raw("surrogates in the wrong order", rb'{"user": "\udc00\ud800", "messages": []}', param="user"),
    raw("a lone surrogate in a key", rb'{"\ud800": 1}'),
    raw("a raw line end in a string", b'{"user": "a\nb"}'),
    raw("a NUL between tokens", b'{"messages":\0[]}'),
    raw("NaN", b'{"temperature": NaN, "messages": []}'),
    raw("infinity", b'{"temperature": Infinity, "messages": []}'),
    raw("a float that overflows", b'{"temperature": 1e999, "messages": []}'),
    raw("an integer of 5,000 digits", b'{"seed": ' + b"9" * 5000 + b"}"),
    raw("an integer past 64 bits, deep down", b'{"tools": [{"x": [18446744073709551616]}]}'),
    raw("1,000 arrays", b'{"messages":' + b"[" * 1000 + b"]" * 1000 + b"}"),
    raw("a million arrays that never end", b'{"a":' + b"[" * 1_000_000),
    raw("100,000 objects in each other", b'{"a":' * 100_000 + b"1" + b"}" * 100_000),
    raw("a form", b"messages=hello", 415, content_type="application/x-www-form-urlencoded"),
    raw("a multipart form", b"--x\r\n\r\nhello\r\n--x--", 415, content_type="multipart/form-data; boundary=x"),
    raw("plain text that is JSON", GOOD_BYTES, 415, content_type="text/plain"),
    raw("another charset", GOOD_BYTES, 415, content_type="application/json; charset=utf-16"),
    raw("a compressed body", b"\x1f\x8b" + bytes(20), 415, content_encoding="gzip"),
    raw("64 MiB and a byte", b" " * (64 * 2**20 + 1), 413),
    raw("a length that is a lie", b"{}", 413, content_length="99999999999"),
]
WRONG: dict[str, tuple[Any, ...]] = {
    "temperature": (-0.1, 2.1, "1", True, [], {}, 1e300),
    "top_p": (-0.1, 1.1, CANARY),
    "top_k": (-2, INT32, 1.5),
    "min_p": (-1, 2),
    "presence_penalty": (-2.1, 2.1, CANARY),
    "frequency_penalty": (-2.1, 2.1, []),
    "repetition_penalty": (0, -1, 11),
    "n": (0, -1, 17, 100_000, "1", 1.0, True),
    "max_tokens": (0, -2, INT32, "5", 2.5),
    "max_completion_tokens": (0, -5, INT32),
    "min_tokens": (-1, INT32),
    "seed": (1.5, "x", True),
    "top_logprobs": (-1, 21),
    "logprobs": (5, CANARY),
    "stream": ("true", 1),
    "ignore_eos": ("false",),
}
NUMBERS = [chat(f"{name} {value!r}"[:40], name, **{name: value}) for name, values in WRONG.items() for value in values]
FIELDS = [
    chat("a seed past 64 bits", None, seed=INT64),
    chat("logit_bias as a list", "logit_bias", logit_bias=[1]),
    chat("logit_bias by words", "logit_bias", logit_bias={CANARY: 1}),
    chat("logit_bias of a negative id", "logit_bias", logit_bias={"-1": 1}),
    chat("logit_bias past the vocabulary", "logit_bias", logit_bias={"1024": 1}),
    chat("logit_bias of an id past 32 bits", "logit_bias", logit_bias={"4294967296": 1}),
    chat("logit_bias beyond 100", "logit_bias", logit_bias={"1": 101}),
    chat("logit_bias of a string", "logit_bias", logit_bias={"1": CANARY}),
    chat("logit_bias of null", "logit_bias", logit_bias={"1": None}),
    chat("a stop token past the vocabulary", "stop_token_ids", stop_token_ids=[5000]),
    chat("a negative stop token", "stop_token_ids[0]", stop_token_ids=[-1]),
    chat("a stop token that is a word", "stop_token_ids[1]", stop_token_ids=[1, CANARY]),
    chat("10,000 stop tokens", "stop_token_ids", stop_token_ids=[1] * 10_000),
    chat("10,000 stop strings", "stop", stop=[CANARY] * 10_000),
    chat("a stop string of a megabyte", "stop", stop=CANARY * 200_000),
    chat("an empty stop string", "stop", stop=""),
    chat("stop numbers", "stop", stop=[1]),
    chat("a stop object", "stop", stop={"a": CANARY}),
    chat("min_tokens over max_tokens", "min_tokens", min_tokens=9, max_tokens=8),
    chat("min_tokens over max_completion_tokens", "min_tokens", min_tokens=9, max_completion_tokens=8),
    chat("a limit below none", "max_tokens", max_tokens=-2, max_completion_tokens=6),
    chat("more tokens than the context", "messages", max_tokens=2048),
    chat("top_logprobs without logprobs", "top_logprobs", top_logprobs=2),
    chat("stream_options as a list", "stream_options", stream=True, stream_options=[]),
    chat("an unknown stream option", f"stream_options.{CANARY}", stream=True, stream_options={CANARY: 1}),
    chat("an unknown field", "colour", colour=CANARY),
    chat("a field that is no name", None, **{"<script>": CANARY}),
    chat("an empty field", None, **{"": CANARY}),
    chat("a template", "chat_template", chat_template="{{ 1 }}" + CANARY),
    chat("arguments of a template", "chat_template_kwargs", chat_template_kwargs={"a": "{% for %}"}),
    chat("bad words", "bad_words", bad_words=CANARY),
    chat("a format of two kinds", "guided_regex", regex="a", guided_regex=CANARY),
    chat("prompt log-probabilities in a stream", "prompt_logprobs", prompt_logprobs=1, stream=True),
    chat("a backend", "guided_decoding_backend", guided_decoding_backend=CANARY),
    chat("allowed tokens", "allowed_token_ids", allowed_token_ids=[99_999]),
    chat("a base URL", "api_base", api_base=f"http://127.0.0.1/{CANARY}"),
    chat("the model as a number", "model", model=5),
    Kind("another model", "model", {"messages": HELLO, "model": CANARY}, status=404),
    chat("a model's name of a megabyte", "model", model=CANARY * 200_000),
    chat("a user of a megabyte", "user", user=CANARY * 200_000),
    chat("tools that are text", "tools", tools=CANARY),
    chat("a response format that is text", "response_format", response_format=CANARY),
    chat("a nested field of a depth that passes", "audio", audio=nested(40)),
    chat("a session that is a path", "session_id", session_id=f"../{CANARY}"),
    chat("a session without a name", "session_id", session_id=""),
    chat("a session's name of a megabyte", "session_id", session_id="a" * 1_000_000),
    chat("a session with NUL", "session_id", session_id="a\0b"),
    chat("a session that is a number", "session_id", session_id=5),
    chat("several choices of a session", "n", session_id="s", n=2),
    Kind(
        "a session in a header that is no name",
        None,
        {"messages": HELLO},
        headers={"x-session-id": "a b", "x-session-create": "true"},
    ),
    Kind("two sessions", "session_id", {"messages": HELLO, "session_id": "a"}, headers={"x-session-id": "b"}),
    Kind(
        "a retry's key with a space",
        "Idempotency-Key",
        {"messages": HELLO, "session_id": "a"},
        headers={"idempotency-key": "a b"},
    ),
]
MESSAGES = [
    Kind("no messages", "messages", {}),
    Kind("null messages", "messages", {"messages": None}),
    said("an empty list of messages", "messages"),
    Kind("messages as text", "messages", {"messages": CANARY}),
    Kind("messages as an object", "messages", {"messages": {"role": "user"}}),
    Kind("100,000 messages", "messages", {"messages": HELLO * 100_000}),
    Kind("100,000 messages that are none", "messages[0]", {"messages": [5] * 100_000}),
    said("10 MB of text in five messages", "messages", *[{"role": "user", "content": "a" * 1_500_000}] * 5),
    said("a message that is text", "messages[0]", CANARY),
    said("a message that is null", "messages[0]", None),
    said("no role", "messages[0].role", {"content": CANARY}),
    said("an unknown role", "messages[0].role", {"role": CANARY, "content": "x"}),
    said("a role that is a list", "messages[0].role", {"role": ["user"], "content": "x"}),
    said("no content", "messages[1].content", HELLO[0], {"role": "user"}),
    said("content that is a number", "messages[0].content", {"role": "user", "content": 5}),
    said("content that is an object", "messages[0].content", {"role": "user", "content": {"a": CANARY}}),
    said("30,000 parts", "messages[0].content", {"role": "user", "content": [{"type": "text", "text": "x"}] * 30_000}),
    said("a part that is text", "messages[0].content[0]", {"role": "user", "content": [CANARY]}),
    said("a part without text", "messages[0].content[0].text", {"role": "user", "content": [{"type": "text"}]}),
    said("a part of no kind", "messages[0].content[0].type", {"role": "user", "content": [{"text": "x"}]}),
    said(
        "an unknown part", "messages[0].content[0].type", {"role": "user", "content": [{"type": CANARY, "text": "x"}]}
    ),
    said(
        "an image to be fetched",
        "messages[0].content[0].image_url",
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": f"http://127.0.0.1/{CANARY}"}}]},
    ),
    said("an unknown field of a message", "messages[0].colour", {"role": "user", "content": "x", "colour": CANARY}),
    said("text past the context", "messages", {"role": "user", "content": "word " * 5000}),
]
PROMPTS = [
    Kind("no prompt", "prompt", {}, COMPLETIONS),
    completion("a prompt that is an object", "prompt", prompt={"a": CANARY}),
    completion("a prompt that is a number", "prompt", prompt=5),
    completion("an empty list of prompts", "prompt", prompt=[]),
    completion("a mixed list of prompts", "prompt", prompt=["a", 5]),
    completion("token ids that are words", "prompt", prompt=[[CANARY]]),
    completion("a negative token", "prompt", prompt=[-1]),
    completion("a token past the vocabulary", "prompt", prompt=[1024]),
    completion("a token past 32 bits", "prompt", prompt=[2**40]),
    completion("a thousand prompts", "prompt", prompt=["a"] * 1000),
    completion("prompts nested too deep", "prompt", prompt=[[[1]]]),
    completion("a prompt past the context", "prompt", prompt=[5] * 5000),
    completion("a prompt of 7 MB", "prompt", prompt="a" * 7_000_000),
    completion("best_of of 100,000", "best_of", best_of=100_000),
    completion("n below best_of's least", "best_of", best_of=0),
    completion("too many logprobs", "logprobs", logprobs=1000),
    completion("logprobs that are true", "logprobs", logprobs=True),
    completion("prompts times n", "n", prompt=["a"] * 100, n=16),
    completion("echo as text", "echo", echo=CANARY),
    completion("messages", "messages", messages=HELLO),
    completion("several prompts for a session", "prompt", prompt=["a", "b"], session_id="s"),
]
ADDRESSES = [
    Kind("no such path", None, {}, f"/v1/{CANARY}", status=404),
    Kind("a path with dots", None, {}, f"/v1/../{CANARY}", status=404),
    Kind("a path with NUL", "model", None, "/v1/models/%00", "GET", 404),
    Kind("another model's page", "model", None, f"/v1/models/{CANARY}", "GET", 404),
    Kind("embeddings of a model that chats", "model", {"input": CANARY}, "/v1/embeddings"),
    Kind("embeddings of nothing", "input", {"input": []}, "/v1/embeddings"),
    Kind("embeddings of texts and ids", "input", {"input": [CANARY, 1]}, "/v1/embeddings"),
    Kind("embeddings of a million objects", "input", {"input": [{}] * 1_000_000}, "/v1/embeddings"),
    Kind("embeddings of 2,049 texts", "input", {"input": [CANARY] * 2049}, "/v1/embeddings"),
    Kind("embeddings of ids past 32 bits", "input", {"input": [INT32]}, "/v1/embeddings"),
    Kind("embeddings in no dimension", "dimensions", {"input": "a", "dimensions": 0}, "/v1/embeddings"),
    Kind(
        "embeddings in a format of their own",
        "encoding_format",
        {"input": "a", "encoding_format": CANARY},
        "/v1/embeddings",
    ),
    Kind("documents that are numbers", "documents", {"query": "a", "documents": [1]}, "/v1/rerank"),
    Kind("10,001 documents", "documents", {"query": "a", "documents": [CANARY] * 10_001}, "/v1/rerank"),
    Kind("a query that is a list", "query", {"query": [CANARY], "documents": ["a"]}, "/rerank"),
    Kind("fewer results than none", "top_n", {"query": "a", "documents": ["b"], "top_n": -1}, "/v2/rerank"),
    Kind("scores of one side", "text_2", {"text_1": CANARY}, "/v1/score"),
    Kind("scores of sides that differ", "text_1", {"text_1": ["a"] * 2, "text_2": ["b"] * 3}, "/score"),
    Kind("tokenise at the root of another server", None, {"prompt": CANARY}, "/invocations", status=404),
    Kind("a method that is not there", None, None, CHAT, "PUT", 405),
    Kind("TRACE", None, None, CHAT, "TRACE", 405),
    Kind("a question from another site's page", None, None, CHAT, "OPTIONS", 405, {"origin": "http://evil.example"}),
    Kind("an unknown parameter in the URL", "colour", {"messages": HELLO}, f"{CHAT}?colour={CANARY}"),
    Kind("a key in the URL", "api_key", None, f"/v1/models?api_key={CANARY}", "GET"),
    Kind("a host that is anybody's", None, {"messages": HELLO}, status=403, headers={"host": f"{CANARY}.example"}),
    Kind("a host with a path in it", None, {"messages": HELLO}, status=403, headers={"host": "x/health?"}),
]
SESSION_KINDS = [
    Kind("a session of nobody", None, None, f"{SESSIONS}/{CANARY}", "GET", 404),
    Kind("a session that is a path, in the URL", None, None, f"{SESSIONS}/..%2f{CANARY}", "GET", 404),
    Kind("a page of no size", "limit", None, f"{SESSIONS}?limit=0", "GET"),
    Kind("a page of text", "limit", None, f"{SESSIONS}?limit={CANARY}", "GET"),
    Kind("a page after a path", "after", None, f"{SESSIONS}?after=%2e%2e%2f", "GET"),
    Kind("an unknown order", "order", None, f"{SESSIONS}?order={CANARY}", "GET"),
    Kind("a time past all", "used_after", None, f"{SESSIONS}?used_after=99999999999999999999", "GET"),
    Kind("metadata with NUL", "metadata", {"metadata": {"a": "\0"}}, SESSIONS),
    Kind("metadata of 17 pairs", "metadata", {"metadata": {str(i): "x" for i in range(17)}}, SESSIONS),
    Kind("metadata that is a number", "metadata", {"metadata": {"a": 5}}, SESSIONS),
    Kind("a life of no time", "ttl_seconds", {"ttl_seconds": 0}, SESSIONS),
    Kind("a life of forever", "ttl_seconds", {"ttl_seconds": 10**12}, SESSIONS),
    Kind("a pin of a year", "pin_seconds", {"pin_seconds": 10**8}, SESSIONS),
    Kind("an import that is JSON", None, {"a": CANARY}, f"{SESSIONS}/import", status=415),
    Kind(
        "a capsule that is none",
        None,
        CANARY.encode(),
        f"{SESSIONS}/import",
        headers={"content-type": "application/zip"},
    ),
    Kind("a rewind to two places", "turn", {"turn": 1, "tokens": 1}, f"{SESSIONS}/x/rewind"),
    Kind("a fork of nobody", None, {}, f"{SESSIONS}/x/fork", status=404),
]
KINDS = [*BYTES, *NUMBERS, *FIELDS, *MESSAGES, *PROMPTS, *ADDRESSES, *SESSION_KINDS]


async def ask(site: Site, kind: Kind) -> Any:
    headers = {**kind.headers}
    if isinstance(kind.body, bytes):
        return await site.http.request(kind.method, kind.path, content=kind.body, headers=headers)
    return await site.http.request(kind.method, kind.path, json=kind.body, headers=headers)


def test_there_are_as_many_kinds_as_were_tried_elsewhere() -> None:
    assert len({kind.title for kind in KINDS}) == len(KINDS) >= 106


@pytest.mark.parametrize("kind", KINDS, ids=str)
@served()
async def test_each_is_a_4xx_that_names_its_parameter_and_harms_nobody(site: Site, kind: Kind) -> None:
    response = await ask(site, kind)
    assert response.status_code == kind.status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    assert not {name for name in response.headers if name.startswith("access-control-")}
    assert len(response.content) < 700
    error = response.json()["error"]
    assert {name: type(value) for name, value in error.items() if value is not None}.items() >= {
        "message": str,
        "type": str,
    }.items()
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == kind.param, error
    named = kind.param is not None and CANARY in kind.param  # a field's name is one, and said
    assert CANARY not in response.text or named
    assert site.engine.submitted == []
    assert (await site.chat()).status_code == 200


@served()
async def test_all_of_them_at_once_leave_nothing_behind(site: Site) -> None:
    """One server, every kind: nothing is running, claimed or kept, and the next request is served."""
    for kind in KINDS:
        assert 400 <= (await ask(site, kind)).status_code < 500
    assert site.engine.running == set()
    assert (await site.http.get(SESSIONS)).json()["data"] == []
    for body in ({}, {"stream": True}, {"session_id": "a"}):
        assert (await site.chat(**body)).status_code == 200


def takes_json(site: Site) -> list[tuple[str, str]]:
    """Method and path of every route that has a body."""
    found = []
    for path, verbs in site.app.openapi()["paths"].items():
        for verb, operation in verbs.items():
            if "application/json" in operation.get("requestBody", {}).get("content", {}):
                found.append((verb.upper(), re.sub(r"\{\w+\}", "0", path)))
    return found


AT_THE_GATE = {
    *("half an object", "an array", "a lone surrogate escaped", "NaN", "an integer of 5,000 digits"),
    *("plain text that is JSON", "100,000 objects in each other", "64 MiB and a byte", "bytes that are not UTF-8"),
}


@served()
async def test_there_is_one_gate_for_all_routes(site: Site) -> None:
    kinds = [kind for kind in BYTES if kind.title in AT_THE_GATE]
    assert len(kinds) == len(AT_THE_GATE)
    with_body = takes_json(site)
    assert len(with_body) >= 8
    for verb, path in with_body:
        for kind in kinds:
            response = await ask(site, replace(kind, method=verb, path=path))
            assert response.status_code == kind.status, (verb, path, kind.title, response.text)
            assert CANARY not in response.text
    assert site.engine.submitted == []


@served()
async def test_every_route_refuses_fields_that_it_does_not_know(site: Site) -> None:
    """Also those that need nothing, and whatever else is missing."""
    for verb, path in takes_json(site):
        response = await site.http.request(verb, path, json={"chat_template": CANARY})
        assert (response.status_code, CANARY in response.text) == (400, False), (verb, path, response.text)
        assert "chat_template" in response.text, (verb, path)


KEYS = {"ann": "key-a", "bob": "key-b"}


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.path.startswith("/v1/")], ids=str)
@served(KEYS)
async def test_without_a_key_none_of_them_is_even_looked_at(site: Site, kind: Kind) -> None:
    response = await ask(site, kind)
    assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_api_key")
    assert CANARY not in response.text
