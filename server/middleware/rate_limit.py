"""Rate limits of a key: requests and computed tokens per minute, as buckets that fill up steadily."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from server.errors import ApiError

MINUTE = 60.0  # seconds


@dataclass
class Bucket:
    """What is left of a limit per minute. It fills up with ``limit`` a minute, to ``limit`` at most, and can be
    overdrawn, as what a turn costs is known at its end (a token bucket, RFC 2698).
    """

    limit: int
    clock: Callable[[], float] = time.monotonic
    _left: float = field(init=False)
    _at: float = field(init=False)

    def __post_init__(self) -> None:
        self._left = float(self.limit)
        self._at = self.clock()

    def left(self) -> float:
        now = self.clock()
        self._left = min(float(self.limit), self._left + (now - self._at) * self.limit / MINUTE)
        self._at = now
        return self._left

    def take(self, amount: float) -> None:
        """Take so much, even if less is left."""
        self._left = self.left() - amount

    def seconds_until(self, amount: float) -> float:
        """In how many seconds so much is left."""
        return max(0.0, (amount - self.left()) * MINUTE / self.limit)


class RateLimit:
    """The limits of one key; None: without. Tokens are those that are computed: what a turn reuses costs nothing."""

    def __init__(self, requests: int | None, tokens: int | None, clock: Callable[[], float] = time.monotonic) -> None:
        """``requests`` and ``tokens`` per minute; ``clock`` tells seconds."""
        self._buckets = {
            name: Bucket(limit, clock) for name, limit in (("requests", requests), ("tokens", tokens)) if limit
        }

    def __bool__(self) -> bool:
        return bool(self._buckets)

    def admit(self) -> None:
        """Count a request. Raises a 429 with Retry-After if one of the limits is reached."""
        for name, bucket in self._buckets.items():
            seconds = bucket.seconds_until(1)
            if seconds > 0:
                message = f"This key may use {bucket.limit} {name} per minute: try again in {math.ceil(seconds)} s."
                headers = {"retry-after": str(math.ceil(seconds))}
                raise ApiError(429, message, code="rate_limit_exceeded", headers=headers)
        if requests := self._buckets.get("requests"):
            requests.take(1)

    def charge(self, tokens: int) -> None:
        """Count the tokens that a turn has computed."""
        if bucket := self._buckets.get("tokens"):
            bucket.take(tokens)

    def headers(self) -> dict[str, str]:
        """The limits, what is left of them, and when they are whole again, as OpenAI's headers have it."""
        told = {}
        for name, bucket in self._buckets.items():
            told[f"x-ratelimit-limit-{name}"] = str(bucket.limit)
            told[f"x-ratelimit-remaining-{name}"] = str(max(0, math.floor(bucket.left())))
            told[f"x-ratelimit-reset-{name}"] = f"{bucket.seconds_until(bucket.limit):.3f}s"
        return told
