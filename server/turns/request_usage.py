"""Counts the tokens and times of one request, and reports them to its span and its log line when it ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from opentelemetry.trace import Span

from cache.tier import Tier
from scheduler.protocol import FinishReason
from server.http.error_responses import as_api_error
from server.log.usage_rows import Spent
from server.telemetry import log_context, traces

if TYPE_CHECKING:
    from server.chat.partial_reply import PartialReply
    from server.chat.prompts import Prompt
    from server.telemetry.metrics import Metrics, Stopwatch


class RequestUsage:
    """Usage of one request's turns: one per choice, the same number for each prompt.

    At ``close``, a turn without a finish reason has failed (``record_failure``), or was cancelled because its client
    disconnected.
    """

    def __init__(
        self,
        metrics: Metrics,
        span: Span,
        started: float,
        prompts: Sequence[Prompt],
        partial_replies: Sequence[PartialReply],
        attributes: dict[str, traces.Value],
        charge: Callable[[Spent], None],
    ) -> None:
        """``span`` is started, and gets ``attributes`` when it ends; ``started`` is when the request came, by
        ``time.perf_counter``; ``charge`` is told what it has cost, when it is over.
        """
        self._charge = charge
        self.metrics = metrics
        self.watches: list[Stopwatch] = [metrics.stopwatch(started) for _ in partial_replies]
        self._span = span
        self._prompts = prompts
        self._partial_replies = partial_replies
        self._span_attributes = attributes
        self._failure: BaseException | None = None
        self._closed = False

    def record_failure(self, error: BaseException) -> None:
        """Record an exception. Only the first one is kept."""
        self._failure = self._failure or error

    def close(self) -> None:
        """Report the request's usage and end its span. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for watch in self.watches:
            watch.end(FinishReason.CANCELLED if self._failure is None else FinishReason.ERROR)
        error = self._error()
        prompt, cached, completion = self._tokens()
        if any(watch.receipt is not None for watch in self.watches):  # it was admitted
            seconds = sum(watch.ran for watch in self.watches)
            self._charge(Spent(1, prompt - cached, cached, completion, seconds))
        first = min((watch.first for watch in self.watches if watch.first is not None), default=None)
        log_context.note(
            prompt_tokens=prompt,
            cached_tokens=cached,
            completion_tokens=completion,
            first_token_ms=None if first is None else round(1000 * first, 1),
            error=error,
        )
        if self._span.is_recording():
            self._span_attributes |= self._attributes(first)
            self._span_attributes |= {
                "gen_ai.usage.input_tokens": prompt,
                "gen_ai.usage.output_tokens": completion,
                "gen_ai.usage.cache_read.input_tokens": cached,
            }
        traces.end_span(self._span, self._span_attributes, error)

    def _error(self) -> str | None:
        if self._failure is not None:
            return as_api_error(self._failure).body.error.code or type(self._failure).__name__
        return None if all(partial_reply.finish is not None for partial_reply in self._partial_replies) else "cancelled"

    def _tokens(self) -> tuple[int, int, int]:
        """Of the prompts, of these reused, of the replies."""
        firsts = self.watches[
            :: len(self._partial_replies) // len(self._prompts)
        ]  # of its choices only one computes a prompt
        cached = sum(watch.receipt.cached for watch in firsts if watch.receipt is not None)
        return (
            sum(len(p.ids) for p in self._prompts),
            cached,
            sum(len(partial_reply.tokens) for partial_reply in self._partial_replies),
        )

    def _attributes(self, first: float | None) -> dict[str, traces.Value]:
        """What only the span is told."""
        receipts = [watch.receipt for watch in self.watches if watch.receipt is not None]
        attributes: dict[str, traces.Value | None] = {
            "gen_ai.response.finish_reasons": [
                partial_reply.finish for partial_reply in self._partial_replies if partial_reply.finish is not None
            ],
            "gen_ai.response.time_to_first_chunk": first,
            "gen_ai.usage.reasoning.output_tokens": sum(
                partial_reply.reasoning_tokens for partial_reply in self._partial_replies
            )
            or None,
            "warmturn.queue.duration": max((w.queued for w in self.watches if w.queued is not None), default=None),
            "warmturn.cache.load.duration": sum(receipt.load_seconds for receipt in receipts) or None,
            "warmturn.media.encoded": sum(receipt.encoded for receipt in receipts) or None,
            "warmturn.media.encode.duration": sum(watch.encoding for watch in self.watches) or None,
            "warmturn.cache.miss": next((str(r.miss) for r in receipts if r.miss is not None), None),
        }
        for tier in tuple(Tier)[1:]:
            attributes[f"warmturn.cache.{tier}_tokens"] = (
                sum(receipt.count_reused(tier) for receipt in receipts) or None
            )
        return traces.known_attributes(attributes)
