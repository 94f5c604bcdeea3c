"""Request schemas of responses and conversations, as strict as those of ``server.schemas.requests``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Discriminator, Field, Tag, model_validator

from server.api.responses.call_schemas import NewTools
from server.api.responses.client_tools import ClientTool, ToolNames
from server.api.responses.item_schemas import CompactionTrigger, Items
from server.api.responses.tool_schemas import (
    AllowedToolChoice,
    AnyObject,
    Choice,
    NamedChoice,
    ResponseTools,
    distinct,
    note_tools,
)
from server.schemas.field_types import INT32
from server.schemas.messages import Id
from server.schemas.metadata import Metadata
from server.schemas.output_formats import Formatted
from server.schemas.query import Query
from server.schemas.requests import TurnRequest
from server.schemas.strict import Strict, missing_field_error, wrong
from server.schemas.thinking_fields import ThinkingFields
from server.schemas.tools import (
    MAX_DESCRIPTION,
    AllowedChoice,
    AllowedTools,
    FunctionName,
    NamedCustom,
    NamedFunction,
    NamedTool,
    ToolChoice,
)

MAX_ITEMS = 20  # that are added to a conversation at once
LOGPROBS = "message.output_text.logprobs"
SEALED = "reasoning.encrypted_content"
Include = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]
Later = Mapping[str, tuple[object, ...]]
Word = Annotated[str, Field(max_length=64)]
Summary = Literal["auto", "concise", "detailed", "none"]


class ResponseTextFormat(Strict):
    """What the answer looks like. ``schema`` and its name belong to ``json_schema``."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: FunctionName | None = None
    description: Annotated[str, Field(max_length=MAX_DESCRIPTION)] | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None

    @model_validator(mode="after")
    def is_whole(self) -> Self:
        """A schema has a name, and nothing else has what belongs to one."""
        if self.type == "json_schema":
            if self.name is None or self.schema_ is None:
                raise missing_field_error("schema" if self.schema_ is None else "name")
        elif (extra := self.model_fields_set - {"type"}) != set():
            raise wrong(min(extra).rstrip("_"), "is only allowed with json_schema")
        return self

    @property
    def chat_format(self) -> Formatted:
        """The same as chats have it."""
        if self.type != "json_schema":
            return Formatted.model_validate({"response_format": {"type": self.type}})
        named = {"name": self.name, "schema": self.schema_, "strict": bool(self.strict)}
        return Formatted.model_validate({"response_format": {"type": self.type, "json_schema": named}})

    def to_object(self) -> dict[str, Any]:
        if self.type != "json_schema":
            return {"type": self.type}
        return {
            "type": self.type,
            "name": self.name,
            "description": self.description,
            "schema": self.schema_,
            "strict": bool(self.strict),
        }


class TextConfig(Strict):
    """About the answer's text. ``verbosity`` is told to templates that read it; others know ``medium`` only."""

    format: ResponseTextFormat = Field(default_factory=lambda: ResponseTextFormat.model_validate({"type": "text"}))
    verbosity: Literal["low", "medium", "high"] | None = None

    def to_object(self) -> dict[str, Any]:
        return {"format": self.format.to_object(), "verbosity": self.verbosity or "medium"}


class ReasoningOptions(Strict):
    """About what is thought. It is returned in full: no summary is made of it. All reasoning of earlier turns that the
    input has is rendered.
    """

    LATER: ClassVar[Later] = {"mode": ("standard",)}
    IDLE: ClassVar[frozenset[str]] = frozenset({"summary", "generate_summary", "context"})
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Summary | None = None
    generate_summary: Summary | None = None
    context: Literal["auto", "current_turn", "all_turns"] | None = None


class ConversationId(Strict):
    """A conversation by its id."""

    id: Id


Conversation = Annotated[
    Annotated[Id, Tag("<id>")] | Annotated[ConversationId, Tag("<object>")],
    Discriminator(lambda value: "<id>" if isinstance(value, str) else "<object>"),
]
Input = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[Items, Tag("<items>")],
    Discriminator(lambda value: "<items>" if isinstance(value, list) else "<text>"),
]


class ResponseStreamOptions(Strict):
    """``include_obfuscation`` pads the events of a stream, against those who see how long they are. There are no
    summaries of reasoning to deliver in any way.
    """

    IDLE: ClassVar[frozenset[str]] = frozenset({"reasoning_summary_delivery"})
    include_obfuscation: bool = False
    reasoning_summary_delivery: Word | None = None


class InputRequest(TurnRequest):
    """``POST /v1/responses/input_tokens``, and what a response has in common with it: all that makes the prompt."""

    LATER: ClassVar[Later] = {"personality": (), "prompt": ()}
    IDLE: ClassVar[frozenset[str]] = frozenset({"client_metadata", "access_programs"})
    PROMPT: ClassVar[str] = "input"
    input: Input | None = None
    instructions: str | None = None
    previous_response_id: Id | None = None
    conversation: Conversation | None = None
    tools: Annotated[ResponseTools, AfterValidator(distinct)] = Field(default_factory=list)
    tool_choice: Choice = "auto"
    parallel_tool_calls: bool = True
    text: TextConfig = Field(default_factory=TextConfig)
    reasoning: ReasoningOptions = Field(default_factory=ReasoningOptions)
    truncation: Literal["auto", "disabled"] = "disabled"
    client_metadata: AnyObject | None = None
    access_programs: object = None

    @model_validator(mode="after")
    def notes_tools(self) -> Self:
        """Note what of the tools is taken otherwise."""
        note_tools(self.tools)
        return self

    @model_validator(mode="after")
    def compacts_at_its_end(self) -> Self:
        """Nothing follows a trigger."""
        items = self.input if isinstance(self.input, list) else []
        if any(isinstance(item, CompactionTrigger) for item in items[:-1]):
            raise wrong("input", "can have a compaction_trigger as its last item only")
        return self

    @model_validator(mode="after")
    def names_one_past(self) -> Self:
        """At most one of both, and something to answer."""
        if self.conversation is not None and self.previous_response_id is not None:
            raise wrong("previous_response_id", "and conversation cannot be used together")
        if self.input is None and self.conversation is None and self.previous_response_id is None:
            raise missing_field_error("input")
        return self

    @property
    def effort(self) -> str | None:
        return self.reasoning.effort

    def tool_choice_object(self) -> object:
        """``tool_choice`` as a response tells of it."""
        choice = self.tool_choice
        return choice if isinstance(choice, str) else choice.model_dump(mode="json", exclude_none=True)

    def chat_tool_choice(self, names: ToolNames) -> ToolChoice:
        """``tool_choice`` as chats have it."""
        choice = self.tool_choice
        match choice:
            case NamedChoice():
                return named_tool(names, choice)
            case AllowedToolChoice():
                allowed: list[NamedTool | NamedCustom] = [named_tool(names, tool) for tool in choice.tools]
                return AllowedChoice(type="allowed_tools", allowed_tools=AllowedTools(mode=choice.mode, tools=allowed))
        return choice

    @property
    def added_tools(self) -> list[ClientTool]:
        items = self.input if isinstance(self.input, list) else []
        return [tool for item in items if isinstance(item, NewTools) for tool in item.client_tools]

    @property
    def compacts_if_long(self) -> bool:
        """Whether a conversation that is too long is compacted, rather than refused."""
        return self.truncation == "auto"

    @property
    def is_whole(self) -> bool:
        """Whether the input is the whole conversation."""
        return self.previous_response_id is None and self.conversation is None

    @property
    def conversation_id(self) -> str | None:
        return self.conversation.id if isinstance(self.conversation, ConversationId) else self.conversation

    @property
    def token_limit(self) -> int | None:
        return None

    @property
    def token_logprobs(self) -> int | None:
        return None


def named_tool(names: ToolNames, choice: NamedChoice) -> NamedTool:
    return NamedTool(type="function", function=NamedFunction(name=names.name(choice.key)))


class CompactionRule(Strict):
    """Compacts a conversation of more than ``compact_threshold`` tokens before the reply; without one, or with one
    beyond the context, as soon as it does not fit.
    """

    type: Literal["compaction"]
    compact_threshold: int | None = Field(None, ge=1, le=INT32)


class ResponseRequest(ThinkingFields, InputRequest):
    """``POST /v1/responses``. ``max_tool_calls`` counts calls of tools that the server runs itself: there are none."""

    LATER: ClassVar[Later] = dict.fromkeys(("prompt", "moderation", "image"), ())
    IDLE: ClassVar[frozenset[str]] = InputRequest.IDLE | {"max_tool_calls", "safety_identifier", "service_tier"}
    max_output_tokens: int | None = Field(None, ge=1, le=INT32)
    max_tool_calls: int | None = Field(None, ge=1, le=INT32)
    include: list[Include] = Field(default_factory=list, max_length=64)
    metadata: Metadata = Field(default_factory=dict)
    store: bool = True
    stream_options: ResponseStreamOptions | None = None
    background: bool = False
    context_management: Annotated[list[CompactionRule], Field(max_length=16), Field(fail_fast=True)] = Field(
        default_factory=list
    )
    service_tier: Word = "auto"  # there is one tier: a response tells of it as "default"
    top_logprobs: int | None = Field(None, ge=0, le=20)
    safety_identifier: Annotated[str, Field(max_length=512)] | None = None

    @model_validator(mode="after")
    def agrees(self) -> Self:
        """Checks across fields."""
        if self.background and not self.store:
            raise wrong("background", "needs store: true, as the response is fetched later")
        if self.stream_options is not None and not self.stream:
            raise wrong("stream_options", "needs stream: true")
        return self

    @property
    def compacts_if_long(self) -> bool:
        return bool(self.context_management) or super().compacts_if_long

    @property
    def compacts_now(self) -> bool:
        """Whether the request asks for a compaction in place of a reply."""
        return isinstance(self.input, list) and bool(self.input) and isinstance(self.input[-1], CompactionTrigger)

    @property
    def compact_threshold(self) -> int | None:
        """Beyond how many tokens a conversation is compacted; None: as soon as it does not fit."""
        given = [rule.compact_threshold for rule in self.context_management if rule.compact_threshold is not None]
        return min(given, default=None)

    @property
    def hints(self) -> dict[str, str]:
        found = {"metadata": self.metadata, "client_metadata": self.client_metadata or {}}
        named = {f"{field}.{name}": value for field, values in found.items() for name, value in values.items()}
        return {**super().hints, **{path: value for path, value in named.items() if isinstance(value, str)}}

    @property
    def token_limit(self) -> int | None:
        return self.max_output_tokens

    @property
    def token_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if LOGPROBS in self.include or self.top_logprobs else None


class Including(Query):
    """``include`` asks for what is shown anyway, or is nowhere; clients write it with brackets too."""

    include: list[Include] = Field(default_factory=list)

    @model_validator(mode="before")
    @classmethod
    def brackets(cls, data: object) -> object:
        """``include[]=...`` as ``include=...``."""
        if not isinstance(data, dict) or "include[]" not in data:
            return data
        given = data["include[]"]
        rest = {name: value for name, value in data.items() if name != "include[]"}
        return {**rest, "include": given if isinstance(given, list) else [given]}


class ListItems(Including):
    """A page of items, the last ones first unless ``order`` says otherwise."""

    limit: int = Field(20, ge=1, le=100)
    order: Literal["asc", "desc"] = "desc"
    after: Id | None = None


class RetrieveResponse(Including):
    """``GET /v1/responses/{id}``: the object, or as ``stream`` its events behind number ``starting_after``."""

    LATER: ClassVar[Later] = {"include_obfuscation": ("false",)}
    stream: bool = False
    starting_after: int | None = Field(None, ge=-1, le=INT32)

    @model_validator(mode="after")
    def streams(self) -> Self:
        """A place in a stream needs one."""
        if self.starting_after is not None and not self.stream:
            raise wrong("starting_after", "needs stream=true")
        return self


def without_trigger(items: Items) -> Items:
    """Items that are kept: a trigger is a request. Raises ValueError for one."""
    if any(isinstance(item, CompactionTrigger) for item in items):
        raise ValueError("cannot have a compaction_trigger: it asks for a response")
    return items


class CreateConversation(Strict):
    """``POST /v1/conversations``."""

    items: Annotated[Items, Field(max_length=MAX_ITEMS), AfterValidator(without_trigger)] = Field(default_factory=list)
    metadata: Metadata = Field(default_factory=dict)


class UpdateConversation(Strict):
    """``POST /v1/conversations/{id}``: other pairs of metadata."""

    NULLS: ClassVar[frozenset[str]] = frozenset({"metadata"})
    metadata: Metadata | None


class AddItems(Strict):
    """``POST /v1/conversations/{id}/items``."""

    items: Annotated[Items, Field(min_length=1, max_length=MAX_ITEMS), AfterValidator(without_trigger)]
