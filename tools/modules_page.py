"""Writes docs/modules.md: one line for every sub-package and module, from their docstrings."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TOPS = ("server", "scheduler", "cache", "tools")
INTRODUCTION = """\
# Modules

Generated from the modules' docstrings by `make pages`; a test checks it.
`architecture.md` explains how they work together.
"""


def docstring(path: Path) -> str:
    """A module's docstring. Raises SystemExit where it has none."""
    found = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    if not found:
        raise SystemExit(f"{path.relative_to(ROOT)} has no docstring")
    return found


def first_sentence(path: Path) -> str:
    """The first paragraph of a module's docstring, on one line."""
    return " ".join(docstring(path).split("\n\n")[0].split())


def wrapped(text: str, indent: str = "") -> str:
    """A paragraph as Markdown, in lines of at most 100 characters; those behind the first one are indented."""
    text = " ".join(text.replace("``", "`").split())
    return textwrap.fill(text, 100, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def sections() -> Iterator[str]:
    """One per package and sub-package: its docstring, and a line for each of its modules."""
    for top in TOPS:
        folders = sorted({path.parent for path in (ROOT / top).rglob("*.py")})
        for folder in folders:
            name = folder.relative_to(ROOT).as_posix()
            package = folder / "__init__.py"
            yield f"\n## `{name}/`\n"
            if package.exists():
                yield "\n\n".join(wrapped(part) for part in docstring(package).strip().split("\n\n")) + "\n"
            modules = [path for path in sorted(folder.glob("*.py")) if path.name != "__init__.py"]
            yield "\n".join(wrapped(f"- `{path.name}`: {first_sentence(path)}", indent="  ") for path in modules)


def page() -> str:
    return "\n".join([INTRODUCTION.rstrip("\n"), *(part for part in sections() if part)]).rstrip("\n") + "\n"


if __name__ == "__main__":
    print(page(), end="")
