"""docs/modules.md is what the docstrings say; docs/architecture.md is short, and names only what is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools import modules_page
from tools.modules_page import draw_imports, imported_folders, page

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def test_every_module_has_its_line() -> None:
    """`make pages` writes the page anew."""
    assert (ROOT / "docs" / "modules.md").read_text(encoding="utf-8") == page()


def test_arrows_that_others_imply_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = {"cache/a": {"cache/b", "cache/c"}, "cache/b": {"cache/c"}, "cache/c": set[str]()}
    monkeypatch.setattr(modules_page, "imported_folders", lambda: graph)
    assert [line.strip() for line in draw_imports().splitlines() if "-->" in line] == [
        "cache_a --> cache_b",
        "cache_b --> cache_c",
    ]
    graph["cache/c"].add("cache/b")
    with pytest.raises(SystemExit, match="cache/b, cache/c"):
        draw_imports()


def test_imports_between_folders_are_found() -> None:
    graph = imported_folders()
    assert "cache/pages" in graph["cache/tiers"]
    assert "server/turns" in graph["server/api"]
    assert graph["cache/segments"] <= {"cache/memory"}


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
    sources = "\n".join(p.read_text(encoding="utf-8") for p in ROOT.glob("[!.]*/**/*.py"))
    there = set(re.findall(r"\b(?:def|class) (\w+)", sources))
    for name in re.findall(r"`(?:\w+\.)*(\w+)`", hops):
        assert name in there
