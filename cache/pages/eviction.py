"""Eviction order: which session is removed from a full tier, considering tenants' shares, pins, and how much each
session is worth keeping.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable
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
_WINDOW = 256  # sessions whose worth is compared, least recently used first: the cost of a choice is bounded


def scope_name(tenant: str, salt: str) -> str:
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
    return next(iter(eviction_order(idle, over, lambda session: 0.0, window=1)), None)


def eviction_order(
    idle: Iterable[E],
    over: Collection[str],
    worth: Callable[[E], float],
    spared: Collection[E] = (),
    window: int = _WINDOW,
) -> list[E]:
    """The sessions of ``idle`` (least recently used first) to evict next, in order: those whose tenant is ``over`` its
    share; if there are none, the others; if there are none, pinned ones, and last those that are ``spared``. Among the
    first two groups the least ``worth`` goes first, and of equal ones the least recently used; at most ``window``
    sessions are compared. Empty only if ``idle`` is.
    """
    now = time.time()
    first: list[E] = []
    others: list[E] = []
    last: list[E] = []
    for session in idle:
        if session.pinned_until > now or session in spared:
            last.append(session)
        elif not over or payer(session.tenant) in over:
            first.append(session)
            if len(first) >= window:
                return sorted(first, key=worth)
        elif len(others) < window:
            others.append(session)
    if first or others:
        return sorted(first or others, key=worth)
    return sorted(last, key=lambda session: session in spared)
