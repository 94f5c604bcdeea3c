"""The picture in docs/images shows the committed figures, and these are the ones of the page that they are from."""

from __future__ import annotations

import csv
import re
from xml.etree import ElementTree

import pytest

from tools import plot_history
from tools.plot_history import FIGURES, PICTURE, Figure

PAGE = FIGURES.with_name("2026-11-21-cpu-attention.md").read_text(encoding="utf-8")
ROWS = {"warmturn": "now", "vLLM 0.32": "vLLM 0.32"}  # as the page calls them


def numbers(cell: str) -> list[int]:
    """``52 / 117 / 153 (load 3)`` as numbers."""
    return [int(part.replace(",", "")) for part in re.sub(r"\(.*?\)", "", cell).split("/")]


@pytest.mark.parametrize("server", ROWS)
def test_the_figures_are_those_of_the_page(server: str) -> None:
    table = PAGE.split("## Against the length of history")[1]
    (row,) = re.findall(rf"^\| {ROWS[server]}\b.*$", table, re.MULTILINE)
    *_, warm, cold, _ = row.split("|")
    with FIGURES.open(newline="") as file:
        ours = [line for line in csv.DictReader(file) if line["server"] == server]
    assert [int(line["warm_cpu_ms"]) for line in ours] == numbers(warm)
    assert [int(line["cold_tokens_per_cpu_second"]) for line in ours if line["cold_tokens_per_cpu_second"]] == numbers(
        cold
    )
    assert "on 584 / 4,212 / 7,113" in table
    assert [int(line["history"]) for line in ours] == [584, 4212, 7113]


def test_the_picture_is_drawn_from_the_figures() -> None:
    assert PICTURE.read_text(encoding="utf-8") == plot_history.draw(plot_history.read(FIGURES))


def test_the_picture_is_small_and_sound() -> None:
    assert PICTURE.stat().st_size < 100_000
    root = ElementTree.parse(PICTURE).getroot()
    points = root.findall("{*}circle")
    figures = plot_history.read(FIGURES)
    assert len(points) == len(figures) + sum(figure.cold is not None for figure in figures)
    for point in points:
        assert plot_history.LEFT <= float(point.attrib["cx"]) <= plot_history.RIGHT
        assert plot_history.TOP <= float(point.attrib["cy"]) <= plot_history.BOTTOM
    assert "prefers-color-scheme: dark" in PICTURE.read_text(encoding="utf-8")


def test_higher_is_more_and_further_right_is_longer() -> None:
    cheap, dear = Figure("a", 100, 50.0, None), Figure("a", 200, 500.0, 5000.0)
    assert plot_history.x(cheap.history) < plot_history.x(dear.history)
    assert plot_history.y(cheap.warm) > plot_history.y(dear.warm) > plot_history.y(dear.cold or 0.0)
    assert plot_history.cold({"history": "584", "cold_tokens_per_cpu_second": "1168"}) == 500.0
