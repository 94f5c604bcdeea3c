"""The messages of a chat request, and their conversion to logged messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag, model_validator

from server import surrogates
from server.errors import bad_request
from server.log.logged_message import LoggedCall, LoggedFunction, LoggedMessage
from server.media.media import Media, PlacedMedia
from server.schemas.custom_input import arguments_with
from server.schemas.media_parts import CheckedMedia, join_parts, kind_of_part
from server.schemas.sent_history import PART_TYPES, mend_history
from server.schemas.strict import Harmless, Strict, missing_field_error, wrong

MAX_MESSAGES = 10_000
MAX_TOOLS = 4096
MAX_PARTS = 10_000  # of a content
MAX_ID = 256  # characters
THOUGHTS = ("reasoning_content", "reasoning", "reasoning_text")  # fields for the reasoning of a reply
NAME = r"^[a-zA-Z0-9_-]{1,128}$"


def only_text(value: object) -> object:
    """Refuse part types that only other servers support, with an error that says so."""
    if isinstance(value, str) and value in PART_TYPES:
        raise ValueError("names a kind of content that is not supported by this server: only text is")
    return value


def only_roles(value: object) -> object:
    """Refuse the role ``function``, which tools have replaced."""
    if value == "function":
        raise ValueError("is not supported: function messages are deprecated, use tool messages")
    return value


class TextPart(Strict):
    """A piece of text within a message; that of an assistant's refusal is its text too."""

    LATER: ClassVar[Harmless] = dict.fromkeys(
        sorted(PART_TYPES), ()
    )  # parts of another kind hold their content under its name
    IDLE: ClassVar[frozenset[str]] = frozenset({"cache_control"})
    type: Annotated[Literal["text", "refusal"], BeforeValidator(only_text)]
    text: str | None = None
    refusal: str | None = None
    cache_control: dict[str, Any] | None = None

    @model_validator(mode="after")
    def has_its_text(self) -> Self:
        """The field that the type names, and not the other one."""
        if getattr(self, self.type) is None:
            raise missing_field_error(self.type)
        if self.text is not None and self.refusal is not None:
            raise wrong("text" if self.type == "refusal" else "refusal", "is not allowed for this type")
        return self

    @property
    def plain(self) -> str:
        return self.text or self.refusal or ""


ContentPart = Annotated[
    Annotated[TextPart, Tag("<text>")] | Annotated[CheckedMedia, Tag("<media>")], Discriminator(kind_of_part)
]
Content = Annotated[
    Annotated[str, Tag("<text>")]
    | Annotated[Annotated[list[ContentPart], Field(max_length=MAX_PARTS), Field(fail_fast=True)], Tag("<parts>")],
    Discriminator(lambda value: "<parts>" if isinstance(value, list) else "<text>"),
]
Id = Annotated[str, Field(min_length=1, max_length=MAX_ID)]
CallArguments = Annotated[str, AfterValidator(surrogates.mend)]  # a JSON text if all went well


def plain_content(content: str | list[TextPart | Media]) -> tuple[str, list[PlacedMedia]]:
    """A message's content as one text, in which its media are placed. Texts are joined by newlines."""
    if isinstance(content, str):
        return content, []
    return join_parts(part if isinstance(part, Media) else part.plain for part in content)


def kind_of_call(value: object) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return "<custom>" if kind == "custom" else "<function>"


class SentFunction(Strict):
    """The function of a call in an earlier reply."""

    name: Annotated[str, Field(pattern=NAME)]
    arguments: CallArguments


class SentInput(Strict):
    """The custom tool of a call in an earlier reply."""

    name: Annotated[str, Field(pattern=NAME)]
    input: CallArguments


class SentCustomCall(Strict):
    """A call of a custom tool in an earlier reply."""

    IDLE: ClassVar[frozenset[str]] = frozenset({"index", "extra_content", "cache_control"})
    id: Id
    type: Literal["custom"]
    custom: SentInput
    index: int | None = None
    extra_content: object = None
    cache_control: dict[str, Any] | None = None

    def plain(self) -> LoggedCall:
        """The logged call, which is one of a function."""
        return LoggedCall(self.id, "function", LoggedFunction(self.custom.name, arguments_with(self.custom.input)))


class SentCall(Strict):
    """A call in an earlier reply. Clients that assemble calls from a stream send back its ``index`` too."""

    IDLE: ClassVar[frozenset[str]] = frozenset({"index", "extra_content", "cache_control"})
    id: Id
    type: Literal["function"] = "function"
    function: SentFunction
    index: int | None = None
    extra_content: object = None
    cache_control: dict[str, Any] | None = None

    def plain(self) -> LoggedCall:
        return LoggedCall(self.id, self.type, LoggedFunction(self.function.name, self.function.arguments))


AnyCall = Annotated[
    Annotated[SentCall, Tag("<function>")] | Annotated[SentCustomCall, Tag("<custom>")],
    Discriminator(kind_of_call),
]


class ChatMessageParam(Strict):
    """One message of a chat; with ``prefix`` it is the beginning of the reply. Fields that clients copy from an earlier
    reply are accepted.
    """

    LATER: ClassVar[Harmless] = {"audio": (), "function_call": ()}
    IDLE: ClassVar[frozenset[str]] = frozenset(
        {
            "annotations",
            "cache_control",
            "copilot_cache_control",
            "id",
            "provider_specific_fields",
            "reasoning_details",
            "reasoning_opaque",
        }
    )
    role: Annotated[Literal["system", "developer", "user", "assistant", "tool"], BeforeValidator(only_roles)]
    content: Content | None = None
    name: Annotated[str, Field(pattern=r"^[^\s<|\\/>]{1,64}$")] | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    reasoning_text: str | None = None  # Copilot's name for it, beside a sealed form of it
    reasoning_opaque: str | None = None
    tool_calls: Annotated[list[AnyCall], Field(max_length=MAX_TOOLS), Field(fail_fast=True)] = Field(
        default_factory=list
    )
    tool_call_id: Id | None = None
    provider_specific_fields: dict[str, Any] | None = None  # what LiteLLM keeps of a reply
    reasoning_details: object = None  # OpenRouter's form of reasoning, beside the text
    annotations: list[object] | None = None
    cache_control: dict[str, Any] | None = None
    copilot_cache_control: dict[str, Any] | None = None
    id: str | None = None
    prefix: bool = False

    @model_validator(mode="before")
    @classmethod
    def readable(cls, data: object) -> object:
        """Reasoning among the parts of a reply is its reasoning."""
        if not isinstance(data, dict) or not isinstance(data.get("content"), list):
            return data
        thoughts = [part for part in data["content"] if isinstance(part, dict) and part.get("type") == "thinking"]
        if data.get("role") != "assistant" or not thoughts:
            return data
        texts = [part["thinking"] for part in thoughts if isinstance(part.get("thinking"), str)]
        rest = [part for part in data["content"] if part not in thoughts]
        return {"reasoning_content": "\n".join(texts), **data, "content": rest}

    @model_validator(mode="after")
    def fits_its_role(self) -> Self:
        """Each field where it belongs, and all that its role needs."""
        if self.role != "assistant":
            for field in ("refusal", *THOUGHTS, "tool_calls", "prefix"):
                if getattr(self, field):
                    raise wrong(field, "is only allowed in assistant messages")
        if (self.role == "tool") != (self.tool_call_id is not None):
            if self.role == "tool":
                raise missing_field_error("tool_call_id")
            raise wrong("tool_call_id", "is only allowed in tool messages")
        thoughts = {field: text for field in THOUGHTS if (text := getattr(self, field))}
        for field, text in thoughts.items():
            if text != self.thought:
                raise wrong(field, f"differs from {next(iter(thoughts))}")
        if self.content is None and self.role != "assistant":
            raise missing_field_error("content")
        return self

    @property
    def thought(self) -> str:
        """The reasoning of a reply; "" if it has none."""
        return next((text for field in THOUGHTS if (text := getattr(self, field))), "")

    def plain(self) -> LoggedMessage:
        content, media = plain_content(self.content or "")
        texts = [content, self.refusal or ""]
        return LoggedMessage(
            self.role,
            "\n".join(text for text in texts if text),
            name=self.name or "",
            reasoning_content=self.thought,
            tool_calls=tuple(call.plain() for call in self.tool_calls),
            tool_call_id=self.tool_call_id or "",
            media=(*media,),
        )


Messages = Annotated[list[ChatMessageParam], Field(fail_fast=True), BeforeValidator(mend_history)]


def check_calls(past: Sequence[LoggedMessage], new: Sequence[LoggedMessage], param: str = "messages") -> None:
    """Tool messages of ``new`` answer calls of the assistant message before them (which may be in ``past``), each call
    once, and calls of one message have ids of their own. Calls without an answer are taken: who was interrupted may go
    on with other words. Raises a 400 that names the id, as in ``messages[3].tool_call_id``."""
    start = len(past)
    while start and past[start - 1].role == "tool":
        start -= 1
    whole = [*past[max(0, start - 1) :], *new]
    first_new = len(whole) - len(new)
    waiting: set[str] = set()
    for index, message in enumerate(whole, -first_new):
        where = f"{param}[{index}]"
        if message.role != "tool":
            waiting = set()
            for number, call in enumerate(message.tool_calls):
                if call.id in waiting and index >= 0:
                    field = f"{where}.tool_calls[{number}].id"
                    raise bad_request(
                        f"{field} was already used by an earlier call of this message.", field, "invalid_value"
                    )
                waiting.add(call.id)
        elif message.tool_call_id in waiting:
            waiting.remove(message.tool_call_id)
        elif index >= 0:
            field = f"{where}.tool_call_id"
            problem = "is not that of a call in the assistant message before it, or was answered already"
            raise bad_request(f"{field} {problem}.", field, "invalid_value")
