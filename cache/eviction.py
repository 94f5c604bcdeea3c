"""Who leaves a full tier."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable
from typing import Protocol, TypeVar


class Evictable(Protocol):
    """A session in some tier."""

    @property
    def tenant(self) -> str:
        """Whose it is."""

    @property
    def pinned_until(self) -> float:
        """Unix seconds."""


E = TypeVar("E", bound=Evictable)


def victim(idle: Iterable[E], over: Collection[str]) -> E | None:
    """The first of ``idle`` (least recently used first) of a tenant that is ``over`` its share, else the first of all;
    a pinned one only where all are. So a pin delays, and never keeps a tier from making room.
    """
    now = time.time()
    first: E | None = None
    pinned: E | None = None
    for session in idle:
        if session.pinned_until > now:
            pinned = pinned or session
        elif not over or session.tenant in over:
            return session
        else:
            first = first or session
    return first or pinned
