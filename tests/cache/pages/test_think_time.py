"""Histograms of think times: quantiles, what is learned, what ages, and the rate by which sessions are ranked."""

from __future__ import annotations

import random

import pytest

from cache.pages.think_time import PRIORS, GapHistogram, ThinkTimes, prior
from cache.tier import StopKind


def test_a_prior_has_the_published_quantiles() -> None:
    answers = PRIORS[StopKind.ANSWER]
    assert 84 <= answers.quantile(0.5) <= 84 * 2**0.5
    assert 1236 <= answers.quantile(0.9) <= 1236 * 2**0.5
    assert 13.6 <= PRIORS[StopKind.TOOL].quantile(0.9) <= 13.6 * 2**0.5


def test_observations_replace_the_prior() -> None:
    gaps = PRIORS[StopKind.TOOL].copy()
    for _ in range(200):
        gaps.observe(100.0)
    assert 100 <= gaps.quantile(0.5) <= 100 * 2**0.5
    assert gaps.rate(80.0) > gaps.rate(1.0) > 0  # the hundredth second comes nearer
    assert gaps.rate(80.0) > 4 * gaps.rate(200.0)
    for _ in range(400):
        gaps.observe(2.0)
    assert gaps.quantile(0.9) < 3


def test_what_is_not_seen_counts_for_longer_gaps() -> None:
    gaps = PRIORS[StopKind.ANSWER].copy()
    before = gaps.rate(0.0)
    for _ in range(100):
        gaps.observe_longer(3600.0)
    assert gaps.quantile(0.5) > 3600
    assert gaps.rate(0.0) < before / 3
    gaps.observe_longer(1e9)  # later than all bins


def brute_force(gaps: GapHistogram, at: int) -> float:
    """The best ratio of returns to seconds held, over all ends."""
    ends = [0.25 * 2 ** (n / 2) for n in range(40)]
    best = returns = seconds = 0.0
    left = sum(gaps._weights[at:])
    for n in range(at, 40):
        weight = gaps._weights[n]
        seconds += (left - weight / 2) * (ends[n] - (ends[n - 1] if n else 0.0))
        returns += weight
        left -= weight
        best = max(best, returns / seconds) if seconds else best
    return best


@pytest.mark.parametrize("seed", range(5))
def test_the_rate_is_the_best_over_all_times_of_holding(seed: int) -> None:
    rng = random.Random(seed)
    gaps = PRIORS[rng.choice(list(StopKind))].copy()
    for _ in range(60):
        gaps.observe(rng.choice([0.3, 1, 7, 100, 5000]) * rng.uniform(0.7, 1.4))
    gaps._rates = None
    for at in range(40):
        age = 0.25 * 2 ** (at / 2) * 0.999
        assert gaps.rate(age) == pytest.approx(brute_force(gaps, at))


def test_a_short_pause_ranks_before_a_long_one() -> None:
    rates = {kind: PRIORS[kind].rate(1.0) for kind in StopKind}
    assert rates[StopKind.TOOL] > rates[StopKind.ANSWER] > rates[StopKind.SIDE]
    late = {kind: PRIORS[kind].late for kind in StopKind}
    assert late[StopKind.TOOL] < late[StopKind.ANSWER]


def test_a_new_tool_begins_with_what_is_known_of_the_tenants_tools() -> None:
    times = ThinkTimes()
    for _ in range(300):
        times.of("a").kinds[StopKind.TOOL].observe(50.0)
    assert times.of("a").tool("build").quantile(0.5) > 40
    assert times.of("b").tool("build").quantile(0.5) < 1


def test_names_of_tools_and_tenants_are_bounded() -> None:
    times = ThinkTimes()
    for number in range(1000):
        times.of(str(number))
        times.of("a").tool(str(number))
    assert len(times) <= 256
    assert len(times.of("a")._tools) <= 32
    times.of("a").tool("999").observe(3.0)
    assert times.of("a").tool("999").weight > times.of("a").tool("998").weight - 1


def test_a_prior_without_returns_is_never_worth_holding() -> None:
    gaps = prior((0.5, 1.0), (1.0, 2.0), returning=0.0)
    assert gaps.rate(0.0) == 0.0
    assert gaps.quantile(0.5) == 0.25
