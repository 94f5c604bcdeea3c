"""What a session holds of the near parts of its pages: it holds them from the page ``released`` on, and releases those
that its next token does not see when the device needs room.
"""

from __future__ import annotations

from cache.pages.pool import Page, PagePool
from cache.pages.session import SessionCache


def cut(pool: PagePool, session: SessionCache, keep: int) -> None:
    """Drop the near parts of the pages from ``keep`` on, before these pages are dropped."""
    if pool.windows is not None:
        pool.drop_near(session.pages[max(keep, session.released) :])
        session.released = min(session.released, keep)


def hold_seen(pool: PagePool, session: SessionCache, *, of_none: bool = False) -> None:
    """Hold the near parts that the next token sees; they exist (``SessionCache.sees_all``). Some may have been released
    by this session, and be there because another one holds them. ``of_none``: it holds none yet, and holds as well all
    near parts before those that exist: a fork is stored whole, whatever becomes of its trunk.
    """
    if pool.windows is None:
        return
    session.released = len(session.pages) if of_none else session.released
    first = pool.windows.first_key(session.length) // pool.page_size
    while of_none and first > 0 and session.pages[first - 1].near >= 0:
        first -= 1
    if first < session.released:
        pool.share_near(session.pages[first : session.released])
        session.released = first
        session.on_pages_moved()


def held_pages(pool: PagePool, session: SessionCache) -> list[Page]:
    """The pages whose near parts it holds. Asserts that its next token sees no other ones."""
    windows = pool.windows
    if windows is None:
        return []
    assert 0 <= session.released <= len(session.pages)
    assert session.sees_all(session.length, windows, pool.page_size)
    assert session.released <= windows.first_key(session.length) // pool.page_size
    return session.pages[session.released :]


def holds_unseen(pool: PagePool, session: SessionCache) -> bool:
    """Whether it holds near parts that it need not keep."""
    windows = pool.windows
    return windows is not None and session.released < windows.first_kept(session.length) // pool.page_size


def release(pool: PagePool, session: SessionCache, stored: int, *, all_unseen: bool) -> None:
    """Release near parts that it need not keep, of the first ``stored`` tokens only. Without ``all_unseen``
    those are kept that the newest turn would see if it was run again: from where it began, if its prompt was short,
    else from the end of its prompt.
    """
    windows = pool.windows
    if windows is None:
        return
    first = min(stored, windows.first_kept(session.length))
    if not all_unseen:
        end = max(0, session.asked - 1)
        seen = end - windows.first_key(end)
        kept = session.began if 0 < end - session.began <= seen else end
        first = min(first, windows.first_key(kept))
    page = min(first // pool.page_size, len(session.pages))
    if page > session.released:
        pool.drop_near(session.pages[session.released : page])
        session.released = page
        session.on_pages_moved()
