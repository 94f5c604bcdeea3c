"""``StepCosts``: the cost of steps by the tokens that they feed."""

from __future__ import annotations

import pytest

from scheduler.core.step_costs import StepCosts


def test_costs_are_those_of_the_steps_that_ran() -> None:
    costs = StepCosts()
    for _ in range(40):
        for tokens, seconds in ((1, 0.010), (5, 0.012), (9, 0.020)):
            costs.record(tokens, seconds)
    assert costs.relative(5) == pytest.approx(1.2, abs=0.02)
    assert costs.relative(9) == pytest.approx(2.0, abs=0.04)
    assert costs.relative(5) < costs.relative(7) < costs.relative(9) < costs.relative(16)


def test_ratios_stay_when_everything_becomes_slower() -> None:
    costs = StepCosts()
    for _ in range(40):
        costs.record(1, 0.010)
        costs.record(8, 0.015)
    for _ in range(20):
        costs.record(8, 0.030)  # histories have grown, or another program runs
    assert 1.3 < costs.relative(8) < 2.6
    costs.record(1, 0.020)
    assert costs.relative(1) == 1.0


def test_nothing_is_learnt_from_what_is_no_measure() -> None:
    costs = StepCosts()
    before = costs.relative(8)
    costs.record(0, 1.0)
    costs.record(100, 1.0)
    costs.record(8, 0.0)
    assert costs.relative(8) == before
