"""``SessionsIndex``: n-grams of the sessions in memory and on disk, by tenant."""

from __future__ import annotations

from array import array
from collections import deque
from typing import Protocol
from weakref import WeakKeyDictionary, WeakValueDictionary, ref

import numpy as np

from cache.pages.session import SessionCache
from cache.segments.chain import ChainHead
from cache.store import SessionStore
from scheduler.core.ngrams import Match, longest_match

_SIZE = 6  # tokens of an n-gram
_STRIDE = 8  # only n-grams that end at multiples of this are indexed
_MOST = 1 << 18  # entries of a tenant, about 2 million tokens; beyond that the oldest are dropped


class TokenSource(Protocol):
    """Tokens of a session: a ``SessionCache`` in memory, or a ``ChainHead`` on disk."""

    @property
    def shareable(self) -> array[int]:
        """The tokens that other timelines may use."""


class SessionsIndex:
    """Finds where the last tokens of a timeline occurred in other sessions of the same scope (a tenant, or a tenant and
    a salt). An entry is a place in a session's tokens; the tokens themselves are read from the session, so that what
    was rewound or deleted is never proposed. About 50 bytes of memory per token.
    """

    def __init__(self, store: SessionStore) -> None:
        """``store``: with what is on disk, if that is kept."""
        self._store = store
        heads = store.archive.disk.heads.values() if store.archive is not None else ()
        self._unread = deque(map(ref, heads))  # of earlier processes, the newest last
        self._places: dict[str, dict[tuple[int, ...], tuple[int, int]]] = {}  # session number, end of the n-gram
        self._sessions: WeakValueDictionary[int, TokenSource] = WeakValueDictionary()
        self._known: WeakKeyDictionary[TokenSource, tuple[int, int]] = WeakKeyDictionary()  # number, tokens indexed
        self._next = 0

    def add(self, scope: str, session: TokenSource) -> None:
        """Index what is new of a session whose turn has ended."""
        ids, places = session.shareable, self._places.setdefault(scope, {})
        number, done = self._number(session)
        for stop in _stops(done, len(ids)):
            key = tuple(ids[stop - _SIZE : stop])
            if places.get(key, (-1, 0))[0] != number:  # within a session the first place, which most follows
                places.pop(key, None)  # so that it is the newest
                places[key] = (number, stop)
        self._known[session] = number, len(ids)
        while len(places) > _MOST:
            del places[next(iter(places))]

    def add_stored(self, most: int) -> None:
        """Index up to ``most`` more tokens of the sessions that were on disk at the start, the newest first. They take
        no other session's place.
        """
        while self._unread and most > 0:
            head = self._unread[-1]()
            if head is not None and self._is_alive(head):
                places, ids = self._places.setdefault(head.tenant, {}), head.shareable
                number, done = self._number(head)
                upto = min(len(ids), done + most)
                for stop in _stops(done, upto) if len(places) < _MOST else ():
                    places.setdefault(tuple(ids[stop - _SIZE : stop]), (number, stop))
                self._known[head] = number, upto
                most -= upto - done
                if upto < len(ids):
                    return
            self._unread.pop()

    def find(self, scope: str, ids: array[int], own: TokenSource | None) -> tuple[TokenSource, Match] | None:
        """The session, and the place in it, where the last tokens of ``ids`` occurred; not in ``own``."""
        places = self._places.get(scope)
        if not places:
            return None
        for back in range(min(_STRIDE, len(ids) - _SIZE + 1)):
            stop = len(ids) - back
            place = places.get(tuple(ids[stop - _SIZE : stop]))
            session = self._sessions.get(place[0]) if place is not None else None
            if place is None or session is None or session is own or not self._is_alive(session):
                continue
            other = session.shareable
            if place[1] + back < len(other) and (match := longest_match(other, np.array([place[1] + back]), ids)):
                return session, match
        return None

    def _is_alive(self, session: TokenSource) -> bool:
        """Whether a session is still in memory, or stored."""
        archive = self._store.archive
        if isinstance(session, ChainHead):
            return archive is not None and archive.disk.head(session.owner) is session
        return isinstance(session, SessionCache) and session in self._store.residency

    def _number(self, session: TokenSource) -> tuple[int, int]:
        """The session's number, and how many of its tokens are indexed."""
        number, done = self._known.get(session, (self._next, 0))
        if number == self._next:
            self._next += 1
            self._sessions[number] = session
        return number, done


def _stops(done: int, length: int) -> range:
    """Where the n-grams end that are indexed when the tokens from ``done`` to ``length`` are new."""
    return range(max(_STRIDE, min(done, length) // _STRIDE * _STRIDE), length + 1, _STRIDE)
