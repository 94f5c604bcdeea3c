"""A full engine: turns are refused before their bodies are looked at, and nothing else is."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fastapi.routing import APIRoute
from http_context import Site, served

from server.api import routers
from server.api.openai.completions import create_completion
from server.engine.engine import TurnRefused
from server.middleware.overload import Overload, TurnRoutes

ROUTES = TurnRoutes(route for router in routers() for route in router.routes)
KEYS = {"ann": "key-a", "bob": "key-b"}


@served()
async def test_the_routes_of_turns_refuse_and_no_other(site: Site) -> None:
    turns = set(ROUTES.by_path)
    assert len(turns) > 5
    site.engine.full_for = {"default"}
    refused = set()
    paths = {route.path for route in site.app.routes if isinstance(route, APIRoute) and "POST" in (route.methods or ())}
    for path in paths | set(site.app.openapi()["paths"]):
        answer = await site.http.post(path.replace("{session_id}", "s1"), content=b"{not json")
        if answer.status_code == 429:
            refused.add(path)
            assert answer.headers["retry-after"] == "1"
            assert answer.headers["x-request-id"]
    assert refused == turns
    assert not site.engine.submitted
    counted = (await site.http.get("/metrics")).text
    for path in turns:
        assert f'route="{path}",status="429"' in counted
    assert (await site.http.post("/health")).status_code == 405


@served()
async def test_an_endpoint_that_is_not_marked_takes_no_turn(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever adds one is told at its first request."""
    monkeypatch.delattr(create_completion, "takes_turn")
    assert (await site.complete()).status_code == 500
    assert not site.engine.submitted


@served()
async def test_the_refusal_has_the_shape_of_its_api(site: Site) -> None:
    site.engine.full_for = {"default"}
    assert (await site.chat()).json()["error"] == {
        "message": "The queue is full.",
        "type": "rate_limit_error",
        "param": None,
        "code": "queue_full",
    }
    answer = (await site.http.post("/v1/messages", json={})).json()
    assert (answer["type"], answer["error"]["type"]) == ("error", "rate_limit_error")


@served()
async def test_a_free_queue_refuses_nobody(site: Site) -> None:
    assert (await site.chat()).status_code == 200
    assert (await site.http.get("/v1/models")).status_code == 200


@served(KEYS)
async def test_what_may_become_a_turn_is_counted_while_it_is_read(site: Site) -> None:
    assert (await site.chat(headers={"Authorization": "Bearer key-a"})).status_code == 200
    assert (await site.http.get("/v1/models", headers={"Authorization": "Bearer key-b"})).status_code == 200
    assert site.engine.read == ["ann"]


@served(KEYS)
async def test_tenants_are_refused_one_by_one_and_strangers_as_ever(site: Site) -> None:
    site.engine.full_for = {"ann"}
    answers = [await site.chat(headers={"Authorization": f"Bearer {key}"}) for key in ("key-a", "key-b", "wrong")]
    assert [answer.status_code for answer in answers] == [429, 200, 401]


@pytest.mark.parametrize("leaves", [False, True])
def test_the_body_is_taken_off_the_wire(leaves: bool) -> None:
    """Whoever still writes does not see an answer; whoever leaves ends the wait."""

    class Full:
        def turns_away(self, tenant: str) -> TurnRefused:
            return TurnRefused("queue_full", "Full.", 1)

    parts: list[dict[str, Any]] = [{"type": "http.request", "body": b"x" * 9, "more_body": True} for _ in range(3)]
    parts.append({"type": "http.disconnect"} if leaves else {"type": "http.request", "body": b"y", "more_body": False})
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return parts.pop(0)

    async def send(message: Any) -> None:
        assert not parts
        sent.append(message)

    async def never(*_: object) -> None:
        raise AssertionError

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "state": {"tenant": "a"}}
    asyncio.run(Overload(never, Full(), ROUTES)(scope, receive, send))  # type: ignore[arg-type]
    assert sent[0]["status"] == 429
