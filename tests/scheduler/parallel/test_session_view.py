"""A step that was told to another rank is laid out there as it is here."""

from __future__ import annotations

import msgspec
import numpy as np
import torch
from session_kit import session_of

from cache.memory.memory_tier import MemoryTier
from cache.pages.layers import AttentionLayer, Reach
from cache.pages.packed import PackedStep
from cache.pages.pool import Page
from cache.pages.session import SessionCache
from scheduler.parallel.rank_commands import Ordered, PackedForward
from scheduler.parallel.session_view import SessionViews, SessionViewSender

SIZE = 4
TIER = MemoryTier(40, SIZE, torch.device("cpu"))
LAYERS = [
    AttentionLayer(Reach.FULL, None, True),
    AttentionLayer(Reach.SLIDING, 3, True),
    AttentionLayer(Reach.CHUNKED, 5, True),
]


def session(fed: int, owed: int, slots: list[int]) -> SessionCache:
    """Tokens ``fed`` and ``owed``, on these pages."""
    made = session_of(range(fed + owed), owed)
    made.pages = [Page(TIER, slot) for slot in slots]
    return made


def told(step: PackedForward) -> PackedForward:
    arrived = msgspec.msgpack.decode(msgspec.msgpack.encode(step), type=Ordered)
    assert isinstance(arrived, PackedForward)
    return arrived


def same(work: list[tuple[SessionCache, int]], echoed: list[tuple[SessionCache, int]]) -> None:
    """Two steps of the same layout."""
    here, there = PackedStep(work, TIER), PackedStep(echoed, TIER)
    assert torch.equal(here.token_ids, there.token_ids)
    assert torch.equal(here.positions, there.positions)
    assert torch.equal(here.write_index, there.write_index)
    for layer in LAYERS:
        assert torch.equal(here.gather_index(layer), there.gather_index(layer))
        for number, (mine, other) in enumerate(zip(here.spans, there.spans, strict=True)):
            assert torch.equal(here.pages(mine, layer), there.pages(other, layer))
            first = layer.first_key(mine.start)
            one, two = here.mask(number, layer, first), there.mask(number, layer, first)
            assert (one is None and two is None) or (one is not None and two is not None and torch.equal(one, two))


def test_steps_are_the_same_at_both_ends() -> None:
    teller, echoes = SessionViewSender(), SessionViews()
    a, b, c = session(5, 3, [7, 2]), session(0, 6, [1, 30]), session(9, 1, [4, 5, 6])
    c.hide(2, 6)
    for work in ([(a, 2), (b, 6)], [(b, 0), (c, 1), (a, 1)], [(c, 1)]):
        work = [(one, count) for one, count in work if count]
        same(work, echoes.work(told(teller.step(work, [0]))))
        for one, count in work:
            one.token_ids.append(77)
            one.on_fed(count)


def test_the_near_parts_of_pages_are_told_too() -> None:
    teller, echoes = SessionViewSender(), SessionViews()
    teller.divided = True
    a, b = session(5, 3, [7, 2]), session(3, 9, [1, 30, 31])
    for at, page in enumerate((*a.pages, *b.pages)):
        page.near = 20 + at
    for _ in range(2):
        echoed = echoes.work(told(teller.step([(a, 1), (b, 2)], [0])))
        for (mine, _), (there, _) in zip([(a, 1), (b, 2)], echoed, strict=True):
            assert there.near_slots.tolist() == mine.near_slots.tolist()
            assert there.slots.tolist() == mine.slots.tolist()
        a.pages[0].near = -1
        a.on_pages_moved()
    assert a.near_slots[0] == -1


def test_a_page_table_is_told_when_it_has_changed() -> None:
    teller, echoes = SessionViewSender(), SessionViews()
    a, b = session(5, 3, [7, 2]), session(3, 9, [1, 30, 31])
    first = teller.step([(a, 1), (b, 1)], [1])
    assert sorted(first.tables) == [0, 1]
    assert np.frombuffer(first.keep, np.int64).tolist() == [1]
    echoes.work(told(first))
    assert teller.step([(a, 1), (b, 1)], [0]).tables == {}
    b.pages[2] = Page(TIER, 9)
    b.on_pages_moved()
    second = teller.step([(a, 1), (b, 2)], [0])
    assert list(second.tables) == [1]
    same([(a, 1), (b, 2)], echoes.work(told(second)))
    third = teller.step([(b, 2)], [0])  # another place in the batch
    assert list(third.tables) == [0]
    same([(b, 2)], echoes.work(told(third)))


def test_the_side_of_a_threshold_is_told() -> None:
    a = session(5, 3, [7, 2])
    a.long = True
    [(echo, count)] = SessionViews().work(told(SessionViewSender().step([(a, 2)], [0])))
    assert (echo.long, echo.length, count) == (True, 5, 2)
