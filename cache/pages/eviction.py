"""Eviction order: which session is removed from a full tier, considering tenants' shares, pins and last use."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Collection, Iterable
from typing import Protocol, TypeVar


class Evictable(Protocol):
    """A session in some tier."""

    @property
    def tenant(self) -> str:
        """Whose it is; see ``scoped``."""

    @property
    def pinned_until(self) -> float:
        """Unix seconds."""


E = TypeVar("E", bound=Evictable)
SALT = "#"  # no tenant has it in its name


def scoped(tenant: str, salt: str) -> str:
    """The name under which a tenant's sessions of one salt are kept, apart from all its other ones; "" is no salt."""
    return f"{tenant}{SALT}{salt}" if salt else tenant


def payer(tenant: str) -> str:
    """Who has to account for sessions of that name: the tenant, whatever the salt."""
    return tenant.partition(SALT)[0]


class TenantShares:
    """What tenants hold of a tier, in pages or bytes, and who is ``over`` his share of its ``size``."""

    def __init__(self, share: float, size: int) -> None:
        self.held: Counter[str] = Counter()
        self.over: set[str] = set()
        self._most = share * size if share < 1.0 else math.inf

    def add(self, tenant: str, amount: int) -> None:
        """A tenant holds so much more, or less."""
        tenant = payer(tenant)
        self.held[tenant] += amount
        if self.held[tenant] > self._most:
            self.over.add(tenant)
        else:
            self.over.discard(tenant)
        if not self.held[tenant]:
            del self.held[tenant]


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
        elif not over or payer(session.tenant) in over:
            return session
        else:
            first = first or session
    return first or pinned
