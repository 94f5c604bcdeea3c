"""Request schemas of chats, and the fields that all generating endpoints share. Strict: each field is honoured or
refused by name; ``null`` means absent.

What a later version will honour is in ``LATER``, with the values that ask for nothing and are therefore taken.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, Self, TypeVar

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from scheduler.sampling_params import LEAST_TOP_P, Generation, Sampling, Stopping
from server.log.logged_message import LoggedMessage
from server.schemas.field_types import INT32, INT64, Bias, Limit, Stops, Temperature, TokenIds, TopP
from server.schemas.keep_alive import kept_seconds
from server.schemas.messages import MAX_MESSAGES, Content, Messages, plain_content
from server.schemas.metadata import Metadata
from server.schemas.output_formats import Formatted
from server.schemas.routed_fields import Effort, RoutedFields
from server.schemas.strict import Harmless, Strict, wrong
from server.schemas.thinking_fields import ThinkingFields
from server.schemas.tools import Tooled
from server.schemas.vendor_fields import LATER as LATER_OF_VENDORS
from server.schemas.vendor_fields import VendorFields

MAX_CHOICES = 16
MAX_WORDS = 100
MAX_WORD_CHARS = 100
HALF_AN_HOUR, DAY = 1800, 86_400  # seconds
T = TypeVar("T")


class StreamOptions(Strict):
    """What a stream carries besides its content."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False


class CacheOptions(Strict):
    """For how long the cache is to be kept at least. All that is computed is kept: breakpoints make no difference."""

    IDLE: ClassVar[frozenset[str]] = frozenset({"mode"})
    mode: Literal["implicit", "explicit"] = "implicit"
    ttl: Literal["30m"] = "30m"


def either(given: T | None, silent: T) -> T:
    """The request's value, else the default."""
    return silent if given is None else given


def default(otherwise: str) -> str:
    """What the API's page says of a parameter for which a model may have a value."""
    return f"default: the model's (`--generation-config`), else {otherwise}"


LATER_EVERYWHERE: Mapping[str, tuple[object, ...]] = {
    "service_tier": ("auto", "default"),
}


class TurnRequest(Strict):
    """The fields of every endpoint that generates: sampling, stop conditions, streaming. ``PROMPT`` is the name of the
    field with the prompt, for errors.
    """

    PROMPT: ClassVar[str]
    model: str = Field("", max_length=512)
    temperature: Temperature | None = Field(None, description=default("1.0"))
    top_p: TopP | None = Field(None, description=default("1.0"))
    top_k: Annotated[int, Field(ge=-1, le=INT32)] | None = Field(None, description=default("0"))
    min_p: Annotated[float, Field(ge=0, le=1)] | None = Field(None, description=default("0.0"))
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = Field(None, description=default("1.0"))
    seed: int | None = Field(None, ge=-INT64 - 1, le=INT64)
    logit_bias: Bias = Field(default_factory=dict)
    stop: Stops | None = Field(None, description=default("none"))
    stop_token_ids: Annotated[TokenIds, Field(max_length=1024)] = Field(default_factory=list)
    min_tokens: int = Field(0, ge=0, le=INT32)
    ignore_eos: bool = False
    bad_words: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=MAX_WORD_CHARS)]], Field(max_length=MAX_WORDS)
    ] = Field(default_factory=list)
    skip_special_tokens: bool = True
    stream: bool = False
    speculation: bool = True
    user: str = Field("", max_length=512)  # the client's own note about its user; kept out of everything

    prompt_cache_key: Annotated[str, Field(max_length=512)] | None = None  # a tenant's requests find each other anyway
    prompt_cache_retention: Literal["in_memory", "24h"] | None = None
    prompt_cache_options: CacheOptions | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=512)] | None = None

    @model_validator(mode="after")
    def fits_together(self) -> Self:
        """Checks across fields."""
        limit = self.token_limit
        if limit is not None and self.min_tokens > limit:
            raise PydanticCustomError("value_error", "cannot be more than max_tokens", {"field": "min_tokens"})
        return self

    @property
    def predicted(self) -> str:
        """The reply that the client expects; "" if it predicts none."""
        return ""

    @property
    def salt(self) -> str:
        """The salt of this request's KV; "" if there is none."""
        return "" if self.cache_salt is None else hashlib.sha256(self.cache_salt.encode()).hexdigest()[:32]

    @property
    def keep_seconds(self) -> int:
        """How long the KV should be kept, in seconds; 0: no request."""
        if self.prompt_cache_retention == "24h":
            return DAY
        return 0 if self.prompt_cache_options is None else HALF_AN_HOUR

    @property
    def keep_until(self) -> float:
        """The end of ``keep_seconds``, counted from now, for ``Submit``."""
        return time.time() + self.keep_seconds if self.keep_seconds else 0.0

    @property
    def hints(self) -> dict[str, str]:
        """The fields that may say which conversation the request belongs to, by their paths."""
        return {} if self.prompt_cache_key is None else {"prompt_cache_key": self.prompt_cache_key}

    @property
    def may_continue_line(self) -> bool:
        """Whether the request may be run on the line of its conversation: it has one reply, and asks for nothing that
        keeps its KV apart or leaves earlier reasoning out.
        """
        return self.choices == 1 and not self.salt

    @property
    def token_limit(self) -> int | None:
        """The most tokens to generate; None if the client set no limit."""
        raise AssertionError("each endpoint names its own")

    @property
    def least_tokens(self) -> int:
        """The fewest tokens of a reply without a ``token_limit``."""
        return max(1, self.min_tokens)

    @property
    def yields(self) -> bool:
        """Whether a ``token_limit`` beyond the context is lowered to the rest of the context; otherwise it is
        refused.
        """
        return False

    @property
    def default_limit(self) -> int | None:
        """The most tokens to generate without a ``token_limit``; None: as many as fit."""
        return None

    @property
    def candidates(self) -> int:
        """How many choices of each prompt are generated."""
        return 1

    @property
    def choices(self) -> int:
        """How many choices are generated in all."""
        return self.candidates

    @property
    def token_logprobs(self) -> int | None:
        """For how many alternatives per token the client wants log-probabilities; None: no log-probabilities."""
        raise AssertionError("each endpoint names its own")

    @property
    def effort(self) -> str | None:
        """The reasoning effort; None if the client named none."""
        return None

    @property
    def thinking_limit(self) -> tuple[str, int] | None:
        """The field that limits the reasoning, and to how many tokens; -1: no limit. None if there is none."""
        return None

    @property
    def computed_logprobs(self) -> int | None:
        """Like ``token_logprobs``, for what the engine computes, also if it is not returned."""
        return self.token_logprobs

    def computed_prompt_logprobs(self, choice: int) -> int | None:
        """For how many alternatives of each token of the prompt the engine computes log-probabilities with choice
        number ``choice``; None for none at all."""
        return None

    def make_sampling(self, choice: int, silent: Generation, bad_words: tuple[tuple[int, ...], ...] = ()) -> Sampling:
        """The sampling of choice number ``choice``, with a seed of its own, so that choices differ and are
        reproducible. ``silent`` has the defaults; ``bad_words`` are token ids.
        """
        seed = self.seed
        if seed is not None:
            seed = (seed + choice + INT64 + 1) % (2 * INT64 + 2) - INT64 - 1
        return Sampling(
            temperature=either(self.temperature, silent.temperature),
            top_p=max(either(self.top_p, silent.top_p), LEAST_TOP_P),  # 0 means: only the likeliest token
            top_k=max(either(self.top_k, silent.top_k), 0),
            min_p=either(self.min_p, silent.min_p),
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=either(self.repetition_penalty, silent.repetition_penalty),
            seed=seed,
            logit_bias=self.logit_bias,
            bad_words=bad_words,
        )

    def make_stopping(self, max_tokens: int | None, silent: Generation) -> Stopping:
        """The stop conditions of a choice. The stop strings of ``silent`` act like end-of-sequence tokens: they end a
        reply unless the request has stop strings of its own, or ignores end-of-sequence tokens.
        """
        return Stopping(
            max_tokens=max_tokens,
            min_tokens=self.min_tokens,
            stop=tuple(either(self.stop, () if self.ignore_eos else silent.stop)),
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
        )


TemplateVariables = Annotated[dict[str, str | int | float | bool], Field(max_length=16)]


class GenerationRequest(Formatted, VendorFields, TurnRequest):
    """The fields that chats and completions share."""

    session_id: str | None = None
    safety_identifier: str = Field("", max_length=512)  # another such note
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    stream_options: StreamOptions | None = None

    @property
    def candidates(self) -> int:
        return self.n

    @property
    def salt(self) -> str:
        return self.unshared or super().salt


class Prediction(Strict):
    """The client's prediction of the reply, from which tokens are drafted."""

    type: Literal["content"]
    content: Content


class ReplyRequest(Tooled, RoutedFields, ThinkingFields, GenerationRequest):
    """The fields of a chat without its messages."""

    PROMPT: ClassVar[str] = "messages"
    LATER: ClassVar[Harmless] = {
        **LATER_OF_VENDORS,
        "functions": (),
        "function_call": (),
        "modalities": (["text"],),
        "audio": (),
        "moderation": (),
    }
    IDLE: ClassVar[frozenset[str]] = RoutedFields.IDLE | VendorFields.IDLE | {"service_tier"}
    reasoning_effort: Effort | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    reasoning_history: Literal["keep", "drop"] = "keep"
    chat_template_kwargs: TemplateVariables = Field(default_factory=dict)
    chat_template_args: TemplateVariables = Field(default_factory=dict)  # Baseten's name for it, which OpenCode sends
    service_tier: Annotated[str, Field(max_length=64)] | None = None
    store: bool = False
    background: bool = False
    metadata: Metadata | None = None
    prediction: Prediction | None = None
    max_tokens: Limit = None
    max_completion_tokens: Limit = None
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)

    @model_validator(mode="after")
    def agrees(self) -> Self:
        """Checks across the fields of chats."""
        if self.top_logprobs is not None and not self.logprobs:
            raise PydanticCustomError("value_error", "needs logprobs: true", {"field": "top_logprobs"})
        if self.n_probs and self.top_logprobs not in (None, self.n_probs):
            raise wrong("n_probs", "differs from top_logprobs")
        if self.background and not self.stream:
            raise wrong("background", "needs stream: true")
        return self

    @property
    def keep_seconds(self) -> int:
        return max(super().keep_seconds, kept_seconds(self.keep_alive))

    @property
    def hints(self) -> dict[str, str]:
        return {**super().hints, **{f"metadata.{name}": value for name, value in (self.metadata or {}).items()}}

    @property
    def may_continue_line(self) -> bool:
        return super().may_continue_line and self.reasoning_history == "keep"

    @property
    def predicted(self) -> str:
        return "" if self.prediction is None else plain_content(self.prediction.content)[0]

    @property
    def effort(self) -> str | None:
        return self.reasoning_effort or self.switched_effort

    @property
    def thinking_limit(self) -> tuple[str, int] | None:
        return super().thinking_limit or self.routed_limit

    @property
    def goes_on(self) -> bool:
        """Whether the last message is the beginning of the reply."""
        return False

    @property
    def token_limit(self) -> int | None:
        given = (self.max_tokens, self.max_completion_tokens)
        return min((limit for limit in given if limit is not None), default=None)

    @property
    def token_logprobs(self) -> int | None:
        return self.n_probs or ((self.top_logprobs or 0) if self.logprobs else None)

    def computed_prompt_logprobs(self, choice: int) -> int | None:
        return self.prompt_logprobs if choice == 0 else None  # it is the same for all choices

    @property
    def echoed(self) -> str:
        """Text that the returned reply begins with, before what is generated."""
        return ""


class ChatRequest(ReplyRequest):
    """``POST /v1/chat/completions``."""

    messages: Messages = Field(min_length=1, max_length=MAX_MESSAGES)
    continue_final_message: bool = False
    add_generation_prompt: bool | None = None
    echo: bool = False

    @model_validator(mode="after")
    def ends_where_the_reply_begins(self) -> Self:
        """The beginning of a reply is an assistant's words, and the last of all."""
        if any(message.prefix for message in self.messages[:-1]):
            raise wrong("messages", "can have prefix: true in the last message only")
        last = self.messages[-1].plain()
        if self.goes_on and (last.role != "assistant" or not last.content or last.tool_calls):
            raise wrong("messages", "must end with an assistant's text if the reply is to continue it")
        if self.add_generation_prompt is not None and self.add_generation_prompt is self.goes_on:
            problem = "cannot be true if the final message is continued, nor false where it is not"
            raise wrong("add_generation_prompt", problem)
        return self

    @property
    def goes_on(self) -> bool:
        return self.continue_final_message or self.messages[-1].prefix

    def plain_messages(self) -> list[LoggedMessage]:
        return [message.plain() for message in self.messages]

    @property
    def echoed(self) -> str:
        last = self.messages[-1].plain()
        return last.content if self.echo and last.role == "assistant" else ""
