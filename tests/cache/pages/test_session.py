"""A session's log, mask and page table."""

from __future__ import annotations

import random
from array import array

import pytest
import torch
from session_kit import session_of

from cache.memory.memory_tier import MemoryTier
from cache.pages.pool import Page
from cache.pages.session import SessionCache, common_prefix

CPU = torch.device("cpu")


def test_common_prefix_against_a_loop() -> None:
    rng = random.Random(1)
    for _ in range(500):
        a = array("i", [rng.randrange(2) for _ in range(rng.randint(0, 12))])
        b = array("i", [rng.randrange(2) for _ in range(rng.randint(0, 12))])
        want = 0
        while want < min(len(a), len(b)) and a[want] == b[want]:
            want += 1
        assert common_prefix(a, b) == common_prefix(b, a) == want


def test_length_follows_what_was_fed() -> None:
    session = SessionCache("a", "chat")
    session.token_ids = array("i", [7, 8, 9])
    assert session.length == 0
    session.on_fed(2)
    assert session.length == 2
    assert list(session.cached) == [7, 8]
    assert bytes(session.mask) == b"\x01\x01"


def test_feeding_more_than_there_is_fails() -> None:
    session = SessionCache("a", None)
    session.token_ids = array("i", [7])
    with pytest.raises(AssertionError):
        session.on_fed(2)


def test_one_token_of_a_prompt_is_always_left_to_feed() -> None:
    session = session_of(range(4))
    assert session.reachable(array("i", [0, 1, 2, 3])) == 3
    assert session.reachable(array("i", [0, 1, 2, 3, 4])) == 4
    assert session.reachable(array("i", [0, 9])) == 1
    assert session.reachable(array("i", [0])) == 0


def test_pending_tokens_are_not_reachable() -> None:
    session = session_of(range(2))
    session.token_ids.extend([2, 3])
    assert session.reachable(array("i", [0, 1, 2, 3, 4])) == 2


def test_hidden_tokens_end_what_others_may_share() -> None:
    session = session_of(range(6))
    session.hide(4, 99)
    assert bytes(session.mask) == b"\1\1\1\1\0\0"
    assert session.hidden == 2
    assert session.length == 6
    session.hide(2, 3)
    assert list(session.shareable) == [0, 1]
    assert list(session.cached) == [0, 1, 2, 3, 4, 5]


def test_a_cut_before_the_hidden_tokens_forgets_that_they_were_hidden() -> None:
    session = session_of(range(6))
    session.hide(2, 4)
    session.cut(3)
    assert (session.hidden, list(session.shareable)) == (1, [0, 1])
    session.cut(2)
    assert (session.hidden, list(session.shareable)) == (0, [0, 1])


def test_a_cut_drops_pending_tokens_too() -> None:
    session = session_of(range(3))
    session.token_ids.append(9)
    session.cut(3)
    assert list(session.token_ids) == [0, 1, 2]


def test_the_page_table_is_rebuilt_when_pages_moved() -> None:
    tier = MemoryTier(8, 4, CPU)
    session = SessionCache("a", None)
    session.pages = [Page(tier, 5), Page(tier, 2)]
    assert session.table(CPU).tolist() == [5, 2]
    session.pages[0].slot = 7
    session.on_pages_moved()
    assert session.table(CPU).tolist() == [7, 2]
    assert session.table(CPU).dtype is torch.int64
