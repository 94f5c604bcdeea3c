"""The pages for readers: every path that they name exists, and their prose has short lines."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
WIDTH = 100
GENERATED = ("architectures.md",)  # its lists have lines as long as they come
MEASURED = "benchmarks"  # reports of one day: they name the modules of that day
PAGES = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    *sorted(page for page in ROOT.glob("docs/*.md") if page.name not in GENERATED),
    *sorted(ROOT.glob("docs/decisions/*.md")),
]
REPORTS = sorted((ROOT / "docs" / MEASURED).glob("*.md"))
TOPS = "|".join(("server", "scheduler", "cache", "tools", "tests", "docs", "deploy", r"\.ci"))
PATH = re.compile(rf"`((?:{TOPS})/[\w./-]*|[A-Za-z]\w*\.(?:md|toml|txt))`")


def prose(page: Path) -> Iterator[tuple[int, str]]:
    """The numbered lines of a page that are neither code, tables nor links alone."""
    fenced = False
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        if line.startswith("```"):
            fenced = not fenced
        elif not (fenced or line.startswith(("    ", "|", "!["))):
            yield number, line


def identify(page: Path) -> str:
    """A page's name in the list of tests."""
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=identify)
def test_paths_that_a_page_names_exist(page: Path) -> None:
    named = set(PATH.findall(page.read_text(encoding="utf-8")))
    assert sorted(name for name in named if not ((ROOT / name).exists() or (ROOT / "docs" / name).exists())) == []


@pytest.mark.parametrize("page", PAGES, ids=identify)
def test_links_of_a_page_lead_to_files(page: Path) -> None:
    links = re.findall(r"\]\((?!https?://|#)([^)#\s]+)", page.read_text(encoding="utf-8"))
    assert sorted(link for link in links if not (page.parent / link).exists()) == []


@pytest.mark.parametrize("page", [*PAGES, *REPORTS], ids=identify)
def test_lines_of_prose_are_short(page: Path) -> None:
    assert [f"{identify(page)}:{number}" for number, line in prose(page) if len(line) > WIDTH] == []


def test_decisions_are_numbered_without_gaps() -> None:
    numbers = [int(page.name[:4]) for page in sorted(ROOT.glob("docs/decisions/*.md"))]
    assert numbers == list(range(1, len(numbers) + 1))
    for number, page in enumerate(sorted(ROOT.glob("docs/decisions/*.md")), 1):
        assert page.read_text(encoding="utf-8").startswith(f"# {number}. ")
