"""What is known of the timelines of a tenant, in memory and on disk, without taking a session."""

from __future__ import annotations

from array import array

from cache.pages.timeline_key import is_marked
from cache.segments.chain import Owner
from cache.store import SessionStore


def closest(store: SessionStore, tenant: str, prompt: array[int]) -> tuple[int, int | None]:
    """The length of the longest prefix that ``prompt`` has in common with any cached or stored timeline of ``tenant``,
    and the token with which that timeline continues.
    """
    long = store.is_long(len(prompt))
    session, shared = store.index.match(tenant, long, prompt)
    ids = session.shareable if session is not None else array("i")
    if store.archive is not None:
        head, stored = store.archive.disk.match(tenant, prompt, long)
        if head is not None and stored > shared:
            shared, ids = stored, head.shareable
    return shared, ids[shared] if shared < len(ids) else None


def timeline_of(store: SessionStore, tenant: str, name: str, length: int | None = None) -> array[int]:
    """What is cached or stored of the named session, or its first ``length`` tokens, as the cache knows them."""
    session = store.find(tenant, name)
    if session is not None:
        return session.token_ids[: session.length if length is None else min(length, session.length)]
    head = None if store.archive is None else store.archive.disk.head(Owner(tenant, name, True))
    return array("i") if head is None else head.tip.timeline(length)[0]


def is_of_other_weights(store: SessionStore, tenant: str, name: str, prompt: array[int]) -> bool:
    """Whether what is cached or stored of the named session was computed with another adapter than ``prompt`` will be,
    see ``TimelineKey``.
    """
    first = next(iter(timeline_of(store, tenant, name, 1)), None)
    return first is not None and first != prompt[0] and (is_marked(first) or is_marked(prompt[0]))
