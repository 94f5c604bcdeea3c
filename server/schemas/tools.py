"""The tools of a request, and ``tool_choice``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag, model_validator

from server.schemas.adaptations import adapt
from server.schemas.custom_input import INPUT, custom_description
from server.schemas.messages import MAX_TOOLS, NAME
from server.schemas.strict import Strict, missing_field_error, wrong

MAX_DESCRIPTION = 262_144  # characters
MAX_GRAMMAR = 65_536  # characters
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

    IDLE: ClassVar[frozenset[str]] = frozenset({"cache_control"})
    type: FunctionType
    function: Function
    cache_control: dict[str, Any] | None = None

    @property
    def name(self) -> str:
        return self.function.name

    def plain(self) -> dict[str, Any]:
        """The tool as chat templates and the log take it."""
        function: dict[str, Any] = {"name": self.function.name}
        if self.function.description is not None:
            function["description"] = self.function.description
        function["parameters"] = self.function.parameters or {"type": "object", "properties": {}}
        if self.function.strict:
            function["strict"] = True
        return {"type": "function", "function": function}


class Grammar(Strict):
    """A grammar of a custom tool's input."""

    syntax: Literal["lark", "regex"]
    definition: Annotated[str, Field(max_length=MAX_GRAMMAR)]


class CustomFormat(Strict):
    """The form of a custom tool's input: any text, or one of a grammar."""

    type: Literal["text", "grammar"]
    grammar: Grammar | None = None

    @model_validator(mode="after")
    def has_its_grammar(self) -> Self:
        """A grammar is given if and only if the type says so."""
        if (self.type == "grammar") != (self.grammar is not None):
            raise (
                missing_field_error("grammar")
                if self.grammar is None
                else wrong("grammar", "is only allowed with type: grammar")
            )
        return self


class Custom(Strict):
    """What takes plain text."""

    name: FunctionName
    description: Annotated[str, Field(max_length=MAX_DESCRIPTION)] | None = None
    format: CustomFormat | None = None


class CustomTool(Strict):
    """An entry of ``tools`` that takes text: for the model, a function with one argument, ``input``."""

    IDLE: ClassVar[frozenset[str]] = frozenset({"cache_control"})
    type: Literal["custom"]
    custom: Custom
    cache_control: dict[str, Any] | None = None

    @property
    def name(self) -> str:
        return self.custom.name

    def plain(self) -> dict[str, Any]:
        """The function as chat templates and the log take it."""
        grammar = self.custom.format.grammar if self.custom.format is not None else None
        held = () if grammar is None else (grammar.syntax, grammar.definition)
        if grammar is not None:
            adapt("grammar_described", "custom")
        description = custom_description(self.custom.description, *held)
        return {
            "type": "function",
            "function": {"name": self.name, "description": description, "parameters": dict(INPUT)},
        }


def is_custom(value: object) -> bool:
    """Whether an object, sent or validated, is about a custom tool."""
    return (value.get("type") if isinstance(value, dict) else getattr(value, "type", None)) == "custom"


ChatTool = Annotated[
    Annotated[Tool, Tag("<function>")] | Annotated[CustomTool, Tag("<custom>")],
    Discriminator(lambda value: "<custom>" if is_custom(value) else "<function>"),
]


def without_vendor_tools(value: object) -> object:
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


def distinct(value: Sequence[Tool | CustomTool]) -> Sequence[Tool | CustomTool]:
    """Refuse two tools with the same name."""
    names = [tool.name for tool in value]
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

    @property
    def name(self) -> str:
        return self.function.name


class NamedCustom(Strict):
    """A custom tool by its name."""

    type: Literal["custom"]
    custom: NamedFunction

    @property
    def name(self) -> str:
        return self.custom.name


AnyNamed = Annotated[
    Annotated[NamedTool, Tag("<function>")] | Annotated[NamedCustom, Tag("<custom>")],
    Discriminator(lambda value: "<custom>" if is_custom(value) else "<function>"),
]


class AllowedTools(Strict):
    """Some of the tools: ``auto`` may call them, ``required`` calls at least one."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[AnyNamed], Field(min_length=1, max_length=MAX_TOOLS)]


class AllowedChoice(Strict):
    """``tool_choice`` that leaves the prompt as it is and narrows what may be called."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def kind_of_choice(value: object) -> str:
    """Which form of ``tool_choice`` this is."""
    if isinstance(value, str):
        return "<word>"
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return {"allowed_tools": "<allowed>", "custom": "<custom>"}.get(str(kind), "<named>")


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<word>")]
    | Annotated[NamedTool, Tag("<named>")]
    | Annotated[NamedCustom, Tag("<custom>")]
    | Annotated[AllowedChoice, Tag("<allowed>")],
    Discriminator(kind_of_choice),
]


class Tooled(Strict):
    """The tool fields of a chat. A session keeps its tools: ``tools`` are only given to change them, [] removes
    them.
    """

    tools: (
        Annotated[
            list[ChatTool],
            Field(max_length=MAX_TOOLS),
            Field(fail_fast=True),
            AfterValidator(distinct),
            BeforeValidator(without_vendor_tools),
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
