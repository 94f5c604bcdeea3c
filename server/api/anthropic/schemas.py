"""Request schemas of Anthropic's Messages API. Strict: each field is honoured or refused by name; ``null`` means
absent.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, BeforeValidator, Discriminator, Field, Tag, model_validator

from server.schemas.messages import MAX_MESSAGES, MAX_TOOLS, NAME, Id
from server.schemas.requests import INT32, MAX_STOP_CHARS, MAX_STOPS, default
from server.schemas.strict import Harmless, Strict, wrong
from server.schemas.tools import MAX_DESCRIPTION

MAX_BLOCKS = 1000
MIN_THINKING = 1024  # tokens


class CacheControl(Strict):
    """What came up to here is to be kept for so long."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] = "5m"


class Block(Strict):
    """A block of a message. ``KIND`` is its type."""

    KIND: ClassVar[str]
    cache_control: CacheControl | None = None


def only_text(value: object) -> object:
    """Refuse block types that only other servers support, with an error that says so."""
    kind = value.get("type") if isinstance(value, dict) else "text"
    if isinstance(kind, str) and kind != "text":
        raise wrong("type", "names a kind of content that is not supported by this server")
    return value


class TextBlockParam(Block):
    """Text."""

    KIND = "text"
    LATER: ClassVar[Harmless] = {"citations": ([],)}
    type: Literal["text"]
    text: str


class ThinkingBlockParam(Strict):
    """What an earlier reply thought. Its signature is not looked at: this server signs nothing."""

    KIND: ClassVar[str] = "thinking"
    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class ToolUseBlockParam(Block):
    """A call of an earlier reply."""

    KIND = "tool_use"
    LATER: ClassVar[Harmless] = {"caller": ({"type": "direct"},), "toolset_name": ()}
    type: Literal["tool_use"]
    id: Id
    name: Annotated[str, Field(pattern=NAME)]
    input: dict[str, Any]


KINDS = ("thinking", "tool_use", "tool_result", "tool_reference", "tool_addition", "tool_removal")


def kind_of(value: object) -> str:
    """The block's type, for the union; unknown ones are validated, and so refused, as text."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return f"<{kind}>" if kind in KINDS else "<text>"


Text = Annotated[TextBlockParam, BeforeValidator(only_text)]
Texts = Annotated[
    Annotated[str, Tag("<string>")]
    | Annotated[list[Text], Field(max_length=MAX_BLOCKS), Field(fail_fast=True), Tag("<list>")],
    Discriminator(lambda value: "<list>" if isinstance(value, list) else "<string>"),
]


class ToolReferenceBlockParam(Block):
    """A tool that a call has found: it can be called from here on. Its definition is in ``tools``, where it is
    deferred.
    """

    KIND = "tool_reference"
    type: Literal["tool_reference"]
    tool_name: Annotated[str, Field(pattern=NAME)]


Results = Annotated[
    Annotated[str, Tag("<string>")]
    | Annotated[
        list[
            Annotated[
                Annotated[Text, Tag("<text>")] | Annotated[ToolReferenceBlockParam, Tag("<tool_reference>")],
                Discriminator(lambda value: "<tool_reference>" if kind_of(value) == "<tool_reference>" else "<text>"),
            ]
        ],
        Field(max_length=MAX_BLOCKS),
        Field(fail_fast=True),
        Tag("<list>"),
    ],
    Discriminator(lambda value: "<list>" if isinstance(value, list) else "<string>"),
]


class ToolResultBlockParam(Block):
    """What a call gave back."""

    KIND = "tool_result"
    LATER: ClassVar[Harmless] = {"toolset_name": ()}
    type: Literal["tool_result"]
    tool_use_id: Id
    content: Results = ""
    is_error: bool = False

    @property
    def references(self) -> list[str]:
        """The names of the tools that were found."""
        blocks = [] if isinstance(self.content, str) else self.content
        return [block.tool_name for block in blocks if isinstance(block, ToolReferenceBlockParam)]


class ToolName(Strict):
    """A tool by its name."""

    type: Literal["tool_reference"]
    name: Annotated[str, Field(pattern=NAME)]


class ToolAdditionBlockParam(Block):
    """From here on, a tool of ``tools`` can be called."""

    KIND = "tool_addition"
    type: Literal["tool_addition"]
    tool: ToolName


class ToolRemovalBlockParam(Block):
    """From here on, a tool can no longer be called."""

    KIND = "tool_removal"
    type: Literal["tool_removal"]
    tool: ToolName


AnyBlock = Annotated[
    Annotated[Text, Tag("<text>")]
    | Annotated[ThinkingBlockParam, Tag("<thinking>")]
    | Annotated[ToolUseBlockParam, Tag("<tool_use>")]
    | Annotated[ToolResultBlockParam, Tag("<tool_result>")]
    | Annotated[ToolReferenceBlockParam, Tag("<tool_reference>")]
    | Annotated[ToolAdditionBlockParam, Tag("<tool_addition>")]
    | Annotated[ToolRemovalBlockParam, Tag("<tool_removal>")],
    Discriminator(kind_of),
]
OneBlock = (
    TextBlockParam
    | ThinkingBlockParam
    | ToolUseBlockParam
    | ToolResultBlockParam
    | ToolReferenceBlockParam
    | ToolAdditionBlockParam
    | ToolRemovalBlockParam
)
Content = Annotated[
    Annotated[str, Tag("<string>")]
    | Annotated[list[AnyBlock], Field(max_length=MAX_BLOCKS), Field(fail_fast=True), Tag("<list>")],
    Discriminator(lambda value: "<list>" if isinstance(value, list) else "<string>"),
]
MAY_HOLD = {
    "user": {"text", "tool_result"},
    "assistant": {"text", "thinking", "tool_use"},
    "system": {"text", "tool_addition", "tool_removal"},
}


class AnthropicMessageParam(Strict):
    """One message."""

    role: Literal["user", "assistant", "system"]
    content: Content

    @model_validator(mode="after")
    def fits_its_role(self) -> Self:
        """Each block where it belongs."""
        for block in self.blocks:
            if block.KIND not in MAY_HOLD[self.role]:
                raise wrong("content", f"of a message with this role cannot contain {block.KIND} blocks")
        return self

    @property
    def blocks(self) -> list[OneBlock]:
        """The content as a list of blocks."""
        return [TextBlockParam(type="text", text=self.content)] if isinstance(self.content, str) else [*self.content]


def only_ours(value: object) -> object:
    """Refuse tools that only other servers run, with an error that says so."""
    if isinstance(value, str) and value != "custom":
        raise ValueError("names a kind of tool that is not supported by this server: only custom is")
    return value


class AnthropicTool(Strict):
    """What can be called. However its input is to be streamed: it is, as it comes."""

    LATER: ClassVar[Harmless] = {
        "allowed_callers": (["direct"],),
        "eager_input_streaming": (True, False),
        "input_examples": ([],),
    }
    type: Annotated[Literal["custom"], BeforeValidator(only_ours)] = "custom"
    name: Annotated[str, Field(pattern=NAME)]
    description: Annotated[str, Field(max_length=MAX_DESCRIPTION)] | None = None
    input_schema: dict[str, Any]
    strict: bool = False
    defer_loading: bool = False
    cache_control: CacheControl | None = None

    @model_validator(mode="before")
    @classmethod
    def is_custom(cls, data: object) -> object:
        """The tools of others have fields of their own: they are refused by their type, not by those."""
        if isinstance(data, dict) and isinstance(data.get("type"), str) and data["type"] != "custom":
            return {"type": data["type"], "name": "x", "input_schema": {}}
        return data


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


class Thinking(Strict):
    """Whether to think before the answer, and how much of it to show."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = Field(None, ge=MIN_THINKING, le=INT32)
    display: Literal["summarized", "omitted"] | None = None

    @model_validator(mode="after")
    def has_its_budget(self) -> Self:
        """A budget where thinking is enabled, and only there."""
        if (self.type == "enabled") != (self.budget_tokens is not None):
            raise wrong("budget_tokens", "is required for the type enabled, and not allowed for others")
        return self


class OutputFormat(Strict):
    """What the answer is to be: JSON of a schema."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Strict):
    """How the answer is to be."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class Metadata(Strict):
    """The client's own note about its user; kept out of everything."""

    user_id: str | None = Field(None, max_length=512)


class PromptRequest(Strict):
    """What a prompt is made of: ``POST /v1/messages/count_tokens``."""

    LATER: ClassVar[Harmless] = {
        "container": (),
        "context_management": (),
        "diagnostics": ({}, {"previous_message_id": None}),
        "inference_geo": (),
        "mcp_servers": ([],),
        "speed": ("standard",),
        "thread": (),
        "user_profile_id": (),
        "workspace_id": (),
    }
    model: str = Field("", max_length=512)
    session_id: str | None = None
    messages: Annotated[list[AnthropicMessageParam], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]
    system: Texts = ""
    tools: Annotated[list[AnthropicTool], Field(max_length=MAX_TOOLS), Field(fail_fast=True)] = Field(
        default_factory=list
    )
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None

    @model_validator(mode="after")
    def tools_differ(self) -> Self:
        """Checks across tools."""
        if len({tool.name for tool in self.tools}) < len(self.tools):
            raise wrong("tools", "must have different names")
        choice = self.tool_choice
        if choice is not None and choice.type != "none" and not self.tools and self.session_id is None:
            raise wrong("tool_choice", "needs tools")
        named = None if choice is None else choice.name
        if named is not None and self.tools and named not in {tool.name for tool in self.tools}:
            raise wrong("tool_choice", "names a tool that is not in tools")
        return self

    @property
    def keep_seconds(self) -> int:
        """How long the KV should be kept, by the longest ``cache_control``; 0 without any."""
        return max((3600 if mark.ttl == "1h" else 300 for mark in marks(self)), default=0)


Sequence = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]


class MessagesRequest(PromptRequest):
    """``POST /v1/messages``. With ``max_tokens`` 0 the prompt is only read, into the cache."""

    LATER: ClassVar[Harmless] = {**PromptRequest.LATER, "service_tier": ("auto", "standard_only")}
    max_tokens: int = Field(ge=0, le=INT32)
    stop_sequences: Annotated[list[Sequence], Field(max_length=MAX_STOPS)] | None = Field(
        None, description=default("none")
    )
    temperature: Annotated[float, Field(ge=0, le=1)] | None = Field(None, description=default("1.0"))
    top_p: Annotated[float, Field(ge=0, le=1)] | None = Field(None, description=default("1.0"))
    top_k: Annotated[int, Field(ge=0, le=INT32)] | None = Field(None, description=default("0"))
    metadata: Metadata | None = None
    stream: bool = False

    @model_validator(mode="after")
    def thinks_within_its_limit(self) -> Self:
        """Thoughts are part of what is generated."""
        budget = None if self.thinking is None else self.thinking.budget_tokens
        if budget is not None and budget >= self.max_tokens:
            raise wrong("max_tokens", "must be more than thinking.budget_tokens")
        return self


def marks(value: object) -> list[CacheControl]:
    """All ``cache_control`` fields in a request."""
    if isinstance(value, CacheControl):
        return [value]
    if isinstance(value, BaseModel):
        return [mark for name in type(value).model_fields for mark in marks(getattr(value, name))]
    return [mark for item in value for mark in marks(item)] if isinstance(value, list) else []
