"""Budgets in bytes become pages."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cache.memory.memory_tier import PageShape
from cache.pages.layers import AttentionLayer, Reach, Windows
from cache.pages.pool import PagePool
from scheduler import cgroups
from scheduler.cgroups import physical_memory
from scheduler.engine_config import EngineConfig
from scheduler.model import memory
from scheduler.model.memory import TooSmall, build_store

CPU = torch.device("cpu")
SHAPES = {0: PageShape(2, 8, 2, 8, torch.float32), 1: PageShape(1, 4, 1, 12, torch.bfloat16)}
PAGE = 16
PAGE_BYTES = 16 * (2 * 2 * 8 * 4 + (4 + 12) * 2)


def build(
    budgets: EngineConfig,
    shapes: dict[int, PageShape] = SHAPES,
    stateful: bool = False,
    state: Any = None,
    device: torch.device = CPU,
    windows: Windows | None = None,
) -> PagePool:
    """The pool for a model whose layers store ``shapes``."""
    token_bytes = sum(shape.nbytes for shape in shapes.values())
    mode = SimpleNamespace(stateful=stateful, caches=True)
    verdict: Any = SimpleNamespace(mode=mode, shapes=shapes, token_bytes=token_bytes, skeleton=state, windows=windows)
    store = build_store(budgets, verdict, PAGE, device)
    assert store.stateful is stateful
    return store.pool


def config(kv: int | None = None, host: int | None = None) -> EngineConfig:
    """A configuration with these budgets."""
    return EngineConfig("", "", kv_memory=kv, host_memory=host)


@pytest.mark.parametrize(("budget", "pages"), [(4 * PAGE_BYTES, 4), (11 * PAGE_BYTES - 1, 10), (11 * PAGE_BYTES, 11)])
def test_as_many_whole_pages_as_the_budget_holds(budget: int, pages: int) -> None:
    pool = build(config(budget, budget))
    assert (pool.device.slots, pool.host.slots) == (pages, pages)
    for tier in (pool.device, pool.host):
        stored = sum(t.nbytes for t in (*tier.keys.values(), *tier.values.values()))
        assert stored == pages * PAGE_BYTES <= budget


NEAR = Windows(frozenset({0, 1, 2}), (AttentionLayer(Reach.SLIDING, 64, True),))
ALIKE = dict.fromkeys(range(4), PageShape(2, 8, 2, 8, torch.float32))


def test_a_budget_of_pages_in_two_parts_is_that_of_frames() -> None:
    pool = build(config(39 * 4 * 2048, 39 * 4 * 2048), ALIKE, windows=NEAR)
    assert pool.windows is NEAR
    for tier in (pool.device, pool.host):
        frames = tier.slots
        assert tier.frames.pages(frames) == 39
        pools = tier.pools.values()
        assert max(t.data_ptr() + t.nbytes for t in pools) - min(t.data_ptr() for t in pools) == 39 * 4 * 2048
        assert sum(t.nbytes for t in pools) > 39 * 4 * 2048  # they share it
    assert build(config(40 * 4 * 2048), ALIKE).device.slots == 40


def test_layers_that_cannot_be_divided_keep_pages_of_all_layers() -> None:
    pool = build(config(11 * PAGE_BYTES), windows=Windows(frozenset({0}), NEAR.kinds))
    assert pool.windows is not None or pool.device.slots == 11
    assert (pool.device.slots, pool.windows) == (11, None)


def test_a_budget_for_less_than_four_pages_is_too_small_and_says_what_is_enough() -> None:
    with pytest.raises(TooSmall, match=str(4 * PAGE_BYTES)) as caught:
        build(config(4 * PAGE_BYTES - 1))
    assert "--kv-memory" in str(caught.value)
    assert "\n" not in str(caught.value)
    with pytest.raises(TooSmall):
        build(config(0))


def test_more_than_the_machine_has_is_one_clear_line() -> None:
    with pytest.raises(TooSmall) as caught:
        build(config(10**17), {0: PageShape(1024, 1024, 1024, 1024, torch.float32)})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("most", "physical", "told"),
    [(8, 10**9, "more than can be used"), (100, 9 * PAGE_BYTES, "this machine's memory"), (100, 10**9, "")],
)
def test_a_budget_that_cannot_be_used_whole_is_told_in_one_line(
    most: int, physical: int, told: str, monkeypatch: pytest.MonkeyPatch, said: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(memory, "_MOST", most)
    monkeypatch.setattr(memory, "physical_memory", lambda: physical)
    build(config(20 * PAGE_BYTES))
    lines = [record.getMessage() for record in said.records if "--kv-memory" in record.getMessage()]
    assert len(lines) == bool(told)
    assert told in "".join(lines)


def test_a_gpu_s_host_tier_is_never_more_than_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "physical_memory", lambda: 100 * PAGE_BYTES)
    with pytest.raises(TooSmall, match=f"{101 * PAGE_BYTES} for its host tier"):
        build(config(10 * PAGE_BYTES, 101 * PAGE_BYTES), device=torch.device("cuda"))


def test_there_is_no_host_tier_on_a_cpu_unless_asked_for() -> None:
    pool = build(config(10 * PAGE_BYTES))
    assert pool.host.slots == 0


def test_the_default_is_a_quarter_of_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "physical_memory", lambda: 100 * PAGE_BYTES)
    assert build(config()).device.slots == 25


def test_a_container_s_limit_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroups, "memory_limit", lambda: None)
    whole = physical_memory()
    assert whole > 0
    for limit, counts in ((1048576, 1048576), (whole * 10, whole)):
        monkeypatch.setattr(cgroups, "memory_limit", lambda limit=limit: limit)
        assert physical_memory() == counts


def test_where_sessions_have_states_too_pages_take_half() -> None:
    assert build(config(20 * PAGE_BYTES), stateful=True).device.slots == 10


def test_a_budget_that_holds_no_session_is_refused() -> None:
    state = {"recurrent": torch.zeros(1000)}  # 4,000 bytes, kept three times
    build(config(24_000), stateful=True, state=state)
    with pytest.raises(TooSmall, match="24000"):
        build(config(23_999), stateful=True, state=state)
