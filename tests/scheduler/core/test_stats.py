"""What the engine counts for /metrics, beside what its turns tell."""

from __future__ import annotations

import math
import os
from pathlib import Path

from engine_kit import Kit

from cache.inventory import count_reclaimable
from cache.tier import Tier

PROMPTS = [[20 * n + token for token in range(10)] for n in range(6)]


def test_an_engine_says_which_process_it_is() -> None:
    assert Kit().engine.stats().pid == os.getpid()


def test_sessions_are_counted_by_the_tier_that_they_leave(tmp_path: Path) -> None:
    probe = Kit(folder=tmp_path / "probe")
    probe.ask(PROMPTS[0], 6, session="0")
    probe.settle()
    one = probe.archive.disk.space.used
    kit = Kit(pages=6, host_pages=5, folder=tmp_path / "kv", disk_space=3 * one + one // 2)
    for number, prompt in enumerate(PROMPTS):
        kit.ask(prompt, 6, session=str(number))
        kit.settle()
    stats = kit.engine.stats()
    assert stats.disk_saves == len(PROMPTS)
    device, host, disk = (stats.tier(tier).evictions for tier in (Tier.DEVICE, Tier.HOST, Tier.DISK))
    assert disk == len(PROMPTS) - 3 == len(PROMPTS) - stats.disk_sessions
    assert device > host > 0
    assert device - host < len(PROMPTS)


def test_pages_are_reclaimable_once_they_are_on_disk_and_nobody_else_holds_them(tmp_path: Path) -> None:
    kit = Kit(folder=tmp_path)
    kit.ask([*PROMPTS[0], 7], 6, session="n")  # 16 tokens in four pages
    assert count_reclaimable(kit.store) == 0  # nothing is written yet
    kit.settle()
    kit.engine._counters.looked_at = -math.inf
    assert count_reclaimable(kit.store) == kit.engine.stats().reclaimable_pages == 4
    kit.send([*PROMPTS[0][:8], 9, 9], 4)
    kit.step()
    assert count_reclaimable(kit.store) == 2  # a running turn shares the others
    assert count_reclaimable(Kit().store) == 0  # no disk
    kit.run()
    kit.leave()


def test_without_a_host_tier_nobody_leaves_it() -> None:
    kit = Kit(pages=6)
    for prompt in PROMPTS:
        kit.ask(prompt, 6)
    stats = kit.engine.stats()
    assert stats.tier(Tier.DEVICE).evictions > 0
    assert stats.tier(Tier.HOST).evictions == 0


def test_the_size_of_the_remote_tier_is_told_where_it_has_one(tmp_path: Path) -> None:
    url = (tmp_path / "far").as_uri()
    sized = Kit(folder=tmp_path / "a", remote=url, remote_space=1 << 20)
    assert sized.engine.stats().tier(Tier.REMOTE).capacity == 1 << 20
    assert Kit(folder=tmp_path / "b", remote=url).engine.stats().tier(Tier.REMOTE).capacity == 0
