"""Request fields of vLLM and llama.cpp beyond OpenAI's, and what replies contain for them."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, ClassVar, Self

from msgspec import UNSET, UnsetType
from pydantic import Field, model_validator

from scheduler.protocol import TokenLogprob
from server.schemas.objects import PromptLogprob
from server.schemas.strict import Strict, wrong

FLOOR = -9999.0  # what OpenAI writes for impossible tokens; JSON has no infinity
PromptLogprobs = list[dict[str, PromptLogprob] | None]

# What their other fields may hold that asks for nothing; any other value is refused by the field's name.
LATER: Mapping[str, tuple[object, ...]] = {
    "allowed_token_ids": (),
    "guided_decoding_backend": (),
    "guided_whitespace_pattern": (),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1.0, 1),
    "logits_processors": (),
    "priority": (0,),
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}


class VendorFields(Strict):
    """The fields, all of them extensions of OpenAI's. ``cache_prompt``, ``n_probs`` and ``id_slot`` are llama.cpp's."""

    IDLE: ClassVar[frozenset[str]] = frozenset({"id_slot"})  # a session is found by its content
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    prompt_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    cache_prompt: bool = True
    id_slot: int | None = None
    n_probs: int = Field(0, ge=0, le=20)

    @model_validator(mode="after")
    def comes_at_once(self) -> Self:
        """A stream has no place for the log-probabilities of its prompt."""
        if self.prompt_logprobs is not None and getattr(self, "stream", False):
            raise wrong("prompt_logprobs", "is not available in a stream")
        return self

    @cached_property
    def unshared(self) -> str:
        """A random salt if the request must not reuse cached KV; else ""."""
        return "" if self.cache_prompt else uuid.uuid4().hex


@dataclass(frozen=True, slots=True)
class TokenOptions:
    """What a reply contains about its tokens. ``ids``: token ids of prompt and reply; ``logprobs``: for how many
    alternatives per token (None: no log-probabilities), with tokens named ``token_id:N`` if ``as_ids``; ``prompt``: the
    same for prompt tokens.
    """

    logprobs: int | None = None
    ids: bool = False
    as_ids: bool = False
    prompt: int | None = None

    @classmethod
    def of(cls, body: VendorFields, logprobs: int | None) -> TokenOptions:
        return cls(logprobs, body.return_token_ids, body.return_tokens_as_token_ids, body.prompt_logprobs)

    def name(self, token: int, text: str) -> str:
        """A token's name in log-probabilities."""
        return f"token_id:{token}" if self.as_ids else text

    def select_ids(self, ids: Sequence[int]) -> list[int] | UnsetType:
        return [*ids] if self.ids else UNSET

    def of_prompt(self, entries: Sequence[TokenLogprob]) -> PromptLogprobs | UnsetType:
        """Prompt log-probabilities in vLLM's format: one entry per token, null for the first."""
        most = self.prompt
        return UNSET if most is None else [prompt_logprob(entry, most) for entry in entries]


NO_TOKEN_OPTIONS = TokenOptions()


def prompt_logprob(entry: TokenLogprob, most: int) -> dict[str, PromptLogprob] | None:
    """Token id -> log-probability, of the ``most`` likeliest tokens and of the prompt's own; its rank is given if it is
    among the alternatives.
    """
    if entry.logprob is None:
        return None
    ranked = {id: (rank, text, value) for rank, (id, text, _, value) in enumerate(entry.top, 1)}
    own = ranked.get(entry.token_id, (None, entry.text, entry.logprob))
    shown = {entry.token_id: own, **dict([*ranked.items()][:most])}
    return {str(id): PromptLogprob(clamp_logprob(value), rank, text) for id, (rank, text, value) in shown.items()}


def clamp_logprob(logprob: float | None) -> float:
    """A number that JSON can hold: at least ``FLOOR``, which also stands for None."""
    return FLOOR if logprob is None else max(logprob, FLOOR)
