"""What each tier holds: of one session, and of all sessions."""

from __future__ import annotations

from collections import Counter

from cache.pages.pool import near_parts
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


def count_reclaimable(store: SessionStore) -> int:
    """Device pages, with both parts, that only idle sessions hold whose KV is on disk too: free without a copy as soon
    as a turn needs them. It looks at all pages of these sessions.
    """
    if store.archive is None:
        return 0
    is_stored, device = store.archive.write_behind.is_stored, store.pool.device
    holders = Counter(page for session in store.residency.warm if is_stored(session) for page in session.pages)
    pages = [page for page, count in holders.items() if page.refs == count]
    return device.frames.pages(device.frames.count_needed(len(pages), near_parts(pages)))


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
