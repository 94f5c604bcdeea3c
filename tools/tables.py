"""Markdown tables."""

from __future__ import annotations

from collections.abc import Iterable


def table(head: str, rows: Iterable[Iterable[object]]) -> str:
    """Names between bars, then a line a row."""
    names = head.split(" | ")
    cells = [names, ["---"] * len(names), *([str(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)
