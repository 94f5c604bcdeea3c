"""Results of the entries that take pictures or sounds, as a page for the docs."""

from __future__ import annotations

import textwrap
from collections import Counter

import torch
import transformers
from architectures.scenario import Status
from architectures.table import Result, _grid

KINDS = {"image": "pictures", "audio": "sounds", "none": "-"}


def media_summary(results: list[Result]) -> str:
    """Counts of verdicts, in a line."""
    found = Counter(verdict(result) for result in results)
    return ", ".join(f"{count} {name}" for name, count in found.most_common())


def verdict(result: Result) -> str:
    """In a word or two."""
    status = result.status
    if status is Status.RIGHT:
        return "exact"
    return {Status.SKIPPED: "not made", Status.REFUSED: "refused"}.get(status, status.value)


def media_page(results: list[Result]) -> str:
    """The page ``docs/media_architectures.md``."""
    right = [r for r in results if r.status is Status.RIGHT]
    bad = {r.name for r in results if r.status in (Status.WRONG, Status.FAILED)}
    worst = max((c.error for r in right for c in r.report.checks), default=0.0)
    names = {r.name for r in results}
    exact = {r.name for r in right} - bad
    told = {r.name for r in results if r.status is Status.REFUSED} - bad
    made = f"transformers {transformers.__version__} and torch {torch.__version__.partition('+')[0]}"
    paragraphs = (
        f"Written by `make test-media-architectures` with {made}. The code is in "
        "`tests/architectures/media_scenario.py`.",
        f"The {len(names)} entries are all that transformers lists as models of pictures or sounds beside text "
        f"(`AutoModelForMultimodalLM`), as tiny random models. {len(exact)} are exact, {len(told - exact)} refused "
        f"with a reason, {len(names - exact - told - bad)} not made here, and {len(bad)} wrong or failed. Exact means: "
        "the same greedy tokens as a from-scratch forward of the model's own code with all pixels or features, and "
        "log-probabilities that differ by at most 1e-4 of the largest logit (2e-2 where the model's own cached and "
        f"uncached forwards differ). The largest difference is {worst:.0e}. The ways in which rows enter, and what "
        "rows see each other, are told in `docs/decisions/0034-a-picture-is-bytes-of-a-session.md`.",
        "Each entry had made-up pixels or features in the shape that its encoder takes, of three sizes where that is "
        "possible: in turns 1 and 3 of a chat of 4, in steps of 19 tokens beside a chat of text; with edits behind a "
        "picture, forks, and another picture in its place; over a restart and an eviction, after which KV comes from "
        "disk and nothing is encoded; and in memory that is too small for two chats. Each picture is encoded once. "
        '"Each encoded alone": of several pictures in one forward the model itself makes other rows than of each, so '
        'the reference has them one by one. "Not made" says nothing about the model: it could not be built here, or '
        "no made-up input fits its encoder. Encoders of timm need timm and torchvision, which `make setup` does not "
        "install; fast_vlm, gemma3n and perception_lm were run with both. Processors of checkpoints are not run; "
        "`tests/vision_models.py` and `tests/hearing_models.py` have some.",
    )
    parts = [
        "# Models that see or hear\n",
        *(f"{textwrap.fill(paragraph, 100, break_on_hyphens=False)}\n" for paragraph in paragraphs),
        _grid([["entry", "kind", "verdict", "mode and way, or the reason", "error"], *map(_row, results)]),
    ]
    return "\n".join(parts) + "\n"


def _row(result: Result) -> list[str]:
    report = result.report
    said = report.mode if result.status is Status.RIGHT else report.reason
    error = max((c.error for c in report.checks), default=0.0)
    told = f"{error:.0e}" if result.status is Status.RIGHT else ""
    return [result.name, KINDS[result.kind], verdict(result), _short(said), told]


def _short(reason: str) -> str:
    """A reason without what was tried in vain more than twice."""
    parts = reason.replace("|", "\\|").split("; ")
    return "; ".join(parts[:2]) + (f"; and {len(parts) - 2} more" if len(parts) > 2 else "")
