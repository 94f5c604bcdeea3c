"""The wire's requests. Strict: a field is honoured, or it is refused by its name; ``null`` means absent.

What a later version will honour is in ``LATER``, with the values that ask for nothing and are therefore taken.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

from scheduler.messages import Sampling, Stopping

MAX_STOPS = 16
MAX_STOP_CHARS = 1000
MAX_CHOICES = 16
MAX_MESSAGES = 10_000
MAX_PROMPTS = 128
INT32 = 2**31 - 1
INT64 = 2**63 - 1
TOKEN_ID = re.compile(r"(0|[1-9][0-9]{0,9})\Z")
MESSAGE_NOUN = {"tool": "tool messages", "function": "function messages"}
PART_TYPES = frozenset({"image_url", "input_audio", "file", "refusal", "video_url", "audio_url", "image"})


class Strict(BaseModel):
    """A JSON object of known fields. ``LATER``: field -> harmless values. ``NULLS``: where null is a value."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)
    LATER: ClassVar[Mapping[str, tuple[object, ...]]] = {}
    NULLS: ClassVar[frozenset[str]] = frozenset()

    @model_validator(mode="before")
    @classmethod
    def only_known(cls, data: object) -> object:
        """Drop nulls and harmless values; refuse the first field that is unknown or not served yet."""
        if not isinstance(data, dict):
            return data
        kept = {}
        for name, value in data.items():
            if value is None and name not in cls.NULLS and (name in cls.model_fields or name in cls.LATER):
                continue
            if name in cls.model_fields:
                kept[name] = value
            elif name not in cls.LATER:
                raise PydanticCustomError("unknown", "is unknown", {"field": name})
            elif not any(type(value) is type(harmless) and value == harmless for harmless in cls.LATER[name]):
                raise PydanticCustomError("unsupported", "is not supported by this server yet", {"field": name})
        return kept


class TextPart(Strict):
    """A piece of text within a message."""

    LATER = dict.fromkeys(sorted(PART_TYPES), ())  # parts of another kind hold their content under its name
    type: Annotated[Literal["text"], BeforeValidator(lambda value: only_text(value))]
    text: str


def only_text(value: object) -> object:
    """A better word for the part types that exist elsewhere."""
    if isinstance(value, str) and value in PART_TYPES:
        raise ValueError("names a kind of content that is not supported by this server yet: only text is")
    return value


def only_roles(value: object) -> object:
    """The same for the roles that come with tools."""
    if isinstance(value, str) and value in MESSAGE_NOUN:
        raise ValueError(f"cannot be this: {MESSAGE_NOUN[value]} are not supported by this server yet")
    return value


Content = Annotated[
    Annotated[str, Tag("<text>")]
    | Annotated[Annotated[list[TextPart], Field(min_length=1, max_length=1000), Field(fail_fast=True)], Tag("<parts>")],
    Discriminator(lambda value: "<parts>" if isinstance(value, list) else "<text>"),
]


def plain_text(content: str | list[TextPart]) -> str:
    """A message's content as one text. Parts are joined by line ends."""
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


class Message(Strict):
    """One message of a chat. The harmless values are what clients send back of an earlier reply."""

    LATER = {
        "name": (),
        "refusal": (),
        "audio": (),
        "function_call": (),
        "tool_calls": ([],),
        "tool_call_id": (),
        "annotations": ([],),
        "reasoning": (),
        "reasoning_content": (),
    }
    role: Annotated[Literal["system", "developer", "user", "assistant"], BeforeValidator(only_roles)]
    content: Content

    def plain(self) -> dict[str, str]:
        """Role and text, as templates and the log take them."""
        return {"role": self.role, "content": plain_text(self.content)}


Messages = Annotated[list[Message], Field(fail_fast=True)]


class StreamOptions(Strict):
    """What a stream carries besides its content."""

    LATER = {"include_obfuscation": (False,)}
    include_usage: bool = False
    continuous_usage_stats: bool = False


def bias(value: object) -> object:
    """``logit_bias`` by token id; ids beyond the vocabulary are found later, where the model is known."""
    if not isinstance(value, dict):
        raise ValueError("must be an object from token ids to numbers")
    biases = {}
    for key, amount in value.items():
        if not isinstance(key, (str, int)) or not TOKEN_ID.match(str(key)):
            raise ValueError("must have token ids as keys")
        if isinstance(amount, bool) or not isinstance(amount, (int, float)) or not -100 <= amount <= 100:
            raise ValueError("must have numbers from -100 to 100 as values")
        biases[int(key)] = float(amount)
    return biases


def stops(value: object) -> object:
    """``stop`` as a list."""
    texts = [value] if isinstance(value, str) else value
    if isinstance(texts, list):
        if len(texts) > MAX_STOPS:
            raise ValueError(f"can hold at most {MAX_STOPS} strings")
        if not all(isinstance(text, str) and 1 <= len(text) <= MAX_STOP_CHARS for text in texts):
            raise ValueError(f"must hold strings of 1 to {MAX_STOP_CHARS} characters")
    return texts


TokenId = Annotated[int, Field(ge=0, le=INT32)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
Stops = Annotated[
    list[str],
    BeforeValidator(stops),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS},
                {
                    "type": "array",
                    "items": {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS},
                    "maxItems": MAX_STOPS,
                },
            ]
        }
    ),
]
Bias = Annotated[
    dict[int, float],
    BeforeValidator(bias),
    WithJsonSchema({"type": "object", "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100}}),
]

LATER_EVERYWHERE: Mapping[str, tuple[object, ...]] = {
    "store": (False,),
    "metadata": ({},),
    "service_tier": ("auto", "default"),
    "prompt_cache_key": (),
    "prompt_cache_retention": (),
    "safety_identifier": (),
    "cache_salt": (),
}


class GenerationRequest(Strict):
    """What chats and completions have in common."""

    model: str = Field("", max_length=512)
    session_id: str | None = None
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, ge=0, le=1)
    top_k: int = Field(0, ge=-1, le=INT32)
    min_p: float = Field(0.0, ge=0, le=1)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    repetition_penalty: float = Field(1.0, gt=0, le=10)
    seed: int | None = Field(None, ge=-INT64 - 1, le=INT64)
    logit_bias: Bias = Field(default_factory=dict)
    stop: Stops = Field(default_factory=list)
    stop_token_ids: Annotated[TokenIds, Field(max_length=1024)] = Field(default_factory=list)
    min_tokens: int = Field(0, ge=0, le=INT32)
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str = Field("", max_length=512)  # the client's own note about its user; kept out of everything

    @model_validator(mode="after")
    def fits_together(self) -> Self:
        """Checks across fields."""
        limit = self.token_limit
        if limit is not None and self.min_tokens > limit:
            raise PydanticCustomError("value_error", "cannot be more than max_tokens", {"field": "min_tokens"})
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError("value_error", "needs stream: true", {"field": "stream_options"})
        return self

    @property
    def token_limit(self) -> int | None:
        """The most tokens that may be generated; None when the client left it open."""
        raise AssertionError("each endpoint names its own")

    @property
    def token_logprobs(self) -> int | None:
        """For how many alternatives of each token log-probabilities are wanted; None for none at all."""
        raise AssertionError("each endpoint names its own")

    def sampling(self, choice: int) -> Sampling:
        """How choice number ``choice`` draws: with a seed of its own, so that choices differ and repeat."""
        seed = self.seed
        if seed is not None:
            seed = (seed + choice + INT64 + 1) % (2 * INT64 + 2) - INT64 - 1
        return Sampling(
            temperature=self.temperature,
            top_p=max(self.top_p, 1e-9),  # 0 means: only the likeliest token
            top_k=max(self.top_k, 0),
            min_p=self.min_p,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            seed=seed,
            logit_bias=self.logit_bias,
        )

    def stopping(self, max_tokens: int | None) -> Stopping:
        """When a choice ends."""
        return Stopping(
            max_tokens=max_tokens,
            min_tokens=self.min_tokens,
            stop=tuple(self.stop),
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
        )


class ReplyRequest(GenerationRequest):
    """A chat without its messages: how the reply is to be made."""

    LATER = {
        **LATER_EVERYWHERE,
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "functions": ([],),
        "function_call": ("none",),
        "parallel_tool_calls": (),
        "response_format": ({"type": "text"},),
        "modalities": (["text"],),
        "audio": (),
        "prediction": (),
        "reasoning_effort": (),
        "verbosity": (),
        "web_search_options": (),
        "moderation": (),
    }
    max_tokens: int | None = Field(None, ge=1, le=INT32)
    max_completion_tokens: int | None = Field(None, ge=1, le=INT32)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)

    @model_validator(mode="after")
    def agrees(self) -> Self:
        """Checks across the fields of chats."""
        if self.top_logprobs is not None and not self.logprobs:
            raise PydanticCustomError("value_error", "needs logprobs: true", {"field": "top_logprobs"})
        both = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(both) == 2:
            raise PydanticCustomError("value_error", "differs from max_completion_tokens", {"field": "max_tokens"})
        return self

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def token_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class ChatRequest(ReplyRequest):
    """``POST /v1/chat/completions``."""

    messages: Messages = Field(min_length=1, max_length=MAX_MESSAGES)


class CompletionRequest(GenerationRequest):
    """``POST /v1/completions``."""

    LATER = {**LATER_EVERYWHERE, "suffix": ("",)}
    prompt: (
        str
        | TokenIds
        | Annotated[list[str], Field(max_length=MAX_PROMPTS), Field(fail_fast=True)]
        | Annotated[list[TokenIds], Field(max_length=MAX_PROMPTS), Field(fail_fast=True)]
    )
    max_tokens: int | None = Field(None, ge=0, le=INT32)
    best_of: int | None = Field(None, ge=1, le=MAX_CHOICES)
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool = False

    @model_validator(mode="after")
    def agrees(self) -> Self:
        """Checks across the fields of completions."""
        if self.best_of is not None and self.best_of != self.n:
            message = "is not supported by this server yet, unless it equals n"
            raise PydanticCustomError("value_error", message, {"field": "best_of"})
        if not self.prompt and isinstance(self.prompt, list):
            raise PydanticCustomError("value_error", "cannot be empty", {"field": "prompt"})
        if len(self.prompts) * self.n > MAX_PROMPTS:
            message = f"asks for more than {MAX_PROMPTS} choices, counting prompts times n"
            raise PydanticCustomError("value_error", message, {"field": "n"})
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """One entry per prompt: a text or token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [[*self.prompt]]
        return [*self.prompt]

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens

    @property
    def token_logprobs(self) -> int | None:
        return self.logprobs
