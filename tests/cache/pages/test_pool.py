"""Pages: counted, shared, stranded, moved."""

from __future__ import annotations

import torch

from cache.memory.memory_tier import MemoryTier
from cache.pages.pool import Page, PagePool

CPU = torch.device("cpu")
SIZE = 2


def pool_of(device: int = 4, host: int = 4) -> PagePool:
    return PagePool(MemoryTier(device, SIZE, CPU), MemoryTier(host, SIZE, CPU))


def fill(pool: PagePool, page: Page, number: float) -> None:
    """Write ``number`` all over a device page."""
    data = torch.full((1, 1, SIZE, 1), number)
    pool.device.write(0, torch.arange(SIZE) + page.slot * SIZE, data, data)


def number_of(page: Page) -> float:
    """The number that a page holds, wherever it lies."""
    keys, _ = page.tier.read(0, torch.tensor([page.slot]))
    assert keys.min() == keys.max()
    return float(keys[0])


def test_a_page_lives_until_its_last_holder_drops_it() -> None:
    pool = pool_of()
    page = pool.alloc()
    pool.share([page])
    pool.hold_warm([page])
    pool.drop([page], warm=True)
    assert pool.device.used == 1
    pool.drop([page], warm=True)
    assert pool.device.used == 0
    assert not pool.stranded


def test_a_page_without_warm_holders_is_stranded_until_it_moves() -> None:
    pool = pool_of()
    page = pool.alloc()
    fill(pool, page, 5)
    pool.share([page])
    pool.hold_warm([page])
    pool.release_warm([page])
    assert not pool.stranded
    pool.release_warm([page])
    assert list(pool.stranded) == [page]
    pool.hold_warm([page])
    assert not pool.stranded
    pool.release_warm([page])
    pool.demote()
    assert not pool.stranded
    assert page.tier is pool.host
    assert (pool.device.used, pool.host.used) == (0, 1)
    assert pool.off_device([page]) == [page]
    assert number_of(page) == 5


def test_a_warm_holder_that_leaves_strands_the_page_for_a_cold_one() -> None:
    pool = pool_of()
    page = pool.alloc()
    pool.share([page])  # by a session that is not warm
    pool.drop([page], warm=True)
    assert list(pool.stranded) == [page]
    pool.drop([page], warm=False)
    assert not pool.stranded
    assert pool.device.used == 0


def test_pages_come_back_as_they_went() -> None:
    pool = pool_of()
    pages = [pool.alloc() for _ in range(3)]
    for number, page in enumerate(pages):
        fill(pool, page, number)
    pool.release_warm(pages)
    pool.demote()
    others = [pool.alloc() for _ in range(1)]
    for page in others:
        fill(pool, page, 99)
    pool.hold_warm(pages)
    pool.promote(pages)
    assert [number_of(page) for page in pages] == [0, 1, 2]
    assert pool.off_device(pages) == []
    assert (pool.device.used, pool.host.used) == (4, 0)


def test_a_private_copy_leaves_the_original_alone() -> None:
    pool = pool_of()
    page = pool.alloc()
    fill(pool, page, 1)
    pool.share([page])
    pool.hold_warm([page])
    copy = pool.unshare(page)
    fill(pool, copy, 2)
    assert (number_of(page), number_of(copy)) == (1, 2)
    assert (page.refs, page.warm, copy.refs, copy.warm) == (1, 1, 1, 1)


def test_a_private_copy_of_a_page_whose_other_holder_is_cold_strands_the_original() -> None:
    pool = pool_of()
    page = pool.alloc()
    fill(pool, page, 1)
    pool.share([page])  # by a session that is not warm
    pool.unshare(page)
    assert list(pool.stranded) == [page]
