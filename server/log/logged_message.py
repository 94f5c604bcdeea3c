"""``LoggedMessage``: a message as it is stored in the log, and its JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Annotated, Any, Literal

import msgspec

Scalar = str | int | float | bool
Role = Literal["system", "developer", "user", "assistant", "tool"]


class LoggedFunction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a call calls; ``arguments`` is text that a model wrote, JSON if all went well."""

    name: str
    arguments: str


class LoggedCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A call of a tool in a reply."""

    id: str
    type: Literal["function"]
    function: LoggedFunction


class LoggedMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A message. Its JSON has the fields in this order, without those that are as here.

    ``tools`` and ``template`` (see ``server.chat.rendering``) hold from this message on; None: those before still hold.
    For ``items`` see ``server.schemas.items``, for ``instructions`` and ``dropped`` ``server.api.responses.prompt``.
    ``begun``: so many characters of a reply are what its client began it with.
    """

    role: Role
    content: str
    name: str = ""
    reasoning_content: str = ""
    tool_calls: list[LoggedCall] = []
    tool_call_id: str = ""
    items: list[list[str | int]] = []
    instructions: bool = False
    tools: list[dict[str, Any]] | None = None  # as the client has sent them
    template: dict[str, Scalar] | None = None
    begun: Annotated[int, msgspec.Meta(ge=0)] = 0
    dropped: bool = False


def to_json(messages: Iterable[LoggedMessage]) -> str:
    """Messages as an array of JSON without blanks. By ``json``: the tools of clients may hold numbers of any size."""
    return json.dumps(msgspec.to_builtins([*messages]), ensure_ascii=False, separators=(",", ":"))


def of_json(text: str) -> list[LoggedMessage]:
    """The reverse. Raises ValueError for what is no array of messages."""
    return msgspec.convert(json.loads(text), list[LoggedMessage])
