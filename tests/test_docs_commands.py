"""The commands in docs/operators.md and docs/clients.md run as they are written, in their order, against a real server.

Only the port and the home folder are others. A block ``sh stopped`` runs while the server is stopped.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from server_process import ServerProcess

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"^```(sh|python)( stopped)?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PATIENCE = 300


class Block(NamedTuple):
    """One example; ``stopped``: the server is, meanwhile."""

    language: str
    stopped: str
    text: str


def blocks(name: str) -> list[Block]:
    page = (ROOT / "docs" / name).read_text(encoding="utf-8")
    return [Block(*found) for found in BLOCK.findall(page)]


def run(block: Block, port: int, home: Path) -> str:
    """What an example prints; it must succeed."""
    work = home / "work"
    work.mkdir(exist_ok=True)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("WARMTURN_", "XDG_", "HF_"))}
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = kept | {"HOME": str(home), "PATH": programs, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment |= {"WARMTURN_PORT": str(port), "WARMTURN_CHAT_URL": f"http://127.0.0.1:{port}"}
    command = ["bash", "-e", "-o", "pipefail", "-c"] if block.language == "sh" else [sys.executable, "-c"]
    ran = subprocess.run(
        [*command, block.text.replace(":8000", f":{port}")],
        cwd=work,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert ran.returncode == 0, f"{block.text}\n{ran.stdout}\n{ran.stderr}"
    return ran.stdout


@pytest.mark.wide
@pytest.mark.parametrize(
    ("name", "said"),
    [
        pytest.param(
            "operators.md",
            ["0 faults", "weights", "room", "alice-2", '"status":"ok"', "warmturn_waiting", "per wall second"],
            marks=pytest.mark.slow,
        ),
        ("clients.md", ["Your name is Alice.", "Your name is Walter."]),
    ],
)
def test_the_commands_of_a_page_run(name: str, said: list[str], tmp_path: Path) -> None:
    data = tmp_path / ".local" / "share" / "warmturn"
    data.mkdir(parents=True, mode=0o700)
    told = ""
    waiting = blocks(name)
    assert len(waiting) >= 4
    while waiting:
        with ServerProcess(None, data) as server:
            while waiting and not waiting[0].stopped:
                told += run(waiting.pop(0), server.port, tmp_path)
            assert server.stop() == 0
        while waiting and waiting[0].stopped:
            told += run(waiting.pop(0), server.port, tmp_path)
    for words in said:
        assert words in told
    if name == "operators.md":
        assert (tmp_path / "work" / "log-backup.sqlite").stat().st_mode & 0o777 == 0o600


def test_the_table_of_sizes_follows_its_formula() -> None:
    page = (ROOT / "docs" / "operators.md").read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| (\d+) layers .*? \| (\d+) x (\d+) \| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \|$", page, re.MULTILINE
    )
    assert len(rows) == 5
    for row in rows:
        layers, heads, size, token_bytes, tokens, sessions = (int(cell.replace(",", "")) for cell in row)
        assert token_bytes == 2 * layers * heads * size * 2
        assert tokens == 2**30 // token_bytes
        assert sessions == tokens // 1000


@pytest.mark.parametrize("name", ["operators.md", "clients.md"])
def test_every_page_that_is_named_is_there(name: str) -> None:
    page = (ROOT / "docs" / name).read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:docs|deploy)/[\w./-]+)`", page))
    assert len(named) >= 3
    assert [place for place in sorted(named) if not (ROOT / place).exists()] == []
