"""The tools of a request, and ``tool_choice``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag, model_validator

from server.schemas.adaptations import adapt
from server.schemas.messages import MAX_TOOLS, NAME
from server.schemas.strict import Harmless, Strict, wrong

MAX_DESCRIPTION = 262_144  # characters
VENDOR_TOOLS = re.compile(  # that only a vendor can run
    r"(code_interpreter|computer_use_preview|file_search|image_generation|tool_search"
    r"|(openrouter:)?web_search(_preview)?)(_[0-9_]{1,12})?\Z"
)


def only_functions(value: object) -> object:
    """Refuse tool types that only other servers support, with an error that says so."""
    if isinstance(value, str) and value != "function":
        raise ValueError("names a kind of tool that is not supported by this server: only function is")
    return value


class OfFunctions(Strict):
    """An object whose ``type`` is checked before its other fields, as those belong to that type."""

    @model_validator(mode="before")
    @classmethod
    def type_first(cls, data: object) -> object:
        """Only functions are called here."""
        if isinstance(data, dict):
            try:
                only_functions(data.get("type"))
            except ValueError as error:
                raise wrong("type", str(error)) from None
        return data


FunctionType = Annotated[Literal["function"], BeforeValidator(only_functions)]
FunctionName = Annotated[str, Field(pattern=NAME)]


class Function(Strict):
    """What can be called. ``parameters`` is a JSON schema; without one it takes any object."""

    IDLE: ClassVar[frozenset[str]] = frozenset({"cache_control"})
    name: FunctionName
    description: Annotated[str, Field(max_length=MAX_DESCRIPTION)] | None = None
    parameters: dict[str, Any] | None = None
    strict: bool = False
    cache_control: dict[str, Any] | None = None


class Tool(OfFunctions):
    """One entry of ``tools``."""

    LATER: ClassVar[Harmless] = {"custom": ()}
    IDLE: ClassVar[frozenset[str]] = frozenset({"cache_control"})
    type: FunctionType
    function: Function
    cache_control: dict[str, Any] | None = None

    def plain(self) -> dict[str, Any]:
        """The tool as chat templates and the log take it."""
        function: dict[str, Any] = {"name": self.function.name}
        if self.function.description is not None:
            function["description"] = self.function.description
        function["parameters"] = self.function.parameters or {"type": "object", "properties": {}}
        if self.function.strict:
            function["strict"] = True
        return {"type": "function", "function": function}


def offered(value: object) -> object:
    """The tools without those that only a vendor can run."""
    if not isinstance(value, list):
        return value
    kept = []
    for tool in value:
        kind = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(kind, str) and VENDOR_TOOLS.match(kind):
            adapt("tool_left_out", kind)
        else:
            kept.append(tool)
    return kept


def distinct(value: Sequence[Tool]) -> Sequence[Tool]:
    """Refuse two tools with the same name."""
    names = [tool.function.name for tool in value]
    if len(set(names)) < len(names):
        raise ValueError("must have different names")
    return value


class NamedFunction(Strict):
    """A function by its name."""

    name: FunctionName


class NamedTool(OfFunctions):
    """A tool by its name."""

    type: FunctionType
    function: NamedFunction


class AllowedTools(Strict):
    """Some of the tools: ``auto`` may call them, ``required`` calls at least one."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MAX_TOOLS)]


class AllowedChoice(Strict):
    """``tool_choice`` that leaves the prompt as it is and narrows what may be called."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def kind_of_choice(value: object) -> str:
    """Which form of ``tool_choice`` this is."""
    if isinstance(value, str):
        return "<word>"
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return "<allowed>" if kind == "allowed_tools" else "<named>"


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<word>")]
    | Annotated[NamedTool, Tag("<named>")]
    | Annotated[AllowedChoice, Tag("<allowed>")],
    Discriminator(kind_of_choice),
]


class Tooled(Strict):
    """The tool fields of a chat. A session keeps its tools: ``tools`` are only given to change them, [] removes
    them.
    """

    tools: (
        Annotated[
            list[Tool],
            Field(max_length=MAX_TOOLS),
            Field(fail_fast=True),
            AfterValidator(distinct),
            BeforeValidator(offered),
        ]
        | None
    ) = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool = True

    @model_validator(mode="before")
    @classmethod
    def not_of_old(cls, data: object) -> object:
        """What came before tools is named with what took its place."""
        for old, new in (("functions", "tools"), ("function_call", "tool_choice")):
            if isinstance(data, dict) and data.get(old) is not None:
                raise wrong(old, f"is deprecated, and not supported by this server: use {new}")
        return data
