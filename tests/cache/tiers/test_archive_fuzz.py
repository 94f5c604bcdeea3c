"""Random walks over the tiers below memory, see ``archive_walk``; what they find gets a test of its own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from archive_walk import Walk
from wide import widely

NAMES = ["llama", "gemma3", "longrope", "qwen3_next", "jamba", "rwkv"]


def walk(name: str, seed: int, steps: int, folder: Path, patch: pytest.MonkeyPatch) -> None:
    """One walk; descriptors that it leaves open are a leak."""
    before = len(os.listdir("/proc/self/fd"))
    taken = Walk(seed, name, folder, patch, remote=seed % 2 == 1)
    taken.go(steps)
    taken.end()
    assert len(os.listdir("/proc/self/fd")) <= before + 1


@pytest.mark.parametrize("name", widely(NAMES, "llama qwen3_next"))
def test_a_random_walk(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    walk(name, NAMES.index(name), 50, tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("name", NAMES)
def test_a_long_random_walk(name: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    walk(name, 100 + seed, 400, tmp_path, monkeypatch)
