"""Items of calls and their outputs, one struct per type of the API; and how they differ from what the log holds.

For the log, each call is that of a function: a name and arguments, which are text that a model wrote, usually JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from server.media.media import PlacedMedia
from server.schemas.custom_input import arguments_with, input_of, read_json
from server.schemas.item_texts import InputPart, Status, input_parts

CallKind = Literal["fc", "ctc", "tsc", "lsh"]  # the prefix of the ids of such items
OutputKind = Literal["fco", "ctco", "tso", "lsho"]
CALL_KINDS: tuple[CallKind, ...] = ("fc", "ctc", "tsc", "lsh")
OUTPUT_KINDS: tuple[OutputKind, ...] = ("fco", "ctco", "tso", "lsho")
SHELL_KEYS = ("command", "env", "timeout_ms", "user", "working_directory")


class CallBase(msgspec.Struct, frozen=True):
    """Base class of calls."""

    id: str
    call_id: str


class OutputBase(msgspec.Struct, frozen=True):
    """Base class of what calls gave back."""

    id: str
    call_id: str


class CallItem(CallBase, frozen=True, tag_field="type", tag="function_call"):
    """A call of a function; ``arguments`` is a JSON text. ``namespace`` is there if the function is in one."""

    name: str
    arguments: str
    status: Status = "completed"
    namespace: str | UnsetType = UNSET


class CustomCallItem(CallBase, frozen=True, tag_field="type", tag="custom_tool_call"):
    """A call of a custom tool; ``input`` is any text."""

    name: str
    input: str
    status: Status = "completed"
    namespace: str | UnsetType = UNSET


class SearchCallItem(CallBase, frozen=True, tag_field="type", tag="tool_search_call"):
    """A search for tools, which the client does."""

    arguments: Any
    execution: Literal["client"] = "client"
    status: Status = "completed"


class ShellCallItem(CallBase, frozen=True, tag_field="type", tag="local_shell_call"):
    """A command that the client runs."""

    action: dict[str, Any]
    status: Status = "completed"


class CallOutputItem(OutputBase, frozen=True, tag_field="type", tag="function_call_output"):
    """What a function gave back."""

    output: str | list[InputPart]
    status: Status = "completed"


class CustomOutputItem(OutputBase, frozen=True, tag_field="type", tag="custom_tool_call_output"):
    """What a custom tool gave back."""

    output: str | list[InputPart]
    status: Status = "completed"


class SearchOutputItem(OutputBase, frozen=True, tag_field="type", tag="tool_search_output"):
    """The tools that were found, as the client has sent them."""

    tools: list[Any]
    execution: Literal["client"] = "client"
    status: Status = "completed"


class ShellOutputItem(OutputBase, frozen=True, tag_field="type", tag="local_shell_call_output"):
    """What a command printed."""

    output: str
    status: Status = "completed"


AnyCall = CallItem | CustomCallItem | SearchCallItem | ShellCallItem
AnyOutput = CallOutputItem | CustomOutputItem | SearchOutputItem | ShellOutputItem


def call_item(
    kind: str, id: str, call_id: str, name: str, arguments: str, status: Status, namespace: str | UnsetType = UNSET
) -> AnyCall:
    """The item of a call as the model wrote it."""
    match kind:
        case "ctc":
            return CustomCallItem(id, call_id, name, input_of(arguments), status, namespace)
        case "tsc":
            return SearchCallItem(id, call_id, read_json(arguments), status=status)
        case "lsh":
            return ShellCallItem(id, call_id, shell_action(read_json(arguments)), status)
        case _:
            return CallItem(id, call_id, name, arguments, status, namespace)


def output_item(
    kind: str, id: str, call_id: str, text: str, tools: list[Any], media: Sequence[PlacedMedia] = ()
) -> AnyOutput:
    """The item of a logged output; ``tools``: those that a search found."""
    output = input_parts(text, media) if media else text
    match kind:
        case "ctco":
            return CustomOutputItem(id, call_id, output)
        case "tso":
            return SearchOutputItem(id, call_id, tools)
        case "lsho":
            return ShellOutputItem(id, call_id, text)
        case _:
            return CallOutputItem(id, call_id, output)


def arguments_of(item: AnyCall) -> str:
    """The arguments as the model has written them, or would have."""
    match item:
        case CallItem():
            return item.arguments
        case CustomCallItem():
            return arguments_with(item.input)
        case SearchCallItem():
            given = item.arguments
            return given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
        case ShellCallItem():
            given = {key: item.action[key] for key in SHELL_KEYS if item.action.get(key)}
            return json.dumps(given, ensure_ascii=False)


def shell_action(value: object) -> dict[str, Any]:
    """The action of a shell call; a command that is one text is for a shell to read."""
    given = value if isinstance(value, Mapping) else {"command": value}
    command = given.get("command")
    if not isinstance(command, list):
        command = ["bash", "-lc", str(command)] if command else []
    kinds: dict[str, type] = {"timeout_ms": int, "user": str, "working_directory": str}
    return {
        "type": "exec",
        "command": [str(part) for part in command],
        "env": given["env"] if isinstance(given.get("env"), Mapping) else {},
        **{key: given[key] for key, kind in kinds.items() if isinstance(given.get(key), kind)},
    }
