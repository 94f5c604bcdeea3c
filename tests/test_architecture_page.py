"""docs/architecture.md maps every file, and names only what is there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def test_every_file_has_its_line() -> None:
    files = {
        str(p.relative_to(ROOT))
        for top in ("server", "scheduler", "cache", "tools")
        for p in (ROOT / top).rglob("*.py")
    }
    assert set(re.findall(r"^- `([\w/]+\.py)`: \S", PAGE, re.MULTILINE)) == files


def test_the_hops_name_functions_that_are_there() -> None:
    hops = PAGE.split("## Life of one chat request")[1].split("## Modes")[0]
    sources = "\n".join(p.read_text(encoding="utf-8") for p in ROOT.glob("[!.]*/**/*.py"))
    for name in re.findall(r"`(?:\w+\.)*(\w+)`", hops):
        assert re.search(rf"\b(?:def|class) {name}\b", sources) or name in {"messages", "py"}, name
