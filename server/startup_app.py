"""The ASGI app on the port: the loaded app once it exists, before that a 503 with Retry-After."""

from __future__ import annotations

from collections.abc import Awaitable, Collection

from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from server.errors import unavailable
from server.http.error_responses import error_response
from server.http.page import page_answer
from server.middleware.cors import Cors

LOADING = "The model is still loading."
RETRY_AFTER = 2  # seconds; how long a model loads is not known before it has


class StartupApp:
    """ASGI app that answers while the tokenizer and the model load, then forwards to the real app. ``origins`` may read
    its answers (CORS).
    """

    def __init__(self, origins: Collection[str] = ()) -> None:
        self._app: ASGIApp | None = None
        self._closed = Cors(_not_yet, origins)

    def open(self, app: ASGIApp) -> None:
        """Forward requests to ``app`` from now on."""
        self._app = app

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        app = self._closed if self._app is None else self._app
        return app(scope, receive, send)


async def _not_yet(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "http":
        await _answer_loading(scope)(scope, receive, send)
    elif scope["type"] == "websocket":
        await error_response(unavailable(LOADING, RETRY_AFTER), scope)(scope, receive, send)


def _answer_loading(scope: Scope) -> Response:
    if scope["path"] == "/health/live":
        return JSONResponse({"status": "ok"})
    if scope["path"] == "/health":
        return JSONResponse({"status": "loading"}, 503, {"retry-after": str(RETRY_AFTER)})
    if (answer := page_answer(scope)) is not None:  # it tells people what the others are told
        return answer
    return error_response(unavailable(LOADING, RETRY_AFTER), scope)
