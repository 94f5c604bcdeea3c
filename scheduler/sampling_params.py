"""Sampling and stop parameters that a request may set, and their defaults."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

LEAST_TOP_P = 1e-9


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are drawn from the logits. Defaults are OpenAI's.

    ``temperature`` 0 is greedy. ``top_k`` 0 and ``top_p`` 1 keep every token. Presence and frequency
    penalties count generated tokens, the repetition penalty also those of the prompt. No reply holds one of
    ``bad_words``, each a sequence of token ids.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    logit_bias: dict[int, float] = {}
    bad_words: tuple[tuple[int, ...], ...] = ()

    @property
    def greedy(self) -> bool:
        """Whether only the likeliest token is drawn, of equals the first."""
        return self.temperature == 0.0 or self.top_k == 1 or self.top_p <= LEAST_TOP_P

    @property
    def penalised(self) -> bool:
        """Whether tokens that were met count less."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)


class Stopping(msgspec.Struct, frozen=True, kw_only=True):
    """When a turn ends. ``max_tokens`` None means: until the context is full."""

    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def is_long_enough(self, ids: Sequence[int], start: int) -> bool:
        """Whether what comes next may end the reply ``ids[start:]``: it has its fewest tokens."""
        return len(ids) - start >= self.min_tokens


class ThinkingBudget(msgspec.Struct, frozen=True, kw_only=True):
    """How many tokens a reply may reason for, and what is written in its place where these are spent.

    Reasoning begins with one of the texts ``openings``, behind nothing but space at the beginning of the reply;
    ``anywhere``: wherever one occurs, and more than once. ``opened``: the prompt ends within it. It ends with the first
    of ``closings``. ``tokens`` counts from behind the opening, over all of the reply.

    Token ids: ``message`` and then ``end``, which closes the reasoning, are forced when the budget is spent; without
    ``message`` if there was no reasoning yet. ``rests[i]`` is what is left of ``end`` where the reply has begun the
    first closing with ``i + 1`` of its characters (none: ``end`` is written whole). ``answer`` (empty: ``end``) is
    forced if the reply begins to reason again after that, and leads into the answer.
    """

    tokens: int
    openings: tuple[str, ...]
    closings: tuple[str, ...]
    end: tuple[int, ...]
    opened: bool = False
    anywhere: bool = False
    message: tuple[int, ...] = ()
    rests: tuple[tuple[int, ...], ...] = ()
    answer: tuple[int, ...] = ()

    @property
    def token_ids(self) -> set[int]:
        """Every token that may be forced."""
        return {*self.message, *self.end, *self.answer, *(token for rest in self.rests for token in rest)}


class Generation(msgspec.Struct, frozen=True):
    """How tokens are drawn, and which texts end a reply, where a request is silent about it. Defaults are OpenAI's.

    ``source`` tells whose values these are: ``model`` (the checkpoint's generation config), ``file`` (one that the
    operator gave) or ``openai``. What the source does not say is OpenAI's.
    """

    source: str = "openai"
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
