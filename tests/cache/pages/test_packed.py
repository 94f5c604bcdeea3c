"""The layout of a packed step, against a token-by-token account of where things lie and who sees whom."""

from __future__ import annotations

import random
import weakref

import pytest
import torch
from session_kit import session_of

from cache.attention.cpu import CpuPlan
from cache.memory.memory_tier import MemoryTier, PageShape
from cache.memory.memory_tier import divide as divided_as
from cache.pages.layers import AttentionLayer, Reach
from cache.pages.packed import PackedCache, PackedStep
from cache.pages.pool import Page
from cache.pages.session import SessionCache

CPU = torch.device("cpu")
SIZE = 4
KINDS = [
    AttentionLayer(Reach.FULL, None, stores=True),
    AttentionLayer(Reach.SLIDING, 5, stores=True),
    AttentionLayer(Reach.SLIDING, 1, stores=True),
    AttentionLayer(Reach.CHUNKED, 6, stores=True),
]
WORK = [(0, 3), (9, 1), (7, 6), (4, 4)]  # tokens cached, tokens new


def sessions_on(tier: MemoryTier, work: list[tuple[int, int]]) -> list[tuple[SessionCache, int]]:
    """A session for each entry of ``work``, its pages scattered; token ids are 100 * session + position."""
    slots = list(range(tier.slots))
    random.Random(3).shuffle(slots)
    out = []
    for number, (cached, new) in enumerate(work):
        session = session_of(range(100 * number, 100 * number + cached + new), new)
        session.pages = [Page(tier, slots.pop()) for _ in range(-(-(cached + new) // SIZE))]
        out.append((session, new))
    return out


def place(session: SessionCache, position: int) -> int:
    """Where a position lies in the tier's flat memory."""
    return session.pages[position // SIZE].slot * SIZE + position % SIZE


def sees(layer: AttentionLayer, query: int, key: int) -> bool:
    """The definition of the three kinds, for one pair."""
    if key > query:
        return False
    if layer.reach is Reach.SLIDING:
        assert layer.window is not None
        return query - key < layer.window
    if layer.reach is Reach.CHUNKED:
        assert layer.window is not None
        return query // layer.window == key // layer.window
    return True


def test_tokens_lie_one_after_the_other_with_their_own_positions() -> None:
    tier = MemoryTier(20, SIZE, CPU)
    work = sessions_on(tier, WORK)
    step = PackedStep(work, tier)
    assert step.tokens == 14
    assert step.positions.tolist() == [[0, 1, 2, 9, 7, 8, 9, 10, 11, 12, 4, 5, 6, 7]]
    assert step.token_ids.tolist() == [[0, 1, 2, 109, 207, 208, 209, 210, 211, 212, 304, 305, 306, 307]]
    assert [(s.row, s.size, s.start, s.stop) for s in step.spans] == [
        (0, 3, 0, 3),
        (3, 1, 9, 10),
        (4, 6, 7, 13),
        (10, 4, 4, 8),
    ]
    wanted = [place(session, at) for session, new in work for at in range(session.length, session.length + new)]
    assert step.write_index.tolist() == wanted


@pytest.mark.parametrize("divided", [False, True])
def test_a_step_that_follows_another_is_as_if_made_anew(divided: bool) -> None:
    """Over borders of pages, and with slots that change between two steps."""
    shapes = dict.fromkeys(range(4), PageShape(1, 4, 1, 4, torch.float32))
    division = divided_as(shapes, {1, 2, 3} if divided else (), SIZE)
    tier = MemoryTier(60, SIZE, CPU, shapes, division=division)
    work = sessions_on(tier, [(9, 1), (6, 1), (3, 1)])
    for session, _ in work:
        session.token_ids.extend(range(7, 27))
        session.pages = [Page(tier, tier.alloc(), tier.alloc(near=True) if divided else -1) for _ in range(9)]
        session.on_pages_moved()
    step = PackedStep(work, tier)
    for number in range(10):
        plans = [CpuPlan(step, layer, step.numbers) for layer in KINDS]
        step.plans = {"other": object(), **dict(enumerate(plans))}
        step.gather_index(KINDS[0]), step.mask(0, KINDS[1], 0)
        assert step.release()
        for session, _ in work:
            session.on_fed(1)
        if number == 5:
            first, *_, last = work[1][0].pages
            first.slot, last.slot = last.slot, first.slot
            work[1][0].on_pages_moved()
        assert step.follow(work)
        anew = PackedStep(work, tier)
        for name in ("token_ids", "positions", "write_index", "near_write_index"):
            assert torch.equal(getattr(step, name), getattr(anew, name)), name
        assert [*step.plans.values()] == plans
        for layer, plan in zip(KINDS, plans, strict=True):
            wanted = CpuPlan(anew, layer, anew.numbers)
            assert plan._spans.tolist() == wanted._spans.tolist()
            assert plan._first.tolist() == wanted._first.tolist()
            assert torch.equal(step.gather_index(layer), anew.gather_index(layer))
        new, old = (one.mask(0, KINDS[1], 0) for one in (anew, step))
        assert new is not None
        assert old is not None
        assert torch.equal(new, old)


def test_only_steps_that_decode_the_same_sessions_follow() -> None:
    tier = MemoryTier(40, SIZE, CPU)
    work = sessions_on(tier, [(9, 1), (6, 1), (3, 2)])
    (one, _), (other, _), (third, _) = work
    assert not PackedStep(work, tier).release()
    step = PackedStep([(one, 1), (other, 1)], tier)
    assert step.release()
    before = step.token_ids.clone()
    assert not step.follow([(one, 1)])
    assert not step.follow([(other, 1), (one, 1)])
    assert not step.follow([(one, 1), (third, 1)])
    assert not step.follow([(one, 1), (other, 2)])
    one.hide(2, 3)
    assert not step.follow([(one, 1), (other, 1)])
    assert torch.equal(step.token_ids, before)
    assert not PackedStep([(one, 1)], tier).release()
    adapted = PackedStep([(other, 1)], tier)
    adapted.adapted = object()
    assert not adapted.release()


def test_a_step_that_is_over_holds_no_session_and_no_tensor_of_a_layer() -> None:
    """Both may be large, and the next step may be long in coming."""
    shapes = {0: PageShape(1, 4, 1, 4, torch.float32)}
    tier = MemoryTier(40, SIZE, CPU, shapes)
    work = sessions_on(tier, [(9, 1)])
    step = PackedStep(work, tier)
    step.plans = {"plan": CpuPlan(step, KINDS[1], step.numbers), "other": object()}
    cache = PackedCache(KINDS[:1], step, frozenset())
    keys, _ = cache.update(torch.ones(1, 1, 1, 4), torch.ones(1, 1, 1, 4), 0)
    step.mask(0, KINDS[1], 0), step.gather_index(KINDS[0])
    held = [weakref.ref(it) for it in (work[0][0], keys)]
    assert step.release()
    del work, keys, cache
    assert [it() for it in held] == [None, None]
    assert [*step.plans] == ["plan"]


@pytest.mark.parametrize("layer", KINDS, ids=str)
def test_keys_that_are_gathered_are_those_that_are_seen(layer: AttentionLayer) -> None:
    tier = MemoryTier(20, SIZE, CPU)
    work = sessions_on(tier, WORK)
    step = PackedStep(work, tier)
    wanted = []
    for session, new in work:
        start, stop = session.length, session.length + new
        lowest = min(k for q in range(start, stop) for k in range(q + 1) if sees(layer, q, k))
        wanted += [place(session, at) for at in range(lowest, stop)]
    assert step.gather_index(layer).tolist() == wanted
    for span in step.spans:
        first = step.first_page(span, layer)
        slots = [page.slot for page in span.session.pages[first : -(-span.stop // SIZE)]]
        assert step.pages(span, layer).tolist() == slots
        assert first * SIZE <= layer.first_key(span.start) < (first + 1) * SIZE


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("layer", KINDS, ids=str)
def test_masks_pair_by_pair(layer: AttentionLayer, aligned: bool) -> None:
    tier = MemoryTier(20, SIZE, CPU)
    work = sessions_on(tier, WORK)
    work[1][0].hide(2, 4)
    work[2][0].hide(5, 6)
    step = PackedStep(work, tier)
    for number, span in enumerate(step.spans):
        first = layer.first_key(span.start)
        if aligned:
            first = step.first_page(span, layer) * SIZE
        hidden = {1: {2, 3}, 2: {5}}.get(number, set())
        wanted = [
            [sees(layer, query, key) and key not in hidden for key in range(first, span.stop)]
            for query in range(span.start, span.stop)
        ]
        mask = step.mask(number, layer, first)
        if mask is None:
            assert all(all(row) for row in wanted)
        else:
            assert mask.tolist() == wanted


def test_one_new_token_that_sees_all_of_its_keys_needs_no_mask() -> None:
    tier = MemoryTier(20, SIZE, CPU)
    step = PackedStep(sessions_on(tier, [(9, 1)]), tier)
    assert step.mask(0, KINDS[0], 0) is None
    assert step.mask(0, KINDS[1], 5) is None
    assert step.mask(0, KINDS[1], 4) is not None


@pytest.mark.parametrize("in_place", [False, True])
def test_update_writes_new_tokens_and_returns_what_the_layer_looks_at(in_place: bool) -> None:
    tier = MemoryTier(20, SIZE, CPU)
    work = sessions_on(tier, WORK)
    numbers = {}  # what lies where: 1000 * session + position
    for number, (session, _) in enumerate(work):
        for at in range(session.length):
            tier.write(1, torch.tensor([place(session, at)]), *numbered([1000.0 * number + at]))
            numbers[place(session, at)] = 1000.0 * number + at
    step = PackedStep(work, tier)
    cache = PackedCache(KINDS, step, frozenset({1}) if in_place else frozenset())
    new = [1000.0 * n + at for n, (s, count) in enumerate(work) for at in range(s.length, s.length + count)]
    key, value = numbered(new)
    got_key, got_value = cache.update(key, value, 1)
    numbers |= dict(zip(step.write_index.tolist(), new, strict=True))
    flat = tier.keys[1].flatten(0, 1)[:, 0, 0]
    assert {at: float(flat[at]) for at in numbers} == numbers
    assert (got_key is key) is in_place
    assert (got_value is value) is in_place
    if not in_place:
        wanted = [numbers[at] for at in step.gather_index(KINDS[1]).tolist()]
        assert got_key[0, 0, :, 0].tolist() == wanted
        assert got_value[0, 0, :, 0].tolist() == [-number for number in wanted]
    assert step.origins[id(got_key)][0] == 1


def numbered(numbers: list[float]) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V ``[1, 1, T, 1]`` that hold these numbers and their opposites."""
    data = torch.tensor(numbers).reshape(1, 1, -1, 1)
    return data, -data


def test_a_model_that_wants_a_mask_from_the_cache_is_told_that_there_is_none() -> None:
    tier = MemoryTier(20, SIZE, CPU)
    cache = PackedCache(KINDS, PackedStep(sessions_on(tier, WORK), tier), frozenset(), by_row=False)
    assert cache.get_seq_length() == 0
    assert list(cache.is_sliding) == [False, True, True, True]
    with pytest.raises(RuntimeError):
        cache.get_mask_sizes(1, 0)
