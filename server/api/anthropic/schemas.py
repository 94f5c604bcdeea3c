"""Request schemas of Anthropic's Messages API. Strict: each field is honoured or refused by name; ``null`` means
absent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, Field, model_validator

from server.api.anthropic.block_schemas import (
    MAY_HOLD,
    AnyBlock,
    CacheControl,
    CompactionBlockParam,
    Content,
    TextBlockParam,
    Texts,
)
from server.api.anthropic.context_edits import CompactEdit, ContextManagement
from server.api.anthropic.tool_definitions import AnthropicTool, AnyTool, ToolChoice
from server.media.media import Media
from server.schemas.field_types import INT32, MAX_STOP_CHARS, MAX_STOPS
from server.schemas.messages import MAX_MESSAGES, MAX_TOOLS
from server.schemas.requests import default
from server.schemas.strict import Harmless, Strict, wrong

MIN_THINKING = 1024  # tokens


class AnthropicMessageParam(Strict):
    """One message."""

    role: Literal["user", "assistant", "system"]
    content: Content

    @model_validator(mode="after")
    def fits_its_role(self) -> Self:
        """Each block where it belongs."""
        for block in self.blocks:
            kind = block.kind if isinstance(block, Media) else block.KIND
            if kind not in MAY_HOLD[self.role]:
                raise wrong("content", f"of a message with this role cannot contain {kind} blocks")
        return self

    @property
    def blocks(self) -> Sequence[AnyBlock]:
        return [TextBlockParam(type="text", text=self.content)] if isinstance(self.content, str) else self.content


class Thinking(Strict):
    """Whether to think before the answer, and how much of it to show."""

    IDLE: ClassVar[frozenset[str]] = frozenset({"block_binding"})
    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = Field(None, ge=MIN_THINKING, le=INT32)
    display: str | None = None
    block_binding: object = None

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
    """How the answer is to be. ``task_budget`` is the client's own count of what a task may take."""

    IDLE: ClassVar[frozenset[str]] = frozenset({"task_budget"})
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None
    task_budget: object = None


class Metadata(Strict):
    """The client's own note about its user: which conversation the request belongs to, at best."""

    user_id: str | None = Field(None, max_length=8192)


class DiagnosticsRequest(Strict):
    """Asks why less was reused than of an earlier message's request."""

    previous_message_id: Annotated[str, Field(max_length=512)] | None = None


def since_compaction(messages: Sequence[AnthropicMessageParam]) -> Sequence[AnthropicMessageParam]:
    """The messages from the last compaction on, which is then the first block; the same list if there is none."""
    for number in reversed(range(len(messages))):
        blocks = messages[number].blocks
        places = [place for place, block in enumerate(blocks) if isinstance(block, CompactionBlockParam)]
        if places:
            first = messages[number].model_copy(update={"content": [*blocks[places[-1] :]]})
            return [first, *messages[number + 1 :]]
    return messages


class CompactionRequest(Strict):
    """Asks for a compaction of the whole conversation and no reply; ``instructions`` take the place of our question."""

    type: Literal["summarize"]
    instructions: str | None = None


class PromptRequest(Strict):
    """What a prompt is made of: ``POST /v1/messages/count_tokens``."""

    LATER: ClassVar[Harmless] = {
        "billing_policy": ({"type": "billing_policy", "bill_to": "self"},),
        "compaction": (),
        "container": (),
        "fallback_credit_token": (),
        "mcp_servers": ([],),
        "thread": (),
    }
    IDLE: ClassVar[frozenset[str]] = frozenset(
        {
            "betas",
            "context_hint",
            "fallbacks",
            "inference_geo",
            "safeguards",
            "speed",
            "user_profile_id",
            "workspace_id",
        }
    )
    model: str = Field("", max_length=512)
    session_id: str | None = None
    messages: Annotated[list[AnthropicMessageParam], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]
    system: Texts = ""
    tools: Annotated[list[AnyTool], Field(max_length=MAX_TOOLS), Field(fail_fast=True)] = Field(default_factory=list)
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None
    context_management: ContextManagement | None = None
    diagnostics: DiagnosticsRequest | None = None
    output_format: OutputFormat | None = None
    betas: list[str] | None = None
    context_hint: object = None
    fallbacks: object = None
    inference_geo: str | None = None
    safeguards: object = None
    speed: str | None = None
    user_profile_id: str | None = None
    workspace_id: str | None = None

    @model_validator(mode="after")
    def one_format(self) -> Self:
        """``output_format`` is the older name of ``output_config.format``."""
        newer = None if self.output_config is None else self.output_config.format
        if self.output_format is not None and newer is not None and newer != self.output_format:
            raise wrong("output_format", "differs from output_config.format")
        return self

    @property
    def answer_format(self) -> OutputFormat | None:
        """What the answer is to be, in either form."""
        newer = None if self.output_config is None else self.output_config.format
        return self.output_format if newer is None else newer

    @model_validator(mode="after")
    def tools_differ(self) -> Self:
        """Checks across tools."""
        names = [tool.name for tool in self.functions]
        if len({*names}) < len(names):
            raise wrong("tools", "must have different names")
        choice = self.tool_choice
        if choice is not None and choice.type in ("any", "tool") and not names:
            if self.tools:
                raise wrong("tool_choice", "asks for a tool that this server cannot run")
            if self.session_id is None:
                raise wrong("tool_choice", "needs tools")
        named = None if choice is None else choice.name
        if named is not None and names and named not in names:
            vendor = any(tool.name == named for tool in self.tools)
            problem = "names a tool that this server cannot run" if vendor else "names a tool that is not in tools"
            raise wrong("tool_choice", problem)
        return self

    @model_validator(mode="after")
    def has_what_a_compaction_replaces(self) -> Self:
        """A session has what came before in its log."""
        if self.session_id is not None and since_compaction(self.messages) is not self.messages:
            raise wrong("messages", "with a compaction block need the whole conversation, without session_id")
        return self

    @property
    def begins_reply(self) -> bool:
        last = self.messages[-1]
        return last.role == "assistant" and any(not isinstance(block, CompactionBlockParam) for block in last.blocks)

    @property
    def functions(self) -> list[AnthropicTool]:
        """The tools that the client runs."""
        return [tool for tool in self.tools if isinstance(tool, AnthropicTool)]

    @property
    def compact_edit(self) -> CompactEdit | None:
        """How the conversation is compacted where that is due, if it is."""
        return None if self.context_management is None else self.context_management.compaction

    @property
    def keep_seconds(self) -> int:
        """How long the KV should be kept, by the longest ``cache_control``; 0 without any."""
        return max((3600 if mark.ttl == "1h" else 300 for mark in marks(self)), default=0)


StopSequence = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]


class MessagesRequest(PromptRequest):
    """``POST /v1/messages``. With ``max_tokens`` 0 the prompt is only read, into the cache."""

    LATER: ClassVar[Harmless] = {name: value for name, value in PromptRequest.LATER.items() if name != "compaction"}
    IDLE: ClassVar[frozenset[str]] = PromptRequest.IDLE | {"service_tier"}
    compaction: CompactionRequest | None = None
    service_tier: Annotated[str, Field(max_length=64)] | None = None
    max_tokens: int = Field(ge=0, le=INT32)
    stop_sequences: Annotated[list[StopSequence], Field(max_length=MAX_STOPS)] | None = Field(
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
