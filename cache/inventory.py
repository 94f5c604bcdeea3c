"""What each tier holds: of one session, and of all sessions."""

from __future__ import annotations

from cache.segments.chain import Owner
from cache.store import SessionStore
from cache.tier import Tier, TierHolding, TierStats


def tier_stats(store: SessionStore) -> dict[Tier, TierStats]:
    """The statistics of every tier, nearest first."""
    stats = {
        tier: TierStats(memory.used, memory.slots, store.residency.evictions[tier])
        for tier, memory in store.pool.tiers.items()
    }
    return stats if store.archive is None else stats | store.archive.stats()


def session_holdings(store: SessionStore, tenant: str, name: str) -> dict[Tier, TierHolding]:
    """What each tier holds of a named session: only tiers that hold some of its KV, nearest first."""
    session = store.find(tenant, name)
    found: dict[Tier, TierHolding] = {}
    if session is not None and session.length:
        pool = store.pool
        for tier, memory in pool.tiers.items():
            pages = sum(page.tier is memory for page in session.pages)
            tokens = session.length - (len(session.pages) - pages) * pool.page_size
            states = session.state_bytes if (memory is pool.device) is session.warm else 0
            if pages:
                found[tier] = TierHolding(max(tokens, 0), pages * pool.page_bytes + states)
    if store.archive is not None:
        found |= store.archive.holdings(Owner(tenant, name, True), session)
    return found
