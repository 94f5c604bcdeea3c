"""Writes docs/modules.md: every sub-package and module in a line, from their docstrings."""

from __future__ import annotations

import ast
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


def sections() -> Iterator[str]:
    """One per package and sub-package: its docstring, and a line for each of its modules."""
    for top in TOPS:
        folders = sorted({path.parent for path in (ROOT / top).rglob("*.py")})
        for folder in folders:
            name = folder.relative_to(ROOT).as_posix()
            package = folder / "__init__.py"
            yield f"\n## `{name}/`\n"
            if package.exists():
                yield docstring(package).replace("``", "`").replace("\n\n", "\n\n").strip() + "\n"
            lines = [
                f"- `{path.relative_to(folder).name}`: {first_sentence(path)}"
                for path in sorted(folder.glob("*.py"))
                if path.name != "__init__.py"
            ]
            yield "\n".join(lines).replace("``", "`") if lines else ""


def page() -> str:
    """The whole page."""
    return "\n".join([INTRODUCTION.rstrip("\n"), *(part for part in sections() if part)]).rstrip("\n") + "\n"


if __name__ == "__main__":
    print(page(), end="")
