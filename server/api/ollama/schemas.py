"""Request schemas of Ollama's API. Strict: each field is honoured or refused by name; ``null`` means absent."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from server.api.embeddings.schemas import Texts
from server.schemas.field_types import INT32, INT64, Stops, Temperature, TopP
from server.schemas.keep_alive import KeepAlive, kept_seconds
from server.schemas.media_parts import CheckedImages
from server.schemas.messages import MAX_ID, MAX_MESSAGES, MAX_TOOLS, NAME
from server.schemas.routed_fields import OllamaOptions
from server.schemas.strict import Harmless, Strict, wrong
from server.schemas.tools import ChatTool

LATEST = ":latest"  # the tag that clients put behind a name
Think = bool | Literal["low", "medium", "high", "max"]


def plain_name(name: str) -> str:
    """A model's name without the tag of its newest version."""
    return name.removesuffix(LATEST)


class Options(OllamaOptions):
    """Options of sampling, and those that size Ollama's process or its context, which change nothing here. Samplers
    that this server does not have are taken only with the value that switches them off.
    """

    IDLE: ClassVar[frozenset[str]] = OllamaOptions.IDLE | {
        "f16_kv",
        "low_vram",
        "main_gpu",
        "numa",
        "penalize_newline",
        "repeat_last_n",
        "use_mlock",
        "vocab_only",
    }
    LATER: ClassVar[Harmless] = {
        "mirostat": (0,),
        "mirostat_eta": (0.1,),
        "mirostat_tau": (5.0,),
        "tfs_z": (1, 1.0),
        "typical_p": (1, 1.0),
    }
    num_predict: Annotated[int, Field(ge=-2, le=INT32)] | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: Annotated[int, Field(ge=-1, le=INT32)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repeat_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    seed: Annotated[int, Field(ge=-INT64 - 1, le=INT64)] | None = None
    stop: Stops | None = None
    f16_kv: bool | None = None
    low_vram: bool | None = None
    main_gpu: int | None = None
    numa: bool | None = None
    penalize_newline: bool | None = None
    repeat_last_n: int | None = None
    use_mlock: bool | None = None
    vocab_only: bool | None = None


class GeneratingRequest(Strict):
    """The fields that chats and completions share. ``keep_alive`` pins the KV of a chat for that time, and the model
    stays loaded for so long after it.
    """

    model: str = Field("", max_length=512)
    stream: bool = True
    format: Literal["", "json"] | dict[str, Any] | None = None
    options: Options = Field(default_factory=Options)
    think: Think | None = None
    keep_alive: KeepAlive | None = None
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)
    truncate: bool | None = None  # of a prompt that is too long: it is refused in any case
    shift: bool | None = None
    IDLE: ClassVar[frozenset[str]] = frozenset({"truncate", "shift"})

    @property
    def unloads(self) -> bool:
        """Whether the model is to be freed after the request."""
        return self.keep_alive is not None and kept_seconds(self.keep_alive) == 0


class EarlierFunction(Strict):
    """The function of a call in an earlier reply."""

    IDLE: ClassVar[frozenset[str]] = frozenset({"index"})
    name: Annotated[str, Field(pattern=NAME)]
    arguments: dict[str, Any] = Field(default_factory=dict)
    index: int | None = None


class SentToolCall(Strict):
    """A call in an earlier reply."""

    IDLE: ClassVar[frozenset[str]] = frozenset({"type"})
    function: EarlierFunction
    id: Annotated[str, Field(max_length=MAX_ID)] | None = None
    type: str | None = None


class SentMessage(Strict):
    """One message of a chat."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    thinking: str | None = None
    tool_calls: Annotated[list[SentToolCall], Field(max_length=MAX_TOOLS)] = Field(default_factory=list)
    tool_name: str | None = None
    name: str | None = None  # of the tool, as older clients write it
    tool_call_id: Annotated[str, Field(max_length=MAX_ID)] | None = None
    images: CheckedImages = Field(default_factory=list)

    @model_validator(mode="after")
    def fits_its_role(self) -> Self:
        """Each field where it belongs."""
        if self.role != "assistant":
            for field in ("thinking", "tool_calls"):
                if getattr(self, field):
                    raise wrong(field, "is only allowed in assistant messages")
        return self


class ChatBody(GeneratingRequest):
    """``POST /api/chat``. Without messages it only asks whether the model is loaded."""

    messages: Annotated[list[SentMessage], Field(max_length=MAX_MESSAGES), Field(fail_fast=True)] = Field(
        default_factory=list
    )
    tools: Annotated[list[ChatTool], Field(max_length=MAX_TOOLS), Field(fail_fast=True)] = Field(default_factory=list)


class GenerateBody(GeneratingRequest):
    """``POST /api/generate``. ``raw``: the prompt is used as it is, without the chat template; so it is with a
    ``suffix``, the text behind the gap that the reply fills.
    """

    LATER: ClassVar[Harmless] = {"template": ("",), "context": ([],)}
    prompt: str = ""
    suffix: str = ""
    system: str = ""
    raw: bool = False
    images: CheckedImages = Field(default_factory=list)

    @model_validator(mode="after")
    def raw_has_no_system(self) -> Self:
        """A raw prompt has no place for a system message, nor for pictures."""
        if self.is_completion and self.images:
            raise wrong("images", "is not allowed with raw: true or a suffix")
        if self.is_completion and self.system:
            raise wrong("system", "is not allowed with raw: true or a suffix")
        return self

    @property
    def is_completion(self) -> bool:
        """Whether the prompt is used without the chat template."""
        return self.raw or bool(self.suffix)


class ShowBody(Strict):
    """``POST /api/show``; ``name`` is the older name of ``model``."""

    IDLE: ClassVar[frozenset[str]] = frozenset({"verbose", "system", "template", "options"})
    model: str = Field("", max_length=512)
    name: str = Field("", max_length=512)
    verbose: bool = False
    system: str | None = None
    template: str | None = None
    options: dict[str, Any] | None = None


class EmbedBody(Strict):
    """``POST /api/embed``."""

    model: str = Field("", max_length=512)
    input: Texts
    truncate: bool = True
    dimensions: Annotated[int, Field(ge=1, le=INT32)] | None = None
    options: Options = Field(default_factory=Options)
    keep_alive: KeepAlive | None = None


class OldEmbedBody(Strict):
    """``POST /api/embeddings``, the older form for one text."""

    model: str = Field("", max_length=512)
    prompt: str
    options: Options = Field(default_factory=Options)
    keep_alive: KeepAlive | None = None
