"""The metrics that ``/metrics`` shows.

Values are plain numbers on the event loop and become Prometheus families when they are read, so that counting once per
token or request is cheap.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import get_args

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cache.tier import StopKind, Tier
from scheduler.engine_stats import Stats
from scheduler.model_facts import ModelFacts
from scheduler.protocol import Delta, DraftSource, FinishReason
from scheduler.turn_receipt import Miss, Receipt
from server import __version__
from server.log.recovery.salvage import Salvage
from server.schemas.objects import LineOutcome, MissReason
from server.telemetry.engine_counts import EngineCounts
from server.telemetry.metric_types import Counter, Histogram

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "warmturn_"
FIRST_TOKEN_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
WAIT_BUCKETS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
TURN_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600, 1800)
LENGTH_BUCKETS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144)  # tokens
PAUSE_BUCKETS = (0.1, 0.3, 1, 3, 10, 30, 60, 300, 1200, 3600, 14400, 86400)
SALVAGED = ("whole", "refused", "nameless")  # what becomes of the sessions of a damaged log, by names in ``Salvage``
UNKNOWN_MISS = "recomputed"  # nobody knows why it was
GAUGES = {  # by their names in ``Stats``
    "running": ("running", "Turns in the batch"),
    "waiting": ("waiting", "Turns in the queue"),
    "sessions": ("sessions", "Sessions whose KV is in memory"),
    "reclaimable_pages": (
        "pages_reclaimable",
        "Device KV pages of idle sessions whose KV is on disk too: free at once",
    ),
    "disk_sessions": ("disk_sessions", "Sessions whose KV is on disk"),
    "disk_pending": ("disk_pending_sessions", "Idle sessions whose newest KV is not on disk yet"),
    "disk_failing": ("disk_failing", "1 while KV cannot be written to disk"),
}
COUNTERS = {
    "prompt_tokens": ("prompt_tokens", "Prompt tokens of admitted turns, including reused ones"),
    "cached_tokens": ("cached_tokens", "Prompt tokens reused from the KV cache"),
    "generated_tokens": ("generated_tokens", "Tokens generated"),
    "steps": ("steps", "Steps of the engine"),
    "preemptions": ("preemptions", "Turns preempted because pages ran out"),
    "disk_saves": ("session_saves", "KV files written; each has the new tokens of one session"),
    "warmed": ("prefetches", "Announced sessions whose KV was brought to the device"),
    "brought_back": ("pinned_prefetches", "Pinned sessions whose KV was brought back to the device"),
    "media_encoded": ("pictures_encoded", "Pictures and sounds of chats that the encoder was run on"),
    "windows": ("windows_heard", "Windows of speech that were written down"),
    "encoder_seconds": ("encoder_seconds", "Time that these pictures, sounds and windows took"),
    "pooled": ("pooled_inputs", "Texts that were embedded, and pairs of texts that were scored"),
    "disk_written": ("disk_written_bytes", "KV written to disk"),
    "disk_read": ("disk_read_bytes", "KV read from disk"),
    "disk_errors": ("disk_errors", "Reads and writes of KV that failed"),
    "disk_damaged": ("disk_damaged_files", "KV files that failed their checks and were removed"),
}


class Metrics(Collector):
    """All metrics. Counters never decrease, also when the engine restarts with another process id and counts from
    zero.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(self)
        ProcessCollector(registry=self.registry)
        ProcessCollector("warmturn_engine", pid=lambda: self._engines.stats.pid, registry=self.registry)
        self._engines = EngineCounts()
        self._ready = False
        self._model: tuple[str, ModelFacts] | None = None
        self.requests = _counts("requests", "Requests answered", "route", "status")
        self.turns = _counts("turns", "Turns ended", "finish_reason", known=tuple(FinishReason))
        self.reused = _counts("prompt_tokens_cached", "Prompt tokens reused, by tier", "tier", known=tuple(Tier))
        self.restores = _counts(
            "session_restores", "Turns whose KV was loaded from a lower tier", "tier", known=tuple(Tier)[1:]
        )
        self.hits = _counts("session_hits", "Turns of a session that recomputed nothing")
        self.misses = _counts(
            "session_misses",
            "Turns of a session that recomputed part of its history",
            "reason",
            known=(UNKNOWN_MISS, *MissReason),
        )
        self.lines = _counts(
            "line_requests",
            "Requests with an id of their conversation, by what became of them",
            "outcome",
            known=get_args(LineOutcome),
        )
        self.restarts = _counts("engine_restarts", "Restarts of the engine")
        self.salvages = _counts("log_salvages", "Starts at which the session log was damaged")
        self.salvaged = _counts(
            "log_salvaged_sessions", "Sessions of a damaged log, by outcome", "state", known=SALVAGED
        )
        self.older = _counts("log_rollbacks", "Starts at which the session log was older than before")
        self.first = _times("time_to_first_token_seconds", "Request to first token", FIRST_TOKEN_BUCKETS)
        self.between = _times("inter_token_latency_seconds", "Time between tokens", TOKEN_BUCKETS)
        self.whole = _times("e2e_request_latency_seconds", "Request to the end of the turn", TURN_BUCKETS)
        self.queue = _times("request_queue_time_seconds", "Waiting for admission", WAIT_BUCKETS)
        self.prefill = _times("request_prefill_time_seconds", "Admission to first token", TURN_BUCKETS)
        self.decode = _times("request_decode_time_seconds", "First token to the end of the turn", TURN_BUCKETS)
        self.pauses = Histogram(
            PREFIX + "think_time_seconds",
            "From the end of a turn to the request that goes on from it",
            PAUSE_BUCKETS,
            "after",
            tuple(StopKind),
        )
        self.restore = _times("session_restore_seconds", "Reading a session's KV from disk or remote", WAIT_BUCKETS)
        self.prompts = _times("request_prompt_tokens", "Prompt tokens of a turn", LENGTH_BUCKETS)
        self.replies = _times("request_generation_tokens", "Generated tokens of a turn", LENGTH_BUCKETS)
        self._own = [figure for figure in vars(self).values() if isinstance(figure, Counter | Histogram)]

    # --- what happens -----------------------------------------------------------------------------------------

    def log_opened(self, salvage: Salvage | None, older: bool) -> None:
        """Record whether the log was salvaged or is older than expected."""
        self.older.add(older)
        if salvage is not None:
            self.salvages.add(1)
            for state in SALVAGED:
                self.salvaged.add(getattr(salvage, state), state)

    def count_answer(self, route: str, status: int) -> None:
        """Count one answer; status 0: the client disconnected before an answer."""
        self.requests.add(1, route, str(status))

    def engine(self, stats: Stats, ready: bool) -> None:
        """Update from the engine's statistics. Must be called often, as counts of a dead engine since the last call are
        lost.
        """
        self.restarts.add(self._engines.update(stats))
        self._ready = ready

    def count_unload(self) -> None:
        """The engine was ended because its model was unloaded: the next one is no restart."""
        self._engines.unload()
        self._ready = False

    def model(self, name: str, facts: ModelFacts | None) -> None:
        """Set the served model and its name in the API; None: unchanged."""
        if facts is not None:
            self._model = name, facts

    @property
    def facts(self) -> ModelFacts | None:
        """What the engine measured of the served model; None while that is unknown."""
        return None if self._model is None else self._model[1]

    def stopwatch(self, started: float) -> Stopwatch:
        """A stopwatch for one turn. ``started`` is when its request came, by ``time.perf_counter``."""
        return Stopwatch(self, started)

    def pooled(self, tokens: int, seconds: float) -> None:
        """Count a request for embeddings or scores: its tokens, and the time since it came."""
        self.prompts.observe(tokens)
        self.whole.observe(seconds)

    def count_commit(self, recomputed: int, miss: MissReason | None) -> None:
        """Count a committed turn of a session with earlier turns: its recomputed tokens, and the reason."""
        if recomputed:
            self.misses.add(1, UNKNOWN_MISS if miss is None else miss)
        else:
            self.hits.add(1)

    # --- what is shown ----------------------------------------------------------------------------------------

    def text(self) -> bytes:
        """The metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def describe(self) -> list[Metric]:
        """Empty: the families are known only when they are collected."""
        return []

    def collect(self) -> Iterator[Metric]:
        """All families, with the current values."""
        stats = self._engines.stats
        yield _gauge("engine_ready", "1 while the engine takes turns", float(self._ready))
        for field, (name, text) in GAUGES.items():
            yield _gauge(name, text, getattr(stats, field))
        for field, (name, text) in COUNTERS.items():
            yield CounterMetricFamily(PREFIX + name, text, self._engines.total(field))
        yield self._evictions()
        yield from self._retention()
        yield from self._drafts()
        yield self._misses()
        yield from self._room()
        if self._model is not None:
            yield _info(*self._model)
        for figure in self._own:
            yield figure.family()

    def _evictions(self) -> Metric:
        family = CounterMetricFamily(PREFIX + "evictions", "Sessions evicted from a tier", labels=["tier"])
        for tier in Tier:
            family.add_metric([tier], self._engines.evictions(tier))
        return family

    def _retention(self) -> Iterator[Metric]:
        """What is evicted from the device, by the end of its last turn, and how long it is expected to pause."""
        text = "Sessions evicted from the device, by the end of their last turn"
        evicted = CounterMetricFamily(PREFIX + "device_evictions", text, labels=["after"])
        text = "Pause that 9 of 10 conversations stay within that go on"
        hold = GaugeMetricFamily(PREFIX + "retention_hold_seconds", text, labels=["after"])
        for kind in StopKind:
            evicted.add_metric([kind], self._engines.total_of("evictions_after", kind))
            hold.add_metric([kind], self._engines.stats.hold_seconds.get(kind, 0.0))
        yield from (evicted, hold)

    def _drafts(self) -> Iterator[Metric]:
        """Tokens that were drafted, and accepted ones, by where they came from."""
        drafted = CounterMetricFamily(PREFIX + "draft_tokens", "Drafted tokens that were verified", labels=["source"])
        text = "Drafted tokens that are in a reply"
        accepted = CounterMetricFamily(PREFIX + "accepted_draft_tokens", text, labels=["source"])
        for source in DraftSource:
            drafted.add_metric([source], self._engines.total_of("drafted", source))
            accepted.add_metric([source], self._engines.total_of("accepted", source))
        yield from (drafted, accepted)

    def _misses(self) -> Metric:
        text = "Turns that could not reuse all KV of their prompt"
        family = CounterMetricFamily(PREFIX + "cache_misses", text, labels=["reason"])
        for reason in Miss:
            family.add_metric([reason], self._engines.total_of("misses", reason))
        return family

    def _room(self) -> Iterator[Metric]:
        """What each tier holds, and how much it may."""
        used = GaugeMetricFamily(PREFIX + "pages", "KV pages in use", labels=["tier"])
        most = GaugeMetricFamily(PREFIX + "pages_capacity", "KV pages in total", labels=["tier"])
        text = "Part of a tier's capacity in use, 0 to 1; only tiers with a limit"
        share = GaugeMetricFamily(PREFIX + "kv_cache_usage_ratio", text, labels=["tier"])
        for tier in Tier:
            held = self._engines.stats.tier(tier)
            if tier.paged:
                used.add_metric([tier], held.used)
                most.add_metric([tier], held.capacity)
            else:
                yield _gauge(f"{tier}_bytes", f"KV in the {tier} tier", held.used)
                limit = f"Limit of KV in the {tier} tier; 0: no {tier} tier, or no limit"
                yield _gauge(f"{tier}_bytes_capacity", limit, held.capacity)
            if held.capacity or tier is Tier.DEVICE:
                share.add_metric([tier], held.used / held.capacity if held.capacity else 0.0)
        yield from (used, most, share)


class Stopwatch:
    """The times of one turn. ``receipt`` and ``queued`` (seconds) are set when it is admitted, ``first`` (seconds since
    the request) and ``prefill`` (since admission) with its first token, ``decode`` (from there to the last one so far)
    with those that come after it, ``ran`` (since admission) at its end.
    """

    def __init__(self, metrics: Metrics, started: float) -> None:
        self.receipt: Receipt | None = None
        self.queued: float | None = None
        self.first: float | None = None
        self.prefill: float | None = None
        self.ran = 0.0
        self.decode: float | None = None
        self.encoding = 0.0
        self._metrics = metrics
        self._started = self._last = started
        self._submitted = self._admitted = self._written = time.monotonic()
        self._tokens = 0
        self._ended = False

    def _count_admission(self, receipt: Receipt) -> None:
        """Count what its prompt got from which tier."""
        metrics = self._metrics
        self.receipt = receipt
        # A turn that a step has admitted and prefilled tells both at once: only the engine knows when it began.
        self._admitted = time.monotonic() if receipt.admitted is None else receipt.admitted
        self.queued = max(0.0, self._admitted - self._submitted)
        metrics.queue.observe(self.queued)
        metrics.prompts.observe(receipt.prompt)
        if receipt.after is not None and receipt.idle is not None:
            metrics.pauses.observe(receipt.idle, receipt.after)
        for tier in Tier:
            metrics.reused.add(receipt.count_reused(tier), tier)
        for tier in receipt.loaded:
            metrics.restores.add(1, tier)
        if any(not tier.paged for tier in receipt.loaded):
            metrics.restore.observe(receipt.load_seconds)

    def saw(self, delta: Delta, at: float | None = None) -> None:
        """Record a delta. If it has several tokens, they share its time. ``at``: when the engine had it (monotonic
        seconds): a process that has much to do hears of several at once.
        """
        if delta.receipt is not None:
            self._count_admission(delta.receipt)
        if delta.tokens:
            now = time.perf_counter()
            written = time.monotonic() if at is None else at
            if self._tokens:
                self._metrics.between.observe((now - self._last) / len(delta.tokens))
                self.decode = written - self._written
            else:
                self._written = written
                self.first = now - self._started
                self.prefill = max(0.0, time.monotonic() - self._admitted)
                self._metrics.first.observe(self.first)
                self._metrics.prefill.observe(self.prefill)
            self._tokens += len(delta.tokens)
            self._last = now
        if delta.finish_reason is not None:
            self.encoding = delta.encoding
            self.end(delta.finish_reason)

    def end(self, reason: FinishReason) -> None:
        """Record the end of the turn. Only the first call counts; a turn that was never admitted is not counted."""
        if self._ended or self.receipt is None:
            return
        self._ended = True
        self.ran = max(0.0, time.monotonic() - self._admitted)
        metrics, now = self._metrics, time.perf_counter()
        metrics.turns.add(1, reason)
        metrics.replies.observe(self._tokens)
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            metrics.whole.observe(now - self._started)
            if self.first is not None:
                metrics.decode.observe(max(0.0, now - self._started - self.first))


def _counts(name: str, text: str, *labels: str, known: tuple[str, ...] = ()) -> Counter:
    return Counter(PREFIX + name, text, labels, known)


def _times(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
    return Histogram(PREFIX + name, text, buckets)


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(PREFIX + name, text, value)


def _info(name: str, facts: ModelFacts) -> GaugeMetricFamily:
    """What does not change, as the labels of a 1; sizes are there for whoever multiplies."""
    labels = {
        "model": name,
        "architecture": facts.architecture,
        "device": facts.device,
        "dtype": facts.dtype,
        "mode": facts.mode,
        "page_size": str(facts.page_size),
        "token_bytes": str(facts.kv_bytes_per_token),
        "version": __version__,
    }
    family = GaugeMetricFamily(PREFIX + "model_info", "1; the labels describe the served model", labels=list(labels))
    family.add_metric(list(labels.values()), 1.0)
    return family
