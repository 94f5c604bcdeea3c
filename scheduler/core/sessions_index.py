"""``SessionsIndex``: n-grams of the sessions in memory and on disk, by tenant."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Protocol
from weakref import WeakValueDictionary, ref

import numpy as np

from cache.pages.session import SessionCache
from cache.segments.chain import ChainHead, Owner
from cache.store import SessionStore
from scheduler.core.ngrams import Match, longest_match

_SIZE = 6  # tokens of an n-gram
_STRIDE = 8  # only n-grams that end at multiples of this are indexed
_MOST = 1 << 18  # entries of a tenant, about 2 million tokens; beyond that the oldest are dropped
_MOST_IN_ALL = 1 << 20  # entries; beyond that those of the scope that was longest not added to are dropped
_SHIFT = 32  # a place is a session's number and, in this many bits, the end of the n-gram


class TokenSource(Protocol):
    """Tokens of a session: a ``SessionCache`` in memory, or a ``ChainHead`` on disk."""

    @property
    def owner(self) -> Owner:
        """The session's name."""

    @property
    def shareable(self) -> array[int]:
        """The tokens that other timelines may use."""


class SessionsIndex:
    """Finds where the last tokens of a timeline occurred in other sessions of the same scope (a tenant, or a tenant and
    a salt). An entry is the hash of an n-gram and a place in a session's tokens. The tokens themselves are read from
    the session, in memory or on disk, so that what was rewound or deleted is never proposed, and is not kept here.
    About 20 bytes of memory per token.
    """

    def __init__(self, store: SessionStore) -> None:
        """``store``: with what is on disk, if that is kept."""
        self._store = store
        heads = store.archive.disk.heads.values() if store.archive is not None else ()
        self._unread = deque(map(ref, heads))  # of earlier processes, the newest last
        self._places: dict[str, dict[int, int]] = {}  # by scope, the one that was added to last at the end
        self._count = 0  # entries of all scopes
        self._cached: WeakValueDictionary[int, SessionCache] = WeakValueDictionary()
        self._owners: dict[int, Owner] = {}
        self._known: dict[Owner, tuple[int, int]] = {}  # number, tokens indexed
        self._next = 0

    def add(self, scope: str, session: SessionCache) -> None:
        """Index what is new of a session whose turn has ended."""
        places = self._places[scope] = self._places.pop(scope, {})
        before, ids = len(places), session.shareable
        number, done = self._number(session.owner)
        self._cached[number] = session
        for key, stop in _ngrams(ids, done, len(ids)):
            if places.get(key, -1) >> _SHIFT != number:  # within a session the first place, which most follows
                places.pop(key, None)  # so that it is the newest
                places[key] = number << _SHIFT | stop
        self._known[session.owner] = number, len(ids)
        self._count += len(places) - before
        self._drop(scope, len(places) - _MOST)
        while self._count > _MOST_IN_ALL:
            self._drop(next(iter(self._places)), self._count - _MOST_IN_ALL)
        self._forget_ended()

    def add_stored(self, most: int) -> None:
        """Index up to ``most`` more tokens of the sessions that were on disk at the start, the newest first. They take
        no other session's place.
        """
        while self._unread and most > 0:
            head = self._unread[-1]()
            if head is not None and self._is_stored(head):
                places, ids = self._places.setdefault(head.tenant, {}), head.shareable
                number, done = self._number(head.owner)
                upto = min(len(ids), done + most)
                before = len(places)
                if before < _MOST and self._count < _MOST_IN_ALL:
                    for key, stop in _ngrams(ids, done, upto):
                        places.setdefault(key, number << _SHIFT | stop)
                self._count += len(places) - before
                self._known[head.owner] = number, max(done, upto)
                most -= max(0, upto - done)
                if upto < len(ids):
                    return
            self._unread.pop()

    def find(self, scope: str, ids: array[int], own: TokenSource | None) -> tuple[TokenSource, Match] | None:
        """The session, and the place in it, where the last tokens of ``ids`` occurred; not in ``own``."""
        places = self._places.get(scope)
        if not places:
            return None
        last = ids[-_SIZE - _STRIDE :].tobytes()
        size = ids.itemsize
        for back in range(min(_STRIDE, len(ids) - _SIZE + 1)):
            stop = len(last) - back * size
            place = places.get(hash(last[stop - _SIZE * size : stop]))
            session = self._session(place >> _SHIFT) if place is not None else None
            if place is None or session is None or (own is not None and session.owner == own.owner):
                continue
            other, end = session.shareable, (place & (1 << _SHIFT) - 1) + back
            if end < len(other) and (match := longest_match(other, np.array([end]), ids)):
                return session, match
        return None

    def _session(self, number: int) -> TokenSource | None:
        """A session in memory, else what is stored of it; None if there is neither."""
        session, archive = self._cached.get(number), self._store.archive
        if session is not None and session in self._store.residency:
            return session
        owner = self._owners.get(number)
        return archive.disk.head(owner) if archive is not None and owner is not None else None

    def _is_stored(self, head: ChainHead) -> bool:
        archive = self._store.archive
        return archive is not None and archive.disk.head(head.owner) is head

    def _number(self, owner: Owner) -> tuple[int, int]:
        """The session's number, and how many of its tokens are indexed."""
        if owner not in self._known:
            self._known[owner] = self._next, 0
            self._owners[self._next] = owner
            self._next += 1
        return self._known[owner]

    def _drop(self, scope: str, count: int) -> None:
        """Drop the oldest ``count`` entries of a scope, or all if there are fewer."""
        places = self._places[scope]
        for key in list(islice(places, max(0, count))):
            del places[key]
            self._count -= 1
        if not places:
            del self._places[scope]

    def _forget_ended(self) -> None:
        """Look at two sessions, in turn: forget the names of those that are neither in memory nor stored."""
        for number in list(islice(self._owners, 2)):
            alive, owner = self._session(number) is not None, self._owners.pop(number)
            if alive:
                self._owners[number] = owner
            else:
                del self._known[owner]


def _ngrams(ids: array[int], done: int, length: int) -> Iterator[tuple[int, int]]:
    """The hash and the end of the n-grams that are indexed when the tokens from ``done`` to ``length`` are new."""
    data, size = ids.tobytes(), ids.itemsize
    for stop in range(max(_STRIDE, min(done, length) // _STRIDE * _STRIDE), length + 1, _STRIDE):
        yield hash(data[(stop - _SIZE) * size : stop * size]), stop
