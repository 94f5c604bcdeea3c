"""What answers while the model loads."""

import asyncio
from collections.abc import Awaitable

import httpx
from starlette.responses import PlainTextResponse
from starlette.types import Message, Scope

from server.startup_app import StartupApp


def ask(entrance: StartupApp, path: str) -> httpx.Response:
    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(entrance)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.get(path)

    return asyncio.run(run())


def test_while_loading_everything_but_a_sign_of_life_is_503_in_shape() -> None:
    entrance = StartupApp()
    health = ask(entrance, "/health")
    assert (health.status_code, health.json()) == (503, {"status": "loading"})
    live = ask(entrance, "/health/live")
    assert (live.status_code, live.json()) == (200, {"status": "ok"})
    models = ask(entrance, "/v1/models")
    assert models.status_code == 503
    assert int(models.headers["retry-after"]) >= 1
    assert set(models.json()["error"]) == {"message", "type", "param", "code"}
    assert models.json()["error"]["type"] == "server_error"


def test_a_websocket_is_refused_while_loading() -> None:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        return {"type": "websocket.connect"}

    scope: Scope = {"type": "websocket", "path": "/v1/responses", "headers": [], "extensions": {}}
    asyncio.run(awaited(StartupApp()(scope, receive, send)))
    assert (sent[0]["type"], sent[0]["status"]) == ("websocket.http.response.start", 503)


async def awaited(call: Awaitable[None]) -> None:
    await call


def test_then_the_app_answers() -> None:
    entrance = StartupApp()
    entrance.open(PlainTextResponse("hello"))
    assert ask(entrance, "/health").text == "hello"
