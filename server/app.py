"""The HTTP application, put together."""

from __future__ import annotations

from collections.abc import Mapping

from fastapi import Depends, FastAPI

from server import errors
from server.access import Access
from server.auth import Guard, Keyring
from server.body import only_known_parameters
from server.engine import Engine
from server.face import Face
from server.log import SessionLog
from server.routes import capsules, chat, completions, health, later, models, sessions
from server.template import UNMEASURED, Stability
from server.tokens import Tokens
from server.transfers import Transfers


def create_app(
    engine: Engine,
    log: SessionLog,
    tokens: Tokens,
    *,
    served_name: str,
    api_keys: Mapping[str, str],
    transfers: Transfers,
    template: Stability = UNMEASURED,
) -> FastAPI:
    """The app over these parts. ``api_keys`` is tenant -> key; empty: everybody is tenant "default", without a key."""
    app = FastAPI(
        title="warmturn",
        docs_url=None,  # both pages load scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,  # a redirect would repeat the client's Host header
        telemetry={"logs": False, "operation_spans": False},  # logs would hold what clients sent
        responses={"4XX": {"description": "Refused"}, "5XX": {"description": "Failed"}},
    )
    face = Face(engine, log, tokens, served_name, template)
    face.metrics.log_opened(log.salvage, log.older)
    app.state.face = face
    app.state.transfers = transfers
    for module in (capsules, sessions, chat, completions, models, health):
        app.include_router(module.router, dependencies=[Depends(only_known_parameters)])
    app.include_router(later.router)  # whatever was asked, the answer is the same
    errors.install(app)
    app.add_middleware(Guard, keyring=Keyring(api_keys))
    app.add_middleware(Access, metrics=face.metrics)  # added last: outermost
    return app
