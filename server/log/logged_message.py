"""``LoggedMessage``: a message as it is stored in the log, and its JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Annotated, Any, Literal

import msgspec

from server.media.media import PlacedMedia

Scalar = str | int | float | bool
Role = Literal["system", "developer", "user", "assistant", "tool"]


class LoggedFunction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The function of a tool call; ``arguments`` is text that a model wrote, usually JSON."""

    name: str
    arguments: str


class LoggedCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tool call in a reply."""

    id: str
    type: Literal["function"]
    function: LoggedFunction


class LoggedMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A message. Its JSON has the fields in this order, without those that have their default. ``tools`` and
    ``template`` (see ``server.chat.rendering``) hold from this message on; None: no change. For ``items`` see
    ``server.schemas.items``, for ``instructions`` and ``dropped`` ``server.api.responses.prompt``. ``begun``: how many
    leading characters of a reply the client gave as its beginning. ``added_tools`` can be called from this message on
    beside the others, and are defined in it (``server.chat.late_tools``); ``removed_tools``, by name, no longer can.
    ``media`` stand in ``content`` where they are placed, in this order; their bytes are elsewhere. What there is more
    than one of is a tuple: most messages have none, and share the empty one.
    """

    role: Role
    content: str
    name: str = ""
    reasoning_content: str = ""
    tool_calls: tuple[LoggedCall, ...] = ()
    tool_call_id: str = ""
    items: tuple[list[str | int], ...] = ()
    instructions: bool = False
    tools: list[dict[str, Any]] | None = None  # as the client has sent them
    template: dict[str, Scalar] | None = None
    begun: Annotated[int, msgspec.Meta(ge=0)] = 0
    dropped: bool = False
    added_tools: tuple[dict[str, Any], ...] = ()
    removed_tools: tuple[str, ...] = ()
    media: tuple[PlacedMedia, ...] = ()


def to_json(messages: Iterable[LoggedMessage]) -> str:
    """Messages as a JSON array without whitespace. Uses ``json``, as clients' tools may contain integers of any
    size.
    """
    return json.dumps(msgspec.to_builtins([*messages]), ensure_ascii=False, separators=(",", ":"))


def of_json(text: str) -> list[LoggedMessage]:
    """The inverse of ``to_json``. Raises ValueError if ``text`` is not an array of messages."""
    return msgspec.convert(json.loads(text), list[LoggedMessage])
