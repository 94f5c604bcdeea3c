"""Request schemas of tools: the client's own, those whose input Anthropic has defined and that the client runs, and
those that only Anthropic runs, which are left out.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator

from server.api.anthropic.block_schemas import CacheControl
from server.schemas.adaptations import adapt
from server.schemas.messages import NAME
from server.schemas.strict import Strict, wrong
from server.schemas.tools import MAX_DESCRIPTION

VENDOR_TOOLS = re.compile(  # each with the date of its version
    r"(advisor|advisor_tool|code_execution|computer|mcp_toolset|tool_search_tool|tool_search_tool_bm25"
    r"|tool_search_tool_regex|web_fetch|web_search)(_\d{8})?\Z"
)
CLIENT_TOOLS = re.compile(r"(bash|memory|text_editor)_\d{8}\Z")
PATH, TEXT, LINE = {"type": "string"}, {"type": "string"}, {"type": "integer"}
EDITED = {
    "command": {"type": "string", "enum": ["view", "create", "str_replace", "insert"]},
    "path": PATH,
    "file_text": TEXT,
    "old_str": TEXT,
    "new_str": TEXT,
    "insert_line": LINE,
    "insert_text": TEXT,
    "view_range": {"type": "array", "items": LINE},
}
REMEMBERED = {
    **EDITED,
    "command": {"type": "string", "enum": ["view", "create", "str_replace", "insert", "delete", "rename"]},
    "old_path": PATH,
    "new_path": PATH,
}
CLIENT_INPUTS: dict[str, tuple[str, dict[str, Any]]] = {  # by kind: what it does, and its input
    "bash": (
        "Run a command in a persistent bash session, or restart the session.",
        {"type": "object", "properties": {"command": TEXT, "restart": {"type": "boolean"}}},
    ),
    "text_editor": (
        "View, create and edit text files.",
        {"type": "object", "properties": EDITED, "required": ["command", "path"]},
    ),
    "memory": (
        "View, create, edit, delete and rename files under /memories, which outlast the conversation.",
        {"type": "object", "properties": REMEMBERED, "required": ["command"]},
    ),
}


class AnthropicTool(Strict):
    """What can be called. However its input is to be streamed: it is, as it comes."""

    IDLE: ClassVar[frozenset[str]] = frozenset({"allowed_callers", "eager_input_streaming", "input_examples"})
    type: Literal["custom"] = "custom"
    name: Annotated[str, Field(pattern=NAME)]
    description: Annotated[str, Field(max_length=MAX_DESCRIPTION)] | None = None
    input_schema: dict[str, Any]
    strict: bool = False
    defer_loading: bool = False
    cache_control: CacheControl | None = None
    allowed_callers: list[str] | None = None
    eager_input_streaming: bool | None = None
    input_examples: list[object] | None = None


class AnthropicClientTool(AnthropicTool):
    """A tool that the client runs and whose input is known by its type."""

    type: str  # type: ignore[assignment]

    @model_validator(mode="before")
    @classmethod
    def with_its_input(cls, data: Any) -> object:
        """The tool as a function."""
        description, schema = CLIENT_INPUTS[data["type"].rpartition("_")[0]]
        kept = {name: data[name] for name in ("type", "name", "cache_control", "defer_loading") if name in data}
        return {**kept, "description": description, "input_schema": schema}


class AnthropicVendorTool(Strict):
    """A tool that only Anthropic runs: it is left out."""

    type: str
    name: str = ""

    @model_validator(mode="before")
    @classmethod
    def left_out(cls, data: Any) -> object:
        """Its type and name; nothing else is looked at."""
        adapt("tool_left_out", data["type"])
        return {"type": data["type"], "name": str(data.get("name", ""))}


class UnknownTool(AnthropicTool):
    """A type that nobody has: it is refused, and not by its other fields."""

    @model_validator(mode="before")
    @classmethod
    def refuse(cls, data: object) -> object:
        raise wrong("type", "names a kind of tool that is not supported by this server")


def kind_of_tool(value: object) -> str:
    """Which kind of tool this is, for the union."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    if kind is None or kind == "custom":
        return "<custom>"
    if isinstance(kind, str) and VENDOR_TOOLS.match(kind):
        return "<vendor>"
    return "<client>" if isinstance(kind, str) and CLIENT_TOOLS.match(kind) else "<unknown>"


AnyTool = Annotated[
    Annotated[AnthropicTool, Tag("<custom>")]
    | Annotated[AnthropicClientTool, Tag("<client>")]
    | Annotated[AnthropicVendorTool, Tag("<vendor>")]
    | Annotated[UnknownTool, Tag("<unknown>")],
    Discriminator(kind_of_tool),
]


class ToolChoice(Strict):
    """Whether tools are called, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: Annotated[str, Field(pattern=NAME)] | None = None
    disable_parallel_tool_use: bool = False

    @model_validator(mode="after")
    def names_one(self) -> Self:
        """A name where one tool is meant, and only there."""
        if (self.type == "tool") != (self.name is not None):
            raise wrong("name", "is required for the type tool, and not allowed for others")
        return self
