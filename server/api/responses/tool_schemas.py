"""Request schemas of ``tools`` and ``tool_choice``.

Every tool that the client runs is called as a function. Tools that only a vendor can run are left out, unless
``tool_choice`` asks for one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, TypeAdapter, model_validator

from server.api.responses.client_tools import SEARCH, SHELL, ClientTool, Execution, ToolKey
from server.schemas.adaptations import adapt
from server.schemas.custom_input import INPUT, custom_description
from server.schemas.messages import MAX_TOOLS
from server.schemas.strict import Harmless, Strict, wrong
from server.schemas.tools import MAX_DESCRIPTION, MAX_GRAMMAR, FunctionName

VENDOR_TOOLS = frozenset(  # without the date of a version, and "preview"
    {
        "apply_patch",
        "code_interpreter",
        "computer",
        "computer_use",
        "file_search",
        "image_generation",
        "mcp",
        "programmatic_tool_calling",
        "shell",
        "tool_search",
        "web_search",
    }
)
VERSION = re.compile(r"(_preview)?(_\d+)*\Z")
Caller = Literal["direct", "programmatic"]
Description = Annotated[str, Field(max_length=MAX_DESCRIPTION)]
AnyObject = Annotated[dict[str, Any], Field(max_length=1024)]
QUERY: Mapping[str, Any] = {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}
COMMAND: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "command": {"type": "array", "items": {"type": "string"}, "description": "The program and its arguments."},
        "working_directory": {"type": "string"},
        "timeout_ms": {"type": "integer"},
    },
    "required": ["command"],
}


def vendor_tool(type: object) -> str | None:
    """The name of a tool that only a vendor runs, without its version; None for other types."""
    name = VERSION.sub("", type, count=1) if isinstance(type, str) else ""
    return name if name in VENDOR_TOOLS else None


class OwnTool(Strict):
    """What functions and custom tools have in common. A tool that only a vendor's programs may call is left out."""

    LATER: ClassVar[Harmless] = {"async": (False,)}
    IDLE: ClassVar[frozenset[str]] = frozenset({"defer_loading"})
    name: FunctionName
    description: Description | None = None
    allowed_callers: Annotated[list[Caller], Field(max_length=8)] | None = None
    defer_loading: bool = False

    @property
    def is_callable(self) -> bool:
        """Whether the model itself may call it."""
        return not self.allowed_callers or "direct" in self.allowed_callers


class FunctionTool(OwnTool):
    """A function."""

    IDLE: ClassVar[frozenset[str]] = frozenset({"defer_loading", "output_schema"})
    type: Literal["function"]
    parameters: dict[str, Any] | None = None
    strict: bool = False
    output_schema: AnyObject | None = None

    def tools(self, namespace: str = "") -> Iterator[ClientTool]:
        yield ClientTool(ToolKey("fc", self.name, namespace), self.description, self.parameters, self.strict)

    def to_object(self) -> dict[str, Any]:
        return {
            "type": "function",
            "name": self.name,
            "description": self.description,
            "parameters": self.parameters,
            "strict": self.strict,
        }


class TextInput(Strict):
    """Any text."""

    type: Literal["text"]


class GrammarInput(Strict):
    """Text of a grammar. The model is told of it, and not held to it."""

    type: Literal["grammar"]
    syntax: Literal["lark", "regex"]
    definition: Annotated[str, Field(max_length=MAX_GRAMMAR)]


class CustomTextTool(OwnTool):
    """A tool that takes text: for the model, a function with one argument, ``input``."""

    type: Literal["custom"]
    format: Annotated[TextInput | GrammarInput, Field(discriminator="type")] | None = None

    def tools(self, namespace: str = "") -> Iterator[ClientTool]:
        held = (self.format.syntax, self.format.definition) if isinstance(self.format, GrammarInput) else ()
        description = custom_description(self.description, *held)
        yield ClientTool(ToolKey("ctc", self.name, namespace), description, INPUT)

    def to_object(self) -> dict[str, Any]:
        format = {"type": "text"} if self.format is None else self.format.model_dump(mode="json")
        return {"type": "custom", "name": self.name, "description": self.description or "", "format": format}


class NamespaceTool(Strict):
    """Tools of one origin, such as an MCP server. What is said about all of them is told with the first."""

    type: Literal["namespace"]
    name: FunctionName
    description: Description = ""
    tools_: Annotated[
        list[Annotated[FunctionTool | CustomTextTool, Field(discriminator="type")]], Field(max_length=MAX_TOOLS)
    ] = Field(alias="tools")

    def tools(self) -> Iterator[ClientTool]:
        about = f"About all tools of `{self.name}`: {self.description}" if self.description else ""
        for tool in self.tools_:
            for made in tool.tools(self.name) if left_out(tool) is None else ():
                told = "\n\n".join(filter(None, (made.description, about)))
                yield ClientTool(made.key, told or None, made.parameters, made.strict)
                about = ""

    def to_object(self) -> dict[str, Any]:
        tools = [tool.to_object() for tool in self.tools_]
        return {"type": "namespace", "name": self.name, "description": self.description, "tools": tools}


class SearchTool(Strict):
    """A search for more tools, which the client does. One that the vendor does is left out."""

    type: Literal["tool_search"]
    execution: Execution = "server"
    description: Description | None = None
    parameters: dict[str, Any] | None = None

    def tools(self) -> Iterator[ClientTool]:
        if self.execution == "client":
            yield ClientTool(SEARCH, self.description or "Finds more tools.", self.parameters or QUERY)

    def to_object(self) -> dict[str, Any]:
        told = {"description": self.description, "parameters": self.parameters}
        return {"type": "tool_search", "execution": self.execution, **told}


class LocalShellTool(Strict):
    """Commands that the client runs."""

    type: Literal["local_shell"]

    def tools(self) -> Iterator[ClientTool]:
        yield ClientTool(SHELL, "Runs a command on the user's machine.", COMMAND)

    def to_object(self) -> dict[str, Any]:
        return {"type": "local_shell"}


class VendorTool(Strict):
    """A tool that only a vendor can run, by its name. Its options are not looked at."""

    type: str

    @model_validator(mode="before")
    @classmethod
    def only_known(cls, data: object) -> object:
        """Its type, if that is one of ``VENDOR_TOOLS``; other types are refused."""
        name = vendor_tool(data.get("type")) if isinstance(data, dict) else None
        if name is None:
            raise wrong("type", "names a kind of tool that is not supported by this server")
        return {"type": name}

    def tools(self) -> Iterator[ClientTool]:
        """None."""
        return iter(())

    def to_object(self) -> dict[str, Any]:
        """As little as is known of it."""
        return {"type": self.type}


def kind_of_tool(value: object) -> str:
    kinds = ("function", "custom", "namespace", "tool_search", "local_shell")
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return f"<{kind}>" if kind in kinds else "<vendor>"


ResponseTool = Annotated[
    Annotated[FunctionTool, Tag("<function>")]
    | Annotated[CustomTextTool, Tag("<custom>")]
    | Annotated[NamespaceTool, Tag("<namespace>")]
    | Annotated[SearchTool, Tag("<tool_search>")]
    | Annotated[LocalShellTool, Tag("<local_shell>")]
    | Annotated[VendorTool, Tag("<vendor>")],
    Discriminator(kind_of_tool),
]
ResponseTools = Annotated[list[ResponseTool], Field(max_length=MAX_TOOLS), Field(fail_fast=True)]
ADAPTER: TypeAdapter[list[Any]] = TypeAdapter(ResponseTools)


def left_out(tool: ResponseTool) -> str | None:
    """The type of a tool that cannot be called, for the receipt; None for all others."""
    match tool:
        case VendorTool():
            return tool.type
        case SearchTool(execution="server"):
            return tool.type
        case OwnTool() if not tool.is_callable:
            return "programmatic_tool_calling"
        case _:
            return None


def note_tools(tools: Iterable[ResponseTool]) -> None:
    """Note what is taken otherwise than the client asks for."""
    for tool in tools:
        if isinstance(tool, NamespaceTool):
            note_tools(tool.tools_)
        elif (type := left_out(tool)) is not None:
            adapt("tool_left_out", type)
        elif isinstance(tool, CustomTextTool) and isinstance(tool.format, GrammarInput):
            adapt("grammar_described", "custom")


def client_tools(tools: Iterable[ResponseTool]) -> list[ClientTool]:
    """The tools to call, in order."""
    return [made for tool in tools if left_out(tool) is None for made in tool.tools()]


def tools_in(sent: Sequence[Any]) -> list[ClientTool]:
    """The tools to call of those that an item has."""
    return client_tools(ADAPTER.validate_python(list(sent)))


def tool_objects(tools: Iterable[ResponseTool]) -> list[dict[str, Any]]:
    """The tools as a response tells of them, without those that are left out."""
    return [tool.to_object() for tool in tools if left_out(tool) is None]


def distinct(tools: Sequence[ResponseTool]) -> Sequence[ResponseTool]:
    """Refuse two tools with the same name and namespace."""
    seen: set[tuple[str, str]] = set()
    for tool in tools:
        owned = tool.tools_ if isinstance(tool, NamespaceTool) else [tool] if isinstance(tool, OwnTool) else []
        namespace = tool.name if isinstance(tool, NamespaceTool) else ""
        for one in owned:
            if (namespace, one.name) in seen:
                raise ValueError("must have different names")
            seen.add((namespace, one.name))
    return tools


# --- tool_choice ------------------------------------------------------------------------------------------------


def callable_type(value: object) -> object:
    """Refuse a tool that cannot be called here, with an error that says so."""
    if vendor_tool(value) is not None:
        raise ValueError("asks for a tool that only its vendor can run")
    return value


class NamedChoice(Strict):
    """A tool by its name."""

    type: Annotated[Literal["function", "custom"], BeforeValidator(callable_type)]
    name: FunctionName
    namespace: FunctionName | None = None

    @model_validator(mode="before")
    @classmethod
    def type_first(cls, data: object) -> object:
        """The type is checked before the other fields, as those belong to it."""
        if isinstance(data, dict) and vendor_tool(data.get("type")) is not None:
            raise wrong("type", "asks for a tool that only its vendor can run")
        return data

    @property
    def key(self) -> ToolKey:
        return ToolKey("fc" if self.type == "function" else "ctc", self.name, self.namespace or "")


class AllowedToolChoice(Strict):
    """Some of the tools; those that only a vendor can run are left out."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedChoice], Field(min_length=1, max_length=MAX_TOOLS)]

    @model_validator(mode="before")
    @classmethod
    def without_vendor_tools(cls, data: object) -> object:
        """Only the tools that can be called, if there are any."""
        tools = data.get("tools") if isinstance(data, dict) else None
        if not isinstance(data, dict) or not isinstance(tools, list):
            return data
        names = [vendor_tool(tool.get("type")) if isinstance(tool, dict) else None for tool in tools]
        left = [tool for tool, name in zip(tools, names, strict=True) if name is None]
        for name in filter(None, names if left else ()):
            adapt("tool_left_out", name)
        return {**data, "tools": left} if left else data


def kind_of_choice(value: object) -> str:
    if isinstance(value, str):
        return "<word>"
    return "<allowed>" if isinstance(value, dict) and value.get("type") == "allowed_tools" else "<named>"


Choice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<word>")]
    | Annotated[NamedChoice, Tag("<named>")]
    | Annotated[AllowedToolChoice, Tag("<allowed>")],
    Discriminator(kind_of_choice),
]
