"""The unit for systemd: what systemd says of it, and held against the server that it starts."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from deploy_kit import DEPLOY, OTHERS, SETTINGS, longest_stop

from server.config.command_line import parse
from server.config.serve_options import ServeConfig

UNIT = DEPLOY / "systemd" / "warmturn.service"
PROGRAM = "/opt/warmturn/.venv/bin/warmturn"
CACHES = {"HF_HOME", "XDG_CACHE_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"}


def settings() -> dict[str, list[str]]:
    """Each setting's values, in their order."""
    found: dict[str, list[str]] = {}
    for line in UNIT.read_text().splitlines():
        if line and line[0] not in "#[":
            name, _, value = line.partition("=")
            found.setdefault(name, []).append(value)
    return found


def only(name: str) -> str:
    [value] = settings()[name]
    return value


def environment() -> dict[str, str]:
    return dict(each.split("=", 1) for each in settings()["Environment"])


def verified(folder: Path, text: str) -> str:
    """What systemd finds wrong with a unit of that text."""
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("systemd-analyze is not installed: Debian's package is systemd")
    file = folder / UNIT.name
    file.write_text(text.replace(PROGRAM, "/bin/true"))
    ran = subprocess.run([program, "verify", "--man=no", str(file)], capture_output=True, text=True, check=False)
    lines = (ran.stdout + ran.stderr).splitlines()
    return "\n".join(line for line in lines if UNIT.name in line)  # not what it says of this machine


def test_systemd_takes_it(tmp_path: Path) -> None:
    assert verified(tmp_path, UNIT.read_text()) == ""


def test_systemd_would_have_found_a_fault(tmp_path: Path) -> None:
    assert "KillMod" in verified(tmp_path, UNIT.read_text().replace("KillMode", "KillMod"))


def test_what_it_starts_is_a_server() -> None:
    program, *arguments = only("ExecStart").split()
    assert program == PROGRAM
    assert isinstance(parse([environment().get(each.removeprefix("$"), each) for each in arguments]), ServeConfig)
    given = environment()
    assert set(given) <= {*SETTINGS, *OTHERS, *CACHES, "MODEL"}
    assert ServeConfig(**{SETTINGS[name]: value for name, value in given.items() if name in SETTINGS})  # type: ignore[arg-type]


def test_it_has_the_time_that_it_takes_to_stop() -> None:
    assert longest_stop(environment()["WARMTURN_DRAIN_SECONDS"]) < int(only("TimeoutStopSec"))


def test_the_server_ends_its_engine_itself() -> None:
    """A SIGTERM to all processes would end turns that run; an engine that dies comes back."""
    assert only("KillMode") == "mixed"
    assert only("OOMPolicy") == "continue"


def test_it_may_write_where_the_server_writes_and_keeps_it_to_itself() -> None:
    given = environment()
    assert given["WARMTURN_DATA_DIR"] == f"/var/lib/{only('StateDirectory')}"
    cache = f"/var/cache/{only('CacheDirectory')}"
    assert all(given[name] == cache or given[name].startswith(f"{cache}/") for name in CACHES)
    assert (only("ProtectSystem"), only("StateDirectoryMode"), only("UMask")) == ("strict", "0700", "0077")
    assert not [name for name in given if "KEY" in name]  # units are for everybody to read
