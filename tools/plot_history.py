"""Draws docs/images/ttft.svg, the cost of a short turn by the length of its history: ``python -m tools.plot_history``.

The figures are those of one machine and one day, as ``docs/benchmarks`` has them, written down beside the page in CSV.
The picture is readable on light and dark ground.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parent.parent
FIGURES = ROOT / "docs" / "benchmarks" / "2026-11-21-ttft-history.csv"
PICTURE = ROOT / "docs" / "images" / "ttft.svg"

TITLE = "What a turn of 16 tokens costs against the length of its history"
BELOW = "llama-135m's shape, bfloat16, one thread of one Xeon at 2.1 GHz under load, 2026-11-21; 14 GB/s of memory"
ACROSS, UP = "tokens of history", "server CPU, milliseconds to the first token"
WIDTH, HEIGHT = 760, 430
LEFT, RIGHT, TOP, BOTTOM = 70, 600, 62, 358  # of the field
MOST = 7500  # tokens
LOW, HIGH = 30, 9000  # milliseconds, logarithmic
TICKS_X, TICKS_Y = (0, 1000, 2000, 3000, 4000, 5000, 6000, 7000), (50, 100, 200, 500, 1000, 2000, 5000)
COLOURS = ("first", "second")

STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #57606a }
  .title { font-size: 16px; font-weight: 600; fill: #24292f }
  .grid { stroke: #8c959f; stroke-opacity: 0.3 }
  .first { stroke: #0969da; fill: #0969da }
  .second { stroke: #bc4c00; fill: #bc4c00 }
  path { fill: none !important; stroke-width: 2.5 }
  .cold { stroke-dasharray: 6 5 }
  text.first, text.second { stroke: none }
  @media (prefers-color-scheme: dark) {
    text { fill: #9198a1 }
    .title { fill: #f0f6fc }
    .first { stroke: #4493f8; fill: #4493f8 }
    .second { stroke: #f0883e; fill: #f0883e }
  }
"""


@dataclass(frozen=True)
class Figure:
    """One server at one length of history: milliseconds of CPU for a turn of 16 tokens with the history cached, and for
    the history itself computed anew, where that was measured."""

    server: str
    history: int
    warm: float
    cold: float | None


def read(path: Path) -> list[Figure]:
    """The figures of a file; prefill is there in tokens a second."""
    with path.open(newline="") as file:
        return [
            Figure(row["server"], int(row["history"]), float(row["warm_cpu_ms"]), cold(row))
            for row in csv.DictReader(file)
        ]


def cold(row: dict[str, str]) -> float | None:
    """Milliseconds of computing the history."""
    speed = row["cold_tokens_per_cpu_second"]
    return 1000 * int(row["history"]) / float(speed) if speed else None


def x(tokens: float) -> float:
    """Where a length of history lies."""
    return LEFT + (RIGHT - LEFT) * tokens / MOST


def y(milliseconds: float) -> float:
    return BOTTOM - (BOTTOM - TOP) * math.log(milliseconds / LOW) / math.log(HIGH / LOW)


def draw(figures: Sequence[Figure]) -> str:
    """The picture as SVG."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
        f"<title>{escape(TITLE)}</title>",
        f"<style>{STYLE}</style>",
        f'<text class="title" x="{LEFT - 50}" y="24">{escape(TITLE)}</text>',
        f'<text x="{LEFT - 50}" y="46">{escape(UP)}</text>',
        f'<text x="{(LEFT + RIGHT) / 2:.0f}" y="{BOTTOM + 40}" text-anchor="middle">{escape(ACROSS)}</text>',
        f'<text x="{LEFT - 50}" y="{HEIGHT - 6}" style="font-size: 11px">{escape(BELOW)}</text>',
        *grid(),
    ]
    for server, colour in zip(dict.fromkeys(figure.server for figure in figures), COLOURS, strict=True):
        own = [figure for figure in figures if figure.server == server]
        parts += line([(f.history, f.warm) for f in own], colour, f"{server}, history cached", "warm")
        anew = [(f.history, f.cold) for f in own if f.cold is not None]
        parts += line(anew, colour, f"{server}, computed anew", "cold", above=colour == COLOURS[0])
    return "\n".join([*parts, "</svg>"]) + "\n"


def grid() -> Iterable[str]:
    """Lines and numbers of both axes."""
    for tick in TICKS_Y:
        yield f'<line class="grid" x1="{LEFT}" x2="{RIGHT}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>'
        yield f'<text x="{LEFT - 8}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:,}</text>'
    for tick in TICKS_X:
        yield f'<text x="{x(tick):.1f}" y="{BOTTOM + 20}" text-anchor="middle">{tick:,}</text>'


def line(points: Sequence[tuple[int, float]], colour: str, name: str, kind: str, above: bool = False) -> Iterable[str]:
    """One line with a dot at every figure, its name at its end."""
    path = " ".join(f"{x(tokens):.1f},{y(cost):.1f}" for tokens, cost in points)
    yield f'<path class="{colour} {kind}" d="M {path}"/>'
    for tokens, cost in points:
        label = escape(f"{name}: {cost:,.0f} ms on {tokens:,} tokens")
        place = f'cx="{x(tokens):.1f}" cy="{y(cost):.1f}" r="3.5"'
        yield f'<circle class="{colour}" {place}><title>{label}</title></circle>'
    tokens, cost = points[-1]
    rise = -8 if above else 5
    yield f'<text class="{colour}" x="{x(tokens) + 10:.1f}" y="{y(cost) + rise:.1f}">{escape(name)}</text>'


def main() -> None:
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    PICTURE.write_text(draw(read(FIGURES)), encoding="utf-8")


if __name__ == "__main__":
    main()
