"""What cgroups allow: of version 2 and 1, of this process's own and of those around it."""

from __future__ import annotations

from pathlib import Path

import pytest

from scheduler import cgroups

HUGE = "9223372036854771712"  # what version 1 writes where there is no limit


def lie(folder: Path, monkeypatch: pytest.MonkeyPatch, own: str, files: dict[str, str]) -> None:
    """Let the files be those of the system."""
    (folder / "self").write_text(own)
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    monkeypatch.setattr(cgroups, "ROOT", folder)
    monkeypatch.setattr(cgroups, "SELF", folder / "self")


@pytest.mark.parametrize(
    ("own", "files", "allowed"),
    [
        ("0::/service/inner\n", {}, None),
        ("0::/service/inner\n", {"service/cpu.max": "50000 100000\n", "service/inner/cpu.max": "max 100000\n"}, 0.5),
        ("0::/\n", {"cpu.max": "max 100000\n"}, None),
        ("0::/../other\n", {"cpu.max": "150000 100000\n"}, 1.5),
        ("", {"cpu.max": "150000 100000\n"}, 1.5),
        ("0::/\n", {"cpu/cpu.cfs_quota_us": "300000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 3.0),
        (
            "4:cpu,cpuacct:/docker/1f\n",
            {"cpu,cpuacct/cpu.cfs_quota_us": "-1\n", "cpu,cpuacct/cpu.cfs_period_us": "100000\n"},
            None,
        ),
        (
            "4:cpuacct,cpu:/a/b\n0::/\n",
            {"cpuacct,cpu/a/cpu.cfs_quota_us": "200000\n", "cpuacct,cpu/a/cpu.cfs_period_us": "100000\n"},
            2.0,
        ),
    ],
)
def test_processors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str, files: dict[str, str], allowed: float | None
) -> None:
    lie(tmp_path, monkeypatch, own, files)
    assert cgroups.processor_limit() == allowed


@pytest.mark.parametrize(
    ("own", "files", "allowed"),
    [
        ("0::/service/inner\n", {"memory.max": "1048576\n"}, 1 << 20),
        ("0::/service/inner\n", {"memory.max": "max\n", "service/memory.max": "1048576\n"}, 1 << 20),
        ("0::/service\n", {"memory.max": "1048576\n", "service/memory.max": "4096\n"}, 4096),
        ("0::/\n", {"memory.max": "max\n"}, None),
        ("0::/\n", {}, None),
        ("3:memory:/a\n", {"memory/memory.limit_in_bytes": HUGE, "memory/a/memory.limit_in_bytes": "8192\n"}, 8192),
        ("3:memory:/a\n", {"memory/memory.limit_in_bytes": HUGE}, int(HUGE)),
    ],
)
def test_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str, files: dict[str, str], allowed: int | None
) -> None:
    lie(tmp_path, monkeypatch, own, files)
    assert cgroups.memory_limit() == allowed
