"""What ``/metrics`` shows, in a registry of its own."""

from __future__ import annotations

import time

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)

from scheduler.messages import Delta, Receipt, Stats
from server.salvage import Salvage

disable_created_metrics()  # type: ignore[no-untyped-call]  # they double the page and nobody plots them

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
FIRST_TOKEN_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
GAUGES = {  # by their names in ``Stats``
    "running": ("running", "Turns in the batch"),
    "waiting": ("waiting", "Turns in the queue"),
    "sessions": ("sessions", "Sessions whose KV is somewhere"),
    "disk_bytes": ("disk_bytes", "KV on disk"),
    "disk_bytes_total": ("disk_bytes_capacity", "What KV may take on disk; 0: there is no disk tier"),
    "disk_sessions": ("disk_sessions", "Sessions whose KV is on disk"),
    "disk_pending": ("disk_pending_sessions", "Idle sessions whose newest KV is not on disk yet"),
    "remote_bytes": ("remote_bytes", "KV in the remote tier"),
    "remote_bytes_total": ("remote_bytes_capacity", "What KV may take in the remote tier; 0: no tier, or no limit"),
}
COUNTERS = {
    "prompt_tokens": ("prompt_tokens", "Prompt tokens of admitted turns, reused ones included"),
    "cached_tokens": ("cached_tokens", "Prompt tokens that were reused from a session's KV"),
    "generated_tokens": ("generated_tokens", "Tokens generated"),
    "steps": ("steps", "Steps of the engine"),
    "preemptions": ("preemptions", "Turns that had to wait again because pages ran out"),
    "evictions": ("evictions", "Sessions whose KV left a tier"),
    "disk_written": ("disk_written_bytes", "KV written to disk"),
    "disk_read": ("disk_read_bytes", "KV read from disk"),
    "disk_errors": ("disk_errors", "Reads and writes of KV that the file system refused"),
    "disk_damaged": ("disk_damaged_files", "Files of KV that failed their checks, and were removed"),
}


class Metrics:
    """Counters that only grow, also when an engine dies and a fresh one counts from zero again."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._seen = Stats()
        self._gauges = {field: self._gauge(name, text) for field, (name, text) in GAUGES.items()}
        self._counters = {field: self._counter(name, text) for field, (name, text) in COUNTERS.items()}
        self._misses = self._counter("cache_misses", "Turns whose KV could not be reused as far as it went", "reason")
        self._loaded = self._counter("loaded_tokens", "Prompt tokens reused from KV off the device", "tier")
        self._pages = self._gauge("pages", "KV pages in use", "tier")
        self._pages_capacity = self._gauge("pages_capacity", "KV pages there are", "tier")
        self._salvages = self._counter("log_salvages", "Starts at which the session log was damaged")
        self._salvaged = self._counter("log_salvaged_sessions", "Sessions of a damaged log, by outcome", "state")
        self._older = self._counter("log_rollbacks", "Starts at which the session log was an older one than before")
        self._ready = self._gauge("engine_ready", "1 while the engine takes turns")
        self._requests = self._counter("requests", "Requests answered", "route", "status")
        self._first = self._histogram("time_to_first_token_seconds", "Request to first token", FIRST_TOKEN_BUCKETS)
        self._between = self._histogram("inter_token_latency_seconds", "From token to token", TOKEN_BUCKETS)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"warmturn_{name}", text, labels, registry=self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"warmturn_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"warmturn_{name}", text, buckets=buckets, registry=self.registry)

    def log_opened(self, salvage: Salvage | None, older: bool) -> None:
        """Take over what the log found when it was opened."""
        self._older.inc(older)
        if salvage is not None:
            self._salvages.inc()
            for state in ("whole", "refused", "nameless"):
                self._salvaged.labels(state).inc(getattr(salvage, state))

    def answered(self, route: str, status: int) -> None:
        """Count one answer; status 0 is a client that left before there was one."""
        self._requests.labels(route, str(status)).inc()

    def engine(self, stats: Stats, ready: bool) -> None:
        """Take over the engine's figures. Called often enough that no engine's counts are missed for long."""
        if stats.steps < self._seen.steps or stats.generated_tokens < self._seen.generated_tokens:
            self._seen = Stats()  # a fresh engine
        for field, counter in self._counters.items():
            counter.inc(max(0, getattr(stats, field) - getattr(self._seen, field)))
        for reason, count in stats.misses.items():
            self._misses.labels(reason).inc(max(0, count - self._seen.misses.get(reason, 0)))
        self._seen = stats
        for field, gauge in self._gauges.items():
            gauge.set(getattr(stats, field))
        self._pages.labels("device").set(stats.pages_device)
        self._pages.labels("host").set(stats.pages_host)
        self._pages_capacity.labels("device").set(stats.pages_device_total)
        self._pages_capacity.labels("host").set(stats.pages_host_total)
        self._ready.set(ready)

    def stopwatch(self, started: float) -> Stopwatch:
        """Times one turn. ``started`` is when its request came, by ``time.perf_counter``."""
        return Stopwatch(self._first, self._between, started)

    def admitted(self, receipt: Receipt) -> None:
        """Count what the prompt of a turn got from tiers below the device."""
        for tier, tokens in (("host", receipt.restored), ("disk", receipt.loaded), ("remote", receipt.fetched)):
            self._loaded.labels(tier).inc(tokens)

    def text(self) -> bytes:
        """Prometheus' text format."""
        return generate_latest(self.registry)


class Stopwatch:
    """The latencies of one turn's tokens, as its deltas come."""

    def __init__(self, first: Histogram, between: Histogram, started: float) -> None:
        self._first = first
        self._between = between
        self._last = started
        self._begun = False

    def saw(self, delta: Delta) -> None:
        """Several tokens in one delta share its time."""
        if not delta.tokens:
            return
        now = time.perf_counter()
        if self._begun:
            self._between.observe((now - self._last) / len(delta.tokens))
        else:
            self._first.observe(now - self._last)
        self._begun = True
        self._last = now
