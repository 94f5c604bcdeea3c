"""The options of commands that talk to a server, and of `warmturn chat`."""

from __future__ import annotations

import uuid

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

# What a value must look like, for whoever gave another one.
ADDRESS = "expected an address, as http://127.0.0.1:8000"
VISIBLE = "expected ASCII characters that are no spaces"


class ClientConfig(BaseSettings):
    """Where the commands that talk to a server find it. Their environment variables start with WARMTURN_CHAT_."""

    model_config = SettingsConfigDict(
        env_prefix="WARMTURN_CHAT_", frozen=True, extra="forbid", hide_input_in_errors=True, protected_namespaces=()
    )

    url: str = Field(
        default="http://127.0.0.1:8000",
        pattern=r"^https?://[^/\s]",
        description="address of the server",
        json_schema_extra={"form": ADDRESS},
    )
    api_key: str | None = Field(
        default=None,
        pattern=r"^[!-~]+$",
        description="bearer key, if the server needs one",
        json_schema_extra={"metavar": "KEY", "default": "none", "form": VISIBLE},
    )


class ChatConfig(ClientConfig):
    """`warmturn chat`."""

    message: str | None = Field(
        default=None,
        min_length=1,
        description="answer this, and what comes through a pipe, and leave",
        json_schema_extra={"metavar": "MESSAGE", "positional": True, "default": "none: talk"},
    )
    model: str | None = Field(
        default=None,
        min_length=1,
        description="model name in the API",
        json_schema_extra={"metavar": "NAME", "default": "the server's first"},
    )
    session: str = Field(
        default_factory=lambda: f"chat-{uuid.uuid4().hex[:12]}",
        pattern=r"^[A-Za-z0-9._:@-]{1,128}$",
        description="session to begin or to continue",
        json_schema_extra={
            "metavar": "NAME",
            "default": "a new one",
            "form": "expected 1 to 128 letters, digits and . _ : @ -",
        },
    )
    system: str | None = Field(
        default=None,
        min_length=1,
        description="system message, sent before the first message",
        json_schema_extra={"metavar": "TEXT", "default": "none"},
    )
    temperature: float | None = Field(
        default=None,
        ge=0,
        le=2,
        allow_inf_nan=False,
        description="0: always the likeliest token",
        json_schema_extra={"metavar": "NUMBER", "default": "the server's"},
    )
