"""Load or compute."""

from __future__ import annotations

from cache.tiers.restore_rates import RestoreRates


def test_what_was_never_measured_is_tried() -> None:
    restore_rates = RestoreRates()
    assert restore_rates.prefers_loading(10**12, 1)
    restore_rates.record_load(100, 1.0)
    assert restore_rates.prefers_loading(10**12, 1)


def test_the_faster_way_is_taken() -> None:
    restore_rates = RestoreRates()
    restore_rates.record_load(1000, 1.0)  # 1 ms a byte
    restore_rates.record_compute(10, 1.0)  # 100 ms a token
    assert restore_rates.prefers_loading(1000, 10)
    assert restore_rates.prefers_loading(500, 10)
    assert not restore_rates.prefers_loading(1200, 10)


def test_large_measurements_outweigh_the_fixed_cost_of_small_ones() -> None:
    restore_rates = RestoreRates()
    restore_rates.record_compute(1000, 1.0)
    restore_rates.record_load(10_000_000, 0.1)
    for _ in range(3):
        restore_rates.record_load(1000, 0.002)
    assert restore_rates.prefers_loading(10_000_000, 500)


def test_a_slow_disk_is_tried_again() -> None:
    restore_rates = RestoreRates()
    restore_rates.record_load(1000, 100.0)
    restore_rates.record_compute(10, 1.0)
    tries = [restore_rates.prefers_loading(1000, 10) for _ in range(100)]
    assert not tries[0]
    assert tries[-1]
