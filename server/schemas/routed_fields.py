"""Request fields of chats that other servers and routers have, and that clients send to every server: switches of
reasoning, which templates read, and what changes nothing.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator

from server.schemas.adaptations import adapt
from server.schemas.keep_alive import KeepAlive
from server.schemas.strict import Harmless, Strict

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Tokens = Annotated[int, Field(ge=0, le=2**31 - 1)]


class ThinkingSwitch(Strict):
    """Whether to reason, and up to how many tokens. ``clear_thinking`` is about a history that the client sends."""

    IDLE: ClassVar[frozenset[str]] = frozenset({"clear_thinking"})
    type: Literal["enabled", "adaptive", "auto", "disabled"]
    budget_tokens: Tokens | None = None
    clear_thinking: bool | None = None


class RoutedReasoning(Strict):
    """OpenRouter's options of reasoning. It is returned in full, whatever the ``summary``."""

    IDLE: ClassVar[frozenset[str]] = frozenset({"summary"})
    LATER: ClassVar[Harmless] = {"exclude": (False,)}
    effort: Effort | None = None
    max_tokens: Tokens | None = None
    enabled: bool | None = None
    summary: object = None


class OllamaOptions(Strict):
    """Ollama's options that size its context and its process; those of sampling are fields of a chat here."""

    IDLE: ClassVar[frozenset[str]] = frozenset(
        {"num_batch", "num_ctx", "num_gpu", "num_keep", "num_thread", "use_mmap"}
    )
    num_batch: int | None = None
    num_ctx: int | None = None
    num_gpu: int | None = None
    num_keep: int | None = None
    num_thread: int | None = None
    use_mmap: bool | None = None


class RoutedFields(Strict):
    """The fields. ``enable_thinking`` is Qwen's, ``thinking`` of GLM, DeepSeek and others, ``reasoning`` OpenRouter's,
    ``think`` Ollama's. ``options`` and ``num_ctx`` size the context of a server that is not sized yet.
    ``keep_alive`` is Ollama's; here it pins the conversation's KV. ``web_search`` and OpenAI's ``web_search_options``
    ask for a search, which only a vendor can run.
    """

    IDLE: ClassVar[frozenset[str]] = frozenset(
        {
            "cache_control",
            "num_ctx",
            "provider",
            "transforms",
            "usage",
            "vl_high_resolution_images",
        }
    )
    enable_thinking: bool | None = None
    thinking: ThinkingSwitch | None = None
    think: bool | Literal["low", "medium", "high"] | None = None
    reasoning: RoutedReasoning | None = None
    cache_control: dict[str, Any] | None = None
    keep_alive: KeepAlive | None = None
    num_ctx: int | None = None
    options: OllamaOptions | None = None
    provider: dict[str, Any] | None = None
    transforms: list[str] | None = None
    usage: dict[str, Any] | None = None
    vl_high_resolution_images: bool | None = None
    web_search: bool | None = None
    web_search_options: dict[str, Any] | None = None

    @field_validator("web_search", "web_search_options")
    @classmethod
    def left_out(cls, value: bool | dict[str, Any] | None) -> bool | dict[str, Any] | None:
        """A search is not offered to the model."""
        if value or isinstance(value, dict):
            adapt("tool_left_out", "web_search")
        return value

    @property
    def switched_effort(self) -> str | None:
        """The reasoning effort that the fields name; None if they name none."""
        if self.reasons is False:
            return "none"
        if self.reasoning is not None and self.reasoning.effort is not None:
            return self.reasoning.effort
        return self.think if isinstance(self.think, str) else None

    @property
    def reasons(self) -> bool | None:
        """Whether to reason, as the first field says that does."""
        switch = None if self.thinking is None else self.thinking.type != "disabled"
        option = None if self.reasoning is None else self.reasoning.enabled
        word = None if self.think is None else self.think is not False
        return next((value for value in (self.enable_thinking, switch, option, word) if value is not None), None)

    @property
    def routed_limit(self) -> tuple[str, int] | None:
        """The field that limits the reasoning, and to how many tokens; None if there is none."""
        if self.thinking is not None and self.thinking.budget_tokens is not None:
            return "thinking.budget_tokens", self.thinking.budget_tokens
        if self.reasoning is not None and self.reasoning.max_tokens is not None:
            return "reasoning.max_tokens", self.reasoning.max_tokens
        return None
