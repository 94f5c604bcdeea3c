"""Writes docs/modules.md: one line for every sub-package and module, from their docstrings."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DRAWN = ("server", "scheduler", "cache")
TOPS = (*DRAWN, "tools")
INTRODUCTION = """\
# Modules

Generated from the modules' docstrings by `make pages`; a test checks it.
`architecture.md` explains how they work together.
"""
IMPORTS = """
## Imports between sub-packages

An arrow goes from a folder to one that it imports from. Arrows that others imply are left out, and
so are the modules that stand in a package itself.
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


def wrap_paragraph(text: str, indent: str = "") -> str:
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
                yield "\n\n".join(wrap_paragraph(part) for part in docstring(package).strip().split("\n\n")) + "\n"
            modules = [path for path in sorted(folder.glob("*.py")) if path.name != "__init__.py"]
            yield "\n".join(wrap_paragraph(f"- `{path.name}`: {first_sentence(path)}", indent="  ") for path in modules)


def drawn_folder(module: str) -> str:
    """The folder of a module, as it is drawn: a package, or a package's sub-package with all that is in it."""
    return "/".join(module.split("/")[:-1][:2])


@cache
def imported_folders() -> dict[str, set[str]]:
    """Of every folder that is drawn, the others that its modules import from."""
    drawn = [path.relative_to(ROOT).as_posix() for top in DRAWN for path in sorted((ROOT / top).rglob("*.py"))]
    files = set(drawn)
    found: dict[str, set[str]] = {drawn_folder(module): set() for module in drawn}
    for module in drawn:
        for node in ast.walk(ast.parse((ROOT / module).read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                path = node.module.replace(".", "/")
                names = (f"{path}.py", *(f"{path}/{alias.name}.py" for alias in node.names), f"{path}/__init__.py")
                found[drawn_folder(module)].update(drawn_folder(name) for name in names if name in files)
    return {folder: others - {folder, *DRAWN} for folder, others in found.items() if folder not in DRAWN}


def reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    """All folders that ``start`` imports from, directly or through others."""
    found: set[str] = set()
    left = list(graph[start])
    while left:
        folder = left.pop()
        if folder not in found:
            found.add(folder)
            left.extend(graph[folder])
    return found


def draw_imports() -> str:
    """The imports between sub-packages as a Mermaid flowchart. An arrow that others imply is left out. Raises
    SystemExit where imports form a circle.
    """
    graph = imported_folders()
    below = {folder: reachable(graph, folder) for folder in graph}
    circle = sorted(folder for folder in graph if folder in below[folder])
    if circle:
        raise SystemExit(f"these folders import each other: {', '.join(circle)}")
    lines = ["```mermaid", "flowchart TD"]
    for top in DRAWN:
        inside = [folder for folder in graph if folder.startswith(f"{top}/")]
        lines += [f"  subgraph {top}", *(f"    {f.replace('/', '_')}[{f.partition('/')[2]}]" for f in inside), "  end"]
    for folder, others in graph.items():
        implied = {low for other in others for low in below[other]}
        lines += [f"  {folder.replace('/', '_')} --> {low.replace('/', '_')}" for low in sorted(others - implied)]
    return "\n".join([*lines, "```"])


def page() -> str:
    parts = [INTRODUCTION.rstrip("\n"), IMPORTS, draw_imports(), *(part for part in sections() if part)]
    return "\n".join(parts).rstrip("\n") + "\n"


if __name__ == "__main__":
    print(page(), end="")
