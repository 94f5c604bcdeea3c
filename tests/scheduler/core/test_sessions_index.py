"""The index of what a tenant's sessions have said: what is found, what it keeps, and how much."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import pytest
from session_kit import session_of

from cache.pages.session import SessionCache
from scheduler.core import sessions_index
from scheduler.core.sessions_index import SessionsIndex


def index_of(*sessions: SessionCache) -> tuple[SessionsIndex, set[SessionCache]]:
    """An index, and what is in memory."""
    alive = set(sessions)
    store: Any = SimpleNamespace(archive=None, residency=alive)
    index = SessionsIndex(store)
    for session in sessions:
        index.add(session.tenant, session)
    return index, alive


def entries(index: SessionsIndex) -> dict[str, int]:
    counts = {scope: len(places) for scope, places in index._places.items()}
    assert index._count == sum(counts.values())
    return counts


def test_the_place_behind_the_last_tokens_is_found_wherever_they_end() -> None:
    said = session_of(list(range(100, 200)), name="s")
    index, _ = index_of(said)
    for stop in range(120, 199):
        found = index.find("a", array("i", [7, *range(stop - 15, stop)]), None)
        assert found is not None
        assert (found[0], found[1].stop) == (said, stop - 100)
    assert index.find("a", array("i", [7, *range(104, 120)]), said) is None
    assert index.find("b", array("i", [7, *range(104, 120)]), None) is None


def test_what_was_rewound_or_dropped_is_not_found() -> None:
    said = session_of(list(range(100, 200)), name="s")
    index, alive = index_of(said)
    del said.token_ids[40:], said.mask[40:]
    assert index.find("a", array("i", range(140, 160)), None) is None
    assert index.find("a", array("i", range(110, 130)), None) is not None
    alive.clear()
    assert index.find("a", array("i", range(110, 130)), None) is None


def test_the_index_holds_no_tokens_and_forgets_the_names_of_what_has_ended() -> None:
    sessions = [session_of(list(range(first, first + 64)), name=f"s{first}") for first in range(0, 640, 64)]
    index, alive = index_of(*sessions)
    for places in index._places.values():
        assert all((isinstance(key, int) and key > 1 << 16) or key < 0 for key in places)
    alive -= set(sessions[1:])
    for _ in range(10):
        index.add("a", sessions[0])
    assert list(index._owners.values()) == [sessions[0].owner] == list(index._known)


def test_it_has_a_limit_for_a_scope_and_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions_index, "_MOST", 20)
    monkeypatch.setattr(sessions_index, "_MOST_IN_ALL", 50)
    index, _ = index_of()
    for number, tenant in enumerate("aabcbd"):
        index.add(tenant, session_of(list(range(number * 1000, number * 1000 + 100)), name=f"s{number}", tenant=tenant))
    assert entries(index) == {"a": 6, "c": 12, "b": 20, "d": 12}  # to a nothing was added for the longest time
    index.add("d", session_of([1, 2, 3], name="short", tenant="d"))
    index.add("e", session_of([1, 2, 3], name="short", tenant="e"))
    assert "e" not in entries(index)
    index.add("f", session_of(list(range(100)), name="f", tenant="f"))
    assert entries(index) == {"b": 20, "c": 6, "d": 12, "f": 12}
