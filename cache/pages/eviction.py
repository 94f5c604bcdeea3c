"""Eviction order: which session is removed from a full tier, considering tenants' shares, pins and last use."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Collection, Iterable
from typing import Protocol, TypeVar


class Evictable(Protocol):
    """A session in some tier, as ``victim`` needs it."""

    @property
    def tenant(self) -> str:
        """The tenant that owns it, with its salt; see ``scoped``."""

    @property
    def pinned_until(self) -> float:
        """The end of its pin, in Unix seconds."""


E = TypeVar("E", bound=Evictable)
SALT = "#"  # no tenant has it in its name


def scoped(tenant: str, salt: str) -> str:
    """The name under which sessions of a tenant with that salt are kept, separate from its others; ``salt`` "" is
    none.
    """
    return f"{tenant}{SALT}{salt}" if salt else tenant


def payer(tenant: str) -> str:
    """The tenant in a name that ``scoped`` made: its use counts for the tenant, whatever the salt."""
    return tenant.partition(SALT)[0]


class TenantShares:
    """How much of a tier each tenant holds, in pages or bytes, and which tenants are ``over`` their share of its
    ``size``.
    """

    def __init__(self, share: float, size: int) -> None:
        self.held: Counter[str] = Counter()
        self.over: set[str] = set()
        self._most = share * size if share < 1.0 else math.inf

    def add(self, tenant: str, amount: int) -> None:
        """A tenant holds ``amount`` more, or less if it is negative."""
        tenant = payer(tenant)
        self.held[tenant] += amount
        if self.held[tenant] > self._most:
            self.over.add(tenant)
        else:
            self.over.discard(tenant)
        if not self.held[tenant]:
            del self.held[tenant]


def victim(idle: Iterable[E], over: Collection[str]) -> E | None:
    """The session to evict: the first of ``idle`` (least recently used first) whose tenant is ``over`` its share, else
    the first of all. A pinned session is chosen only if all are pinned, so a pin never keeps a tier from making room.
    None if ``idle`` is empty.
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
