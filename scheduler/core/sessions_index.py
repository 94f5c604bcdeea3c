"""``SessionsIndex``: n-grams of the sessions in memory, by tenant."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from weakref import WeakKeyDictionary, WeakValueDictionary

import numpy as np

from cache.pages.session import SessionCache
from scheduler.core.ngrams import Match, longest_match

_SIZE = 6  # tokens of an n-gram
_STRIDE = 8  # only n-grams that end at multiples of this are indexed
_MOST = 1 << 18  # entries of a tenant, about 2 million tokens; beyond that the oldest are dropped


class SessionsIndex:
    """Finds where the last tokens of a timeline occurred in other sessions of the same scope (a tenant, or a tenant and
    a salt). An entry is a place in a session's tokens; the tokens themselves are read from the session, so that what
    was rewound or deleted is never proposed. About 50 bytes of memory per token.
    """

    def __init__(self, is_alive: Callable[[SessionCache], bool]) -> None:
        """``is_alive``: whether a session is still in memory."""
        self._is_alive = is_alive
        self._places: dict[str, dict[tuple[int, ...], tuple[int, int]]] = {}  # session number, end of the n-gram
        self._sessions: WeakValueDictionary[int, SessionCache] = WeakValueDictionary()
        self._known: WeakKeyDictionary[SessionCache, tuple[int, int]] = WeakKeyDictionary()  # number, tokens indexed
        self._next = 0

    def add(self, scope: str, session: SessionCache) -> None:
        """Index what is new of a session whose turn has ended."""
        ids = session.shareable
        number, done = self._known.get(session, (self._next, 0))
        if number == self._next:
            self._next += 1
            self._sessions[number] = session
        places = self._places.setdefault(scope, {})
        for stop in range(max(_STRIDE, min(done, len(ids)) // _STRIDE * _STRIDE), len(ids) + 1, _STRIDE):
            key = tuple(ids[stop - _SIZE : stop])
            if places.get(key, (-1, 0))[0] != number:  # within a session the first place, which most follows
                places.pop(key, None)  # so that it is the newest
                places[key] = (number, stop)
        self._known[session] = number, len(ids)
        while len(places) > _MOST:
            del places[next(iter(places))]

    def find(self, scope: str, ids: array[int], own: SessionCache | None) -> tuple[SessionCache, Match] | None:
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
