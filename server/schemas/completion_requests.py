"""The request schema of text completions."""

from __future__ import annotations

from typing import Annotated, ClassVar, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from server.schemas.field_types import INT32, TokenIds
from server.schemas.requests import LATER_EVERYWHERE, MAX_CHOICES, GenerationRequest
from server.schemas.strict import Harmless, wrong
from server.schemas.vendor_fields import LATER as LATER_OF_VENDORS

MAX_PROMPTS = 128
DEFAULT_MAX_TOKENS = 16  # OpenAI's, for this endpoint only


class CompletionRequest(GenerationRequest):
    """``POST /v1/completions``."""

    PROMPT: ClassVar[str] = "prompt"
    LATER: ClassVar[Harmless] = {**LATER_EVERYWHERE, **LATER_OF_VENDORS, "store": (False,), "metadata": ({},)}
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
    suffix: str = ""

    @model_validator(mode="after")
    def agrees(self) -> Self:
        """Checks across the fields of completions."""
        if self.n_probs and self.logprobs not in (None, self.n_probs):
            raise wrong("n_probs", "differs from logprobs")
        if self.candidates < self.n:
            raise wrong("best_of", "cannot be less than n")
        if self.candidates > self.n and self.stream:
            raise wrong("best_of", "cannot be more than n in a stream: which choices are best is known at the end")
        if self.suffix and (self.echo or self.session_id is not None):
            raise wrong("suffix", "cannot be used together with echo or a session")
        if not self.prompt and isinstance(self.prompt, list):
            raise PydanticCustomError("value_error", "cannot be empty", {"field": "prompt"})
        if len(self.prompts) * self.candidates > MAX_PROMPTS:
            message = f"asks for more than {MAX_PROMPTS} choices, counting prompts times n or best_of"
            raise wrong("n" if self.candidates == self.n else "best_of", message)
        return self

    @property
    def candidates(self) -> int:
        """How many choices of each prompt are generated; the ``n`` best of them are returned."""
        return self.n if self.best_of is None else self.best_of

    @property
    def choices(self) -> int:
        return self.candidates * len(self.prompts)

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
    def default_limit(self) -> int | None:
        return DEFAULT_MAX_TOKENS

    @property
    def token_logprobs(self) -> int | None:
        return self.n_probs or self.logprobs

    @property
    def computed_logprobs(self) -> int | None:
        ranked = self.candidates > self.n and self.token_logprobs is None
        return 0 if ranked else self.token_logprobs

    def computed_prompt_logprobs(self, choice: int) -> int | None:
        asked = [self.prompt_logprobs, self.token_logprobs if self.echo else None]
        return max((most for most in asked if most is not None), default=None)
