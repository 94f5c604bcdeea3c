"""A decode step in memory that stays says of its sessions what a packed step says; and what is sent for it."""

from __future__ import annotations

import pytest
import session_kit
import torch

from cache.attention.decode import DecodeStep, Tables
from cache.attention.self_test import LAYERS
from cache.memory.memory_tier import MemoryTier, PageShape
from cache.memory.memory_tier import divide as divided_as
from cache.pages.packed import PackedStep
from cache.pages.pool import Page
from cache.pages.session import SessionCache

CPU = torch.device("cpu")
SIZE = 4


def tier_of(divided: bool = False) -> MemoryTier:
    shapes = dict.fromkeys(range(5), PageShape(1, 4, 1, 4, torch.float32))
    return MemoryTier(
        40, SIZE, CPU, shapes, scratch=True, division=divided_as(shapes, {0, 1, 3} if divided else (), SIZE)
    )


def session_of(tier: MemoryTier, length: int) -> SessionCache:
    """One that has fed ``length`` tokens, with room for the next, and has released a near part."""
    session = session_kit.session_of(range(100 + length, 201 + 2 * length), 101)
    near = bool(tier.near_layers)
    session.pages = [Page(tier, tier.alloc(), tier.alloc(near=True) if near else -1) for _ in range(length // SIZE + 1)]
    if length > SIZE:
        session.pages[0].near = -1
    return session


@pytest.mark.parametrize("divided", [False, True])
def test_it_is_the_step_of_its_sessions(divided: bool) -> None:
    tier = tier_of(divided)
    sessions = [session_of(tier, length) for length in (0, 7, 12)]
    parts = (False, True) if divided else (False,)
    tables = [Tables(tier, 8, 10, near) for near in parts]
    step = DecodeStep(tier, tables, 4)
    assert tier.scratch is not None
    addresses: set[int] = set()
    for company in (sessions, sessions[::-1], sessions[1:], sessions[:1]):
        step.fill(company)
        want = PackedStep([(session, 1) for session in company], tier)
        n = len(company)
        assert step.token_ids[:, :n].tolist() == want.token_ids.tolist()
        assert step.positions[:, :n].tolist() == want.positions.tolist()
        for layer in (0, 2):
            assert step.write_positions(layer)[:n].tolist() == want.write_positions(layer).tolist()
        # Rows of nobody look at, and write to, what is nobody's.
        assert step.positions[0, n:].tolist() == [0] * (4 - n)
        for table, near, layer in zip(tables, parts, (2, 0), strict=False):
            nobody = tier.scratch[near]
            for row, session in enumerate(company):
                slots = session.near_slots.clip(0) if near else session.slots
                assert table.device[row, : len(slots)].tolist() == slots.tolist()
            assert table.device[n:, 0].tolist() == [nobody] * (8 - n)
            assert step.write_positions(layer)[n:].tolist() == [nobody * SIZE] * (4 - n)
            for pool in (tier.keys[layer], tier.values[layer]):
                assert not pool[nobody].any()  # it is there, and a number
        (plan,) = step.plans.values()
        (launch,) = plan.launches(LAYERS[0], 4, [16, 64], 2, 8)
        assert (launch.tokens, launch.items, launch.merges) == (1, 4 + 2, 4)
        items = launch.work[: 6 * 6].view(6, 6).tolist()
        keys = {span: end for span, row, tokens, begin, end, part in items if tokens}
        assert keys == {row: session.length + 1 for row, session in enumerate(company)} | dict.fromkeys(range(n, 4), 1)
        assert addresses in (set(), {launch.work.data_ptr()})
        addresses.add(launch.work.data_ptr())
        assert [table.data_ptr() for table in plan.tables] == [table.device.data_ptr() for table in tables]
        assert plan.positions.data_ptr() == step.positions.data_ptr()


def test_only_changed_tables_are_sent() -> None:
    tier = tier_of()
    one, two, three = (session_of(tier, length) for length in (3, 9, 15))
    tables = Tables(tier, 8, 10)
    assert tables.fill([one, two], 4) == 2
    assert tables.fill([one, two], 4) == 0
    assert tables.fill([one, two, three], 4) == 1
    two.pages.append(Page(tier, tier.alloc()))
    two.on_pages_moved()
    assert tables.fill([one, two, three], 4) == 1
    assert tables.device[1, :4].tolist() == two.slots.tolist()
    assert tables.fill([two, one, three], 8) == 2
    assert tables.fill([two], 2) == 1  # the second row is nobody's again
    assert tables.device[:3, 0].tolist() == [two.slots[0], tier.slots, three.slots[0]]
    assert tables.fill([two, one, three], 8) == 1
