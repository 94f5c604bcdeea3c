"""A tier keeps what is written to it, page by page."""

from __future__ import annotations

import random

import pytest
import torch

from cache.memory import huge
from cache.memory.memory_tier import MemoryTier, PageShape

CPU = torch.device("cpu")
SIZE = 4


def test_bytes_per_token_count_keys_and_values_of_their_own_widths() -> None:
    assert PageShape(2, 16, 2, 16, torch.float32).nbytes == 2 * 2 * 16 * 4
    assert PageShape(1, 24, 3, 8, torch.bfloat16).nbytes == (24 + 24) * 2


def test_values_that_are_in_the_keys_take_no_memory_and_move_with_them() -> None:
    shape = PageShape(1, 6, 1, 4, torch.float32, joined=True)
    assert shape.pools == (6 * 4,)
    here, there = (MemoryTier(3, 2, torch.device("cpu"), shapes) for shapes in ({0: shape}, None))
    rows = torch.randn(4, 6)
    here.write_rows(0, torch.tensor([2, 3, 4, 5]), rows, 4)
    there.copy_from(here, [1, 2], [0, 2])
    keys, values = there.read(0, torch.tensor([0, 2]))
    assert torch.equal(keys[:, 0], rows)
    assert torch.equal(values[:, 0], rows[:, :4])
    assert there.token_shapes == {"0.key": ((1, 6), "float32")}
    assert there.token_bytes == 24


def test_every_slot_is_given_out_once() -> None:
    tier = MemoryTier(5, SIZE, CPU)
    slots = [tier.alloc() for _ in range(5)]
    assert sorted(slots) == [0, 1, 2, 3, 4]
    assert (tier.free, tier.used) == (0, 5)
    with pytest.raises(IndexError):
        tier.alloc()
    tier.release(slots[2])
    assert (tier.free, tier.used) == (1, 4)
    assert tier.alloc() == slots[2]


def test_what_is_written_is_read_back() -> None:
    tier = MemoryTier(6, SIZE, CPU)
    rng = torch.Generator().manual_seed(1)
    wanted: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
    order = random.Random(1)
    for _ in range(20):
        for layer, (heads, dim, value_heads, value_dim) in {0: (2, 8, 2, 8), 3: (1, 6, 2, 5)}.items():
            index = torch.tensor(order.sample(range(6 * SIZE), 7))
            key = torch.randn(1, heads, 7, dim, generator=rng)
            value = torch.randn(1, value_heads, 7, value_dim, generator=rng)
            tier.write(layer, index, key, value)
            for at, place in enumerate(index.tolist()):
                wanted[layer, place] = (key[0, :, at], value[0, :, at])
    for layer in (0, 3):
        table = torch.tensor([4, 1, 5])
        keys, values = tier.read(layer, table)
        assert keys.shape[0] == values.shape[0] == 3 * SIZE
        for at in range(3 * SIZE):
            place = int(table[at // SIZE]) * SIZE + at % SIZE
            if (layer, place) in wanted:
                assert torch.equal(keys[at], wanted[layer, place][0])
                assert torch.equal(values[at], wanted[layer, place][1])


def test_the_shape_is_learned_from_the_first_write_or_given() -> None:
    learned = MemoryTier(2, SIZE, CPU)
    assert learned.shapes == {}
    key, value = torch.zeros(1, 3, 1, 5), torch.zeros(1, 2, 1, 7)
    learned.write(1, torch.tensor([0]), key.bfloat16(), value.bfloat16())
    shape = learned.shapes[1]
    assert shape == PageShape(3, 5, 2, 7, torch.bfloat16)
    given = MemoryTier(2, SIZE, CPU, {1: shape})
    assert given.keys[1].shape == (2, SIZE, 3, 5)
    assert given.values[1].shape == (2, SIZE, 2, 7)
    scratch = MemoryTier(2, SIZE, CPU, {1: shape}, scratch=True)
    assert scratch.values[1].shape == (3, SIZE, 2, 7)
    assert scratch.free == 2


@pytest.mark.parametrize("known", [False, True])
def test_pages_are_copied_between_tiers_and_within_one(known: bool) -> None:
    device = MemoryTier(4, SIZE, CPU)
    for place in range(4 * SIZE):
        filled = torch.full((1, 1, 1, 2), float(place))
        device.write(0, torch.tensor([place]), filled, -filled)
    host = MemoryTier(3, SIZE, CPU, device.shapes if known else None)
    host.copy_from(device, [3, 1], [0, 2])
    keys, values = host.read(0, torch.tensor([0, 2]))
    wanted = torch.tensor([12.0, 13, 14, 15, 4, 5, 6, 7])
    assert torch.equal(keys[:, 0, 0], wanted)
    assert torch.equal(values[:, 0, 1], -wanted)
    device.copy_from(device, [0], [2])
    keys, _ = device.read(0, torch.tensor([0, 2]))
    assert torch.equal(keys[:SIZE], keys[SIZE:])


def test_pages_written_in_inference_mode_can_be_moved_outside_of_it() -> None:
    device, host = MemoryTier(1, SIZE, CPU), MemoryTier(1, SIZE, CPU)
    with torch.inference_mode():
        device.write(0, torch.arange(SIZE), torch.ones(1, 1, SIZE, 2), torch.ones(1, 1, SIZE, 2))
    host.copy_from(device, [0], [0])
    device.copy_from(host, [0], [0])
    assert torch.equal(device.read(0, torch.tensor([0]))[0], torch.ones(SIZE, 1, 2))


def test_pools_of_a_cpu_are_where_huge_pages_begin() -> None:
    tier = MemoryTier(4096, 16, CPU, {0: PageShape(4, 64, 2, 64, torch.float32)})
    assert [pool.nbytes >> 20 for pool in (tier.keys[0], tier.values[0])] == [64, 32]
    assert all(pool.data_ptr() % huge.HUGE == 0 for pool in (tier.keys[0], tier.values[0]))
