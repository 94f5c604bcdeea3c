"""The options of `warmturn bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from server.config.client_options import ADDRESS, VISIBLE
from server.config.option_types import Count
from server.config.serve_options import DEMO


def parse_counts(given: object) -> object:
    """Whole numbers from a comma list."""
    return [int(part) for part in given.split(",") if part.strip()] if isinstance(given, str) else given


Counts = Annotated[list[Count], NoDecode, BeforeValidator(parse_counts)]


class BenchConfig(BaseSettings):
    """`warmturn bench`. ``serve_flags`` are for a server that it starts itself."""

    model_config = SettingsConfigDict(
        env_prefix="WARMTURN_BENCH_", frozen=True, extra="forbid", hide_input_in_errors=True, protected_namespaces=()
    )

    target: str = Field(
        default=DEMO,
        min_length=1,
        description="address of a running server with OpenAI's API, or a model to serve: hub id or folder; "
        "demo: the bundled one",
        json_schema_extra={"metavar": "URL|MODEL", "positional": True},
    )
    url: str | None = Field(
        default=None,
        pattern=r"^https?://[^/\s]",
        description="address of a running server, as in other commands",
        json_schema_extra={"default": "none", "form": ADDRESS},
    )
    model: str | None = Field(
        default=None,
        min_length=1,
        description="with a URL: model name in the API",
        json_schema_extra={"metavar": "NAME", "default": "the server's first"},
    )
    api_key: str | None = Field(
        default=None,
        pattern=r"^[!-~]+$",
        repr=False,
        description="with a URL: bearer key, if the server needs one",
        json_schema_extra={"metavar": "KEY", "default": "none", "form": VISIBLE},
    )
    pid: Count | None = Field(
        default=None,
        description="with a URL: the server's process, for its CPU seconds",
        json_schema_extra={"default": "the process that listens there on this machine"},
    )
    session_header: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z0-9-]{1,64}$",
        description="header with the name of each chat, for routers: X-Session-ID",
        json_schema_extra={"metavar": "NAME", "default": "none"},
    )
    sessions: Counts = Field(
        default=[1, 4, 16],
        description="chats at the same time; each number is a load of its own",
        json_schema_extra={"metavar": "N,N,...", "default": "1,4,16", "commas": True},
    )
    turns: Count = Field(default=4, description="turns of each chat", json_schema_extra={"metavar": "N"})
    history: Counts = Field(
        default=[],
        description="lengths of history, in tokens, after which a short turn is measured",
        json_schema_extra={"metavar": "N,N,...", "default": "none", "commas": True},
    )
    threads: Count = Field(
        default=1,
        description="with a MODEL: compute threads; one makes CPU seconds exact",
        json_schema_extra={"metavar": "N"},
    )
    out: Path | None = Field(
        default=None,
        description="write the report to this file, as Markdown",
        json_schema_extra={"metavar": "FILE", "default": "none"},
    )
    as_json: bool = Field(
        default=False, description="print the results as JSON", json_schema_extra={"flag": "--json", "default": "no"}
    )
    serve_flags: list[str] = Field(
        default=[],
        description="with a MODEL: flags of warmturn serve",
        json_schema_extra={"behind": True, "metavar": "-- FLAGS", "default": "none"},
    )

    @field_validator("url")
    @classmethod
    def one_target(cls, url: str | None, known: ValidationInfo) -> str | None:
        """Either of both says what is measured."""
        if url is not None and known.data.get("target", DEMO) not in (DEMO, url):
            raise ValueError("cannot be used together with URL|MODEL")
        return url

    @property
    def subject(self) -> str:
        return self.url or self.target

    @property
    def is_url(self) -> bool:
        return self.subject.startswith(("http://", "https://"))
