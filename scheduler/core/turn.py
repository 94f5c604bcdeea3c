"""``Turn``: the engine's state of one submitted request."""

from __future__ import annotations

import random
from array import array
from dataclasses import dataclass, field
from enum import StrEnum

from cache.memory.stream import HostCopy
from cache.pages.eviction import scope_name
from cache.pages.session import SessionCache
from cache.pages.timeline_key import TimelineKey
from cache.pages.timeline_media import TimelineMedia
from cache.tier import StopKind
from cache.tiers.archive import Fetch
from scheduler.core.constraint import Constraint
from scheduler.core.text import TextStream
from scheduler.core.thinking import ThinkingState
from scheduler.core.token_counts import TokenCounts
from scheduler.protocol import Delta, FinishReason, Submit, TokenLogprob, unpack_ids
from scheduler.turn_receipt import Receipt


class TurnStatus(StrEnum):
    """WAITING in the queue (new, or preempted), RUNNING in the batch, FINISHED."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False)
class Turn:
    """The state of one submitted request.

    ``ids`` is the whole timeline: the prompt and every sampled token, the last one pending until it is fed. A
    running turn has a session; a preempted one has none, and its ids are enough to go on.
    """

    request: Submit
    text: TextStream
    start: tuple[int, ...] = ()  # encoder-decoder models: what the decoder begins with, the prompt is the source
    media: TimelineMedia | None = None  # of a prompt with pictures
    key: TimelineKey | None = None  # of the adapter with which it is computed
    ids: array[int] = field(init=False)
    source: array[int] | None = field(init=False)
    prompt_length: int = field(init=False)
    random: random.Random = field(init=False)
    status: TurnStatus = TurnStatus.WAITING
    session: SessionCache | None = None
    finish_reason: FinishReason | None = None
    fetch: Fetch | None = None  # what the tiers below memory were asked for
    receipt: Receipt | None = None
    announced: bool = False  # the server has its receipt
    compiling: bool = False  # its grammar is not ready yet
    constraint: Constraint | None = None  # what its grammar still allows; none for most turns
    thinking: ThinkingState | None = None  # where its reasoning is limited
    overtaken: int = 0  # times that others were tried because there was no room for this one
    last_step: int = 0
    arrived: float = 0.0  # when it was queued first, by the retention's clock
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    token_counts: TokenCounts | None = None  # where a penalty needs it
    state: HostCopy | None = None  # what the output head has read behind its prompt, ``[H]``, where it is wanted
    drafts: dict[str, tuple[int, int]] = field(default_factory=dict)  # by source: tokens drafted, tokens accepted
    encoding: float = 0.0  # seconds of the encoder passes that it waited for

    def __post_init__(self) -> None:
        prompt = unpack_ids(self.request.prompt)
        self.source = prompt if self.start else None
        self.ids = array("i", self.start) if self.start else prompt
        self.prompt_length = len(self.ids)
        seed = self.request.sampling.seed
        self.random = random.Random(None if seed is None else seed % 2**64)  # Random itself drops the sign

    @property
    def spare(self) -> bool:
        """Whether nobody waits for it, see ``Submit``."""
        return self.request.spare

    @property
    def scope(self) -> str:
        """Whose cached tokens this turn may reuse, and who may reuse its own: the cache's name for its tenant."""
        return scope_name(self.request.tenant, self.request.salt)

    @property
    def timeline(self) -> array[int]:
        """``ids`` as the cache knows them."""
        return self.ids if self.key is None else self.key.mark(self.ids)

    @property
    def generated(self) -> int:
        """Tokens sampled so far."""
        return len(self.ids) - self.prompt_length

    @property
    def uncomputed(self) -> int:
        """Tokens still to be fed before the next one can be sampled: one while decoding, more while prefilling."""
        return len(self.ids) - (self.session.length if self.session is not None else 0)

    @property
    def limit(self) -> int | None:
        """Tokens that may be generated; None: until the context is full."""
        return self.request.stopping.max_tokens

    @property
    def is_ping(self) -> bool:
        """Whether it generates at most one token: it keeps or makes a prefix for a later turn."""
        return self.limit is not None and self.limit <= 1

    @property
    def is_side(self) -> bool:
        """Whether it is beside a conversation and leaves nothing that another turn goes on from."""
        return (self.request.side or (self.request.spare and self.request.session is None)) and not self.is_ping

    @property
    def is_aside(self) -> bool:
        """Whether it is worth less than the KV of the conversation that it belongs to: a side call, or a ping."""
        return (self.request.side or self.is_ping) and not self.request.spare

    @property
    def spared_parent(self) -> str | None:
        return self.request.parent if self.is_aside else None

    @property
    def stop_kind(self) -> StopKind:
        """What its end makes likely; that it has called tools is told later, see ``AwaitTools``."""
        if self.is_ping:
            return StopKind.WARM_UP
        return StopKind.SIDE if self.is_side else StopKind.ANSWER

    @property
    def may_end(self) -> bool:
        """Whether the next token may end the turn: it has its fewest tokens, and is not in the middle of a message that
        ends its reasoning.
        """
        return self.has_fewest_tokens and (self.thinking is None or self.thinking.allows_end)

    @property
    def has_fewest_tokens(self) -> bool:
        """Whether it has as many tokens as its request asks for at least."""
        return self.request.stopping.is_long_enough(self.ids, self.prompt_length)

    @property
    def forced(self) -> int | None:
        """The next token, if it is not drawn."""
        return None if self.thinking is None else self.thinking.forced

    @property
    def reusable(self) -> bool:
        """Whether cached tokens may be skipped: not where their logits are still asked for."""
        return self.request.prompt_logprobs is None or self.generated > 0

    def last_delta(self, reason: FinishReason, error: str | None) -> Delta:
        """What is told of it where it ends without a token."""
        state = b"" if self.state is None else self.state.wait()[0].numpy().astype("<f4").tobytes()
        return Delta(
            self.request.turn,
            finish_reason=reason,
            error=error,
            drafts=self.drafts,
            state=state,
            encoding=self.encoding,
        )

    def append(self, token: int) -> None:
        """A token was sampled: it is pending, to be fed by the next step."""
        assert self.session is not None
        self.ids.append(token)
        self.session.append((token,))
