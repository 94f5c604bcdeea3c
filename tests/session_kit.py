"""Sessions as they are behind their turns, without a store."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from cache.pages.session import SessionCache


def session_of(tokens: Iterable[int], owed: int = 0, name: str | None = None, tenant: str = "a") -> SessionCache:
    """A session of these tokens, all of which are fed but the last ``owed``."""
    session = SessionCache(tenant, name)
    session.token_ids = array("i", tokens)
    session.on_fed(len(session.token_ids) - owed)
    return session
