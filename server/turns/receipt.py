"""The cache receipt: what was reused of a prompt, from which tier, and why not more.

Of a session's prompt, tokens are *reused* (a tier of the cache had them), *recomputed* (this session had computed them
before, but the cache no longer had them) or *new*. A *miss* is the reason why not everything could be reused that the
session (for an unnamed one: the tenant) had computed before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from msgspec import UNSET, UnsetType

from cache.tier import Tier
from scheduler.model_facts import ModelFacts
from scheduler.protocol import Submit
from scheduler.turn_receipt import Miss, Receipt
from server.chat.prompts import Prompt
from server.log.identity import Session
from server.log.timeline import SessionRecord, common_prefix
from server.schemas import objects
from server.schemas.objects import MissReason

UNCACHED = "recomputed"  # the engine's word for a model that runs without any cache
Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True)
class PromptHistory:
    """What is known of a prompt's history. ``named``: the client named a session; ``record``: its log before this turn;
    ``fingerprint``: of the served tokenizer; ``reusable``: whether this request may reuse any cached token at all.
    """

    named: bool
    record: SessionRecord | None
    fingerprint: str
    reusable: bool = True

    @classmethod
    def of(
        cls,
        session: Session | None,
        record: SessionRecord | None,
        facts: ModelFacts,
        fingerprint: str,
        submit: Submit,
    ) -> PromptHistory:
        """The history of a turn that is submitted now."""
        # An encoder reads its prompt anew each time, and logprobs of a prompt come from computing it.
        reusable = not facts.encoder_decoder and facts.mode != UNCACHED and submit.prompt_logprobs is None
        return cls(session is not None, record, fingerprint, reusable)


def receipt_of(prompt: Prompt, engine: Receipt, past: PromptHistory, decode: Decode) -> objects.CacheReceipt:
    """The receipt of one prompt, without its ``prefill_ms``. ``decode`` turns ids of the served model into text."""
    logged = [] if past.record is None else past.record.tokens
    # The last logged token was sampled, but never fed: whoever continues computes it for the first time.
    known = min(common_prefix(prompt.ids, logged), len(logged) - 1)
    recomputed = max(0, known - engine.cached)
    return objects.CacheReceipt(
        prompt_tokens=len(prompt.ids),
        reused={tier: engine.count_reused(tier) for tier in Tier},
        recomputed=recomputed,
        new=max(0, len(prompt.ids) - engine.cached - recomputed),
        load_ms=to_milliseconds(engine.load_seconds),
        miss=miss_of(prompt, engine, past, decode),
        pictures=objects.PictureCounts(engine.encoded, engine.media - engine.encoded) if engine.media else UNSET,
    )


def miss_of(prompt: Prompt, engine: Receipt, past: PromptHistory, decode: Decode) -> objects.CacheMiss | None:
    """Why not more was reused. None if all but one token was, which must always be fed, or if there was nothing to
    reuse.
    """
    ids, cached, record = prompt.ids, engine.cached, past.record
    if cached >= len(ids) - 1 or not past.reusable:
        return None
    if record is None or not record.tokens:
        if engine.miss == Miss.DIVERGED:
            # A session that begins owes nothing to the tenant's other ones.
            return (
                None
                if past.named
                else divergence_miss(MissReason.DIVERGED, engine.matched, ids, engine.expected, decode)
            )
        return None if engine.miss is None else objects.CacheMiss(MissReason(engine.miss.value), cached)
    if record.fingerprint != past.fingerprint:
        return objects.CacheMiss(MissReason.FINGERPRINT, cached)
    common = common_prefix(ids, record.tokens)
    lost = cached < common - 1
    left_log = common < min(len(ids), len(record.tokens)) - 1
    # What cannot go back to where the prompt leaves the log: that it left is the cause.
    if left_log and (not lost or engine.miss == Miss.NO_CHECKPOINT):
        reason = MissReason.TEMPLATE_DRIFT if extends_log(prompt, record) else MissReason.EDITED_HISTORY
        return divergence_miss(reason, common, ids, record.tokens[common], decode)
    if not lost:
        return None
    # An engine that was started anew has never heard of what the log holds.
    reason = MissReason.EVICTED if engine.miss in (None, Miss.DIVERGED) else MissReason(engine.miss)
    return objects.CacheMiss(reason, cached)


def divergence_miss(
    reason: MissReason, at: int, ids: Sequence[int], expected: int | None, decode: Decode
) -> objects.CacheMiss:
    """A miss at the first token of ``ids`` that differs from ``expected``."""

    def token(id: int | None) -> objects.TokenText | None:
        return None if id is None else objects.TokenText(id, decode([id]))

    return objects.CacheMiss(reason, at, token(ids[at] if at < len(ids) else None), token(expected))


def extends_log(prompt: Prompt, record: SessionRecord) -> bool:
    """Whether the prompt begins with the logged messages, or, for raw prompts, with the logged text."""
    if prompt.echo:
        said = "".join(message.content for message in prompt.messages)
        return said.startswith("".join(message.content for message in record.messages))
    return prompt.messages[: len(record.messages)] == record.messages


def sum_receipts(receipts: Sequence[objects.CacheReceipt], prefill_seconds: float | None) -> objects.CacheReceipt:
    """One receipt for all prompts of a request (at least one): tokens and ``load_ms`` are added up, the first miss is
    kept. ``prefill_seconds`` is the longest time between a prompt's admission and its first token.
    """
    return objects.CacheReceipt(
        prompt_tokens=sum(receipt.prompt_tokens for receipt in receipts),
        reused={tier: sum(receipt.reused[tier] for receipt in receipts) for tier in Tier},
        recomputed=sum(receipt.recomputed for receipt in receipts),
        new=sum(receipt.new for receipt in receipts),
        load_ms=round(sum(receipt.load_ms for receipt in receipts), 3),
        prefill_ms=None if prefill_seconds is None else to_milliseconds(prefill_seconds),
        miss=next((receipt.miss for receipt in receipts if receipt.miss is not None), None),
        pictures=sum_pictures(receipts),
    )


def sum_pictures(receipts: Sequence[objects.CacheReceipt]) -> objects.PictureCounts | UnsetType:
    """The pictures of all prompts; unset where there are none."""
    counts = [receipt.pictures for receipt in receipts if receipt.pictures is not UNSET]
    if not counts:
        return UNSET
    return objects.PictureCounts(sum(one.encoded for one in counts), sum(one.reused for one in counts))


def to_milliseconds(seconds: float) -> float:
    """Milliseconds, rounded to microseconds."""
    return round(1000 * seconds, 3)
