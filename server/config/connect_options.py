"""The options of `warmturn connect`."""

from __future__ import annotations

from pydantic import Field

from server.config.client_options import ClientConfig


class ConnectConfig(ClientConfig):
    """Which client is to be configured, for which server, and whether its files are written."""

    client: str = Field(
        default="",
        description="the client to configure: claude, codex, opencode...",
        json_schema_extra={"metavar": "CLIENT", "positional": True, "default": "none: lists the clients"},
    )
    model: str | None = Field(
        default=None,
        min_length=1,
        description="model name in the API",
        json_schema_extra={"metavar": "NAME", "default": "the server's first"},
    )
    write: bool = Field(
        default=False,
        description="write the files below the home folder; what they change is kept as FILE.bak",
        json_schema_extra={"default": "no: print them"},
    )
