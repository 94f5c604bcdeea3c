"""The options of `warmturn keys`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from server.config.option_types import Count, Memory, Names


class KeysConfig(BaseSettings):
    """What is done with the key file, and for whom."""

    model_config = SettingsConfigDict(
        env_prefix="WARMTURN_", frozen=True, extra="ignore", hide_input_in_errors=True, protected_namespaces=()
    )

    action: Literal["add", "list", "revoke"] = Field(
        default="list",
        description="add a key for a tenant, list all keys, or revoke one",
        json_schema_extra={"metavar": "ACTION", "positional": True},
    )
    name: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z0-9._-]{1,64}$",
        description="add: the tenant; revoke: the key's id, as list tells it, or a tenant for all of its keys",
        json_schema_extra={
            "metavar": "NAME",
            "positional": True,
            "default": "none",
            "form": "expected 1 to 64 letters, digits and . _ -",
        },
    )
    key_file: Path | None = Field(
        default=None,
        description="the file of `warmturn serve --key-file`",
        json_schema_extra={"metavar": "FILE", "default": "none"},
    )
    key_models: Names = Field(
        default=[],
        description="with add: a model that the key may use, repeatable (environment: a comma list)",
        json_schema_extra={"metavar": "MODEL", "default": "all", "flag": "--model"},
    )
    requests_per_minute: Count | None = Field(
        default=None,
        description="with add: how many turns the key may ask for",
        json_schema_extra={"metavar": "N", "default": "no limit"},
    )
    tokens_per_minute: Count | None = Field(
        default=None,
        description="with add: how many tokens may be computed for the key; reused ones do not count",
        json_schema_extra={"metavar": "N", "default": "no limit"},
    )
    max_sessions: int | None = Field(
        default=None,
        ge=0,
        description="with add: how many sessions the tenant may have for this key to begin another",
        json_schema_extra={"metavar": "N", "default": "no limit"},
    )
    max_bytes: Memory | None = Field(
        default=None,
        description="with add: how many bytes of sessions, media and files the tenant may have for this key to add any",
        json_schema_extra={"metavar": "BYTES", "default": "no limit"},
    )
