"""Load or compute."""

from __future__ import annotations

from cache.tiers.pace import Pace


def test_what_was_never_measured_is_tried() -> None:
    pace = Pace()
    assert pace.prefers_loading(10**12, 1)
    pace.loaded(100, 1.0)
    assert pace.prefers_loading(10**12, 1)


def test_the_faster_way_is_taken() -> None:
    pace = Pace()
    pace.loaded(1000, 1.0)  # 1 ms a byte
    pace.computed(10, 1.0)  # 100 ms a token
    assert pace.prefers_loading(1000, 10)
    assert pace.prefers_loading(500, 10)
    assert not pace.prefers_loading(1200, 10)


def test_large_measurements_outweigh_the_fixed_cost_of_small_ones() -> None:
    pace = Pace()
    pace.computed(1000, 1.0)
    pace.loaded(10_000_000, 0.1)
    for _ in range(3):
        pace.loaded(1000, 0.002)
    assert pace.prefers_loading(10_000_000, 500)


def test_a_slow_disk_is_tried_again() -> None:
    pace = Pace()
    pace.loaded(1000, 100.0)
    pace.computed(10, 1.0)
    tries = [pace.prefers_loading(1000, 10) for _ in range(100)]
    assert not tries[0]
    assert tries[-1]
