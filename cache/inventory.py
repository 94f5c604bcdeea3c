"""What each tier holds: of one session, and of all sessions."""

from __future__ import annotations

from cache.segments.chain import Owner
from cache.store import SessionStore
from cache.tier import Tier, TierHolding, TierStats


def tier_stats(store: SessionStore) -> dict[Tier, TierStats]:
    """The statistics of every tier, nearest first. Those in memory are told in pages with both parts."""
    stats = {}
    for tier, memory in store.pool.tiers.items():
        pages, free = memory.frames.pages(memory.slots), memory.frames.pages(memory.free)
        stats[tier] = TierStats(pages - free, pages, store.residency.evictions[tier])
    return stats if store.archive is None else stats | store.archive.stats()


def session_holdings(store: SessionStore, tenant: str, name: str) -> dict[Tier, TierHolding]:
    """What each tier holds of a named session: only tiers that hold some of its KV, nearest first."""
    session = store.find(tenant, name)
    found: dict[Tier, TierHolding] = {}
    if session is not None and session.length:
        pool = store.pool
        for tier, memory in pool.tiers.items():
            held = [page for page in session.pages if page.tier is memory]
            pages = len(held)
            tokens = session.length - (len(session.pages) - pages) * pool.page_size
            states = session.state_bytes if (memory is pool.device) is session.warm else 0
            if pages:
                found[tier] = TierHolding(max(tokens, 0), pool.bytes_of(held) + states)
    if store.archive is not None:
        found |= store.archive.holdings(Owner(tenant, name, True), session)
    return found
