"""docs/modules.md is what the docstrings say; docs/architecture.md is short, and names only what is there."""

from __future__ import annotations

import re
from pathlib import Path

from tools.modules_page import page

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
SOURCES = "\n".join(p.read_text(encoding="utf-8") for p in ROOT.glob("[!.]*/**/*.py"))


def test_every_module_has_its_line() -> None:
    """`make pages` writes the page anew."""
    assert (ROOT / "docs" / "modules.md").read_text(encoding="utf-8") == page()


def test_the_page_is_short() -> None:
    assert len(PAGE.splitlines()) <= 150


def test_files_and_folders_that_it_names_are_there() -> None:
    named = re.findall(r"`((?:server|scheduler|cache|tools|tests|docs|deploy)/[\w./-]*)`", PAGE)
    assert len(named) > 20
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_the_hops_name_functions_that_are_there() -> None:
    hops = PAGE.split("## The path of a chat request")[1].split("\n## ")[0]
    numbers = re.findall(r"^(\d+)\. ", hops, re.MULTILINE)
    assert len(numbers) <= 12
    for name in re.findall(r"`(?:\w+\.)*(\w+)`", hops):
        assert re.search(rf"\b(?:def|class) {name}\b", SOURCES), name
