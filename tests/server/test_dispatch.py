"""Requests that become turns take a short way to their endpoints, and are told there what the framework would say."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fake_engine import EMBEDDING
from http_context import HELLO, Site, served

from server.api import routers
from server.middleware.overload import TurnRoutes

GOOD: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO},
    "/v1/completions": {"prompt": "Once"},
    "/v1/responses": {"input": "Hello"},
    "/v1/responses/compact": {"input": "Hello"},
    "/v1/messages": {"messages": HELLO, "max_tokens": 8},
    "/api/chat": {"messages": HELLO, "stream": False},
    "/api/generate": {"prompt": "a", "stream": False},
    "/v1/sessions/{session_id}/chat/completions": {"messages": HELLO},
    "/v1/sessions/{session_id}/regenerate": {},
    "/v1/sessions/{session_id}/alternatives": {"turn": 1, "token": 0},
}
BAD: list[dict[str, Any]] = [  # over a good body
    {"temperature": 9},
    {"no_such_field": 1},
    {"messages": 1, "prompt": 1, "input": 1},
    {"messages": [], "prompt": [], "input": []},
    {"messages": [{"role": "nobody", "content": 1}]},
    {"stop": 7, "stop_sequences": 7},
    {"stream": "yes"},
    {"session_id": "not one"},
    {"tools": [{"type": "function"}]},
]
RAW = [b"", b"{", b"[]", b"null", b'{"a": NaN}', b"\xff", b"{" + b'"a":[' * 99 + b"]" * 99 + b"}"]


POOLED: dict[str, dict[str, Any]] = {  # of a model that embeds
    "/v1/embeddings": {"input": "Hello"},
    "/v1/rerank": {"query": "Hello", "documents": ["Bye"]},
    "/v2/rerank": {"query": "Hello", "documents": ["Bye"]},
    "/rerank": {"query": "Hello", "documents": ["Bye"]},
    "/v1/score": {"text_1": "Hello", "text_2": "Bye"},
    "/score": {"text_1": "Hello", "text_2": "Bye"},
    "/api/embed": {"input": "Hello"},
    "/api/embeddings": {"prompt": "Hello"},
    "/v1/sessions/{session_id}/embedding": {"dimensions": 4},
}


def url(template: str) -> str:
    return template.replace("{session_id}", "s")


async def told(site: Site, template: str, data: bytes, **headers: str) -> tuple[int, str, dict[str, str]]:
    """Status, body without what differs each time, and headers."""
    answer = await site.http.post(url(template), content=data, headers={"content-type": "application/json", **headers})
    kept = {name: value for name, value in answer.headers.items() if name not in ("x-request-id", "request-id")}
    body = answer.json()
    body.pop("request_id", None)
    return answer.status_code, json.dumps(body), kept


@pytest.mark.parametrize("template", [*GOOD, *POOLED])
@served()
async def test_the_short_way_tells_what_the_framework_tells(
    site: Site, template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if template in POOLED:
        site.engine.facts = EMBEDDING
    good = {**GOOD, **POOLED}[template]
    bodies = [json.dumps({**good, **more}).encode() for more in BAD] + RAW
    asked = [(data, dict[str, str]()) for data in bodies]
    asked += [(b"{}", {"content-type": "text/plain"}), (b"{}", {"content-encoding": "gzip"})]
    short = [await told(site, template, data, **headers) for data, headers in asked]
    monkeypatch.setattr(TurnRoutes, "template_of", lambda self, scope: None)
    assert short == [await told(site, template, data, **headers) for data, headers in asked]
    assert sum(status == 400 for status, _, _ in short) > len(RAW)


def test_these_are_all_endpoints_of_turns() -> None:
    assert {*GOOD, *POOLED} == {*TurnRoutes(route for router in routers() for route in router.routes).by_path}


@pytest.mark.parametrize("template", GOOD)
@served()
async def test_turns_do_not_pass_the_framework(site: Site, template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (await site.chat(url("/v1/sessions/{session_id}/chat/completions"))).status_code == 200

    async def never(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(site.app.router, "middleware_stack", never)
    answer = await site.http.post(url(template), json=GOOD[template])
    assert answer.status_code == 200, answer.text
    other = await site.http.get("/v1/models")  # passes it
    assert (other.status_code, other.json()["error"]["type"]) == (500, "server_error")
    counted = site.context.metrics.text().decode()
    assert f'route="{template}",status="200"' in counted


@served()
async def test_parameters_of_the_url_are_looked_at(site: Site) -> None:
    refused = await site.chat("/v1/chat/completions?loud=1")
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "unknown_parameter")
    message = {"messages": HELLO, "max_tokens": 8}
    assert (await site.http.post("/v1/messages?beta=true", json=message)).status_code == 200
    assert (await site.http.post("/v1/messages?beta=perhaps", json=message)).status_code == 400
