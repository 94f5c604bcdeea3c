"""Results of many entries as text: a line each, a summary for the terminal, a page for the docs."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass

import torch
import transformers
from architectures.scenario import Report, Status

_MODES = ("packed", "masked", "split", "alone")
_NOT_BUILT = "not built"
SECOND = "## Past thresholds of real size\n"


@dataclass(frozen=True)
class Result:
    """What one entry came to, and in how many seconds."""

    name: str
    kind: str
    report: Report
    seconds: float

    @property
    def status(self) -> Status:
        """How it ended; SKIPPED: transformers itself does not build it."""
        return self.report.status

    @property
    def label(self) -> str:
        """The name, marked where it does not come from the list of causal models."""
        return self.name if self.kind == "causal" else f"{self.name} ({self.kind})"

    @property
    def outcome(self) -> str:
        """The mode of an entry that runs right, else its status."""
        if self.status is Status.RIGHT:
            return self.report.mode.partition(",")[0]
        return _NOT_BUILT if self.status is Status.SKIPPED else self.status.value

    def line(self) -> str:
        """For people who watch."""
        report = self.report
        error = max((c.error for c in report.checks), default=0.0)
        said = report.reason or f"error {error:.0e}, {_reuse(report)}"
        status = _NOT_BUILT if self.status is Status.SKIPPED else self.status.value
        return f"{status:9} {self.label:28} {report.family:20} {report.mode:8} {said} ({self.seconds:.1f} s)"


def summary(results: list[Result]) -> str:
    """Counts by family and outcome, aligned for a terminal."""
    rows = _counts(results)
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def markdown(results: list[Result]) -> str:
    """The page ``docs/architectures.md``."""
    right = [r for r in results if r.status is Status.RIGHT]
    errors = [max(c.error for c in r.report.checks) for r in right]
    parts = [
        "# Architectures\n",
        f"Written by `make test-architectures` with transformers {transformers.__version__} and torch\n"
        f"{torch.__version__.partition('+')[0]}. The tests in `tests/architectures/` define what was checked.\n",
        f"The {len(results)} entries are all causal and sequence-to-sequence language models that transformers\n"
        f"lists. {len(right)} of them give the results of a from-scratch forward: the same greedy tokens, and\n"
        "log-probabilities that differ by at most 1e-4 of the largest logit (2e-2 where the model's own\n"
        f"cached and uncached forwards differ). The largest difference is {max(errors, default=0.0):.0e}. The mode is\n"
        "measured at load.\n",
        _grid(_counts(results)),
        "\n## By family and mode\n",
        *_members(right),
        *_lossy(right),
        *_reasons("Refused at load", [r for r in results if r.status is Status.REFUSED]),
        *_reasons("Not built by transformers here", [r for r in results if r.status is Status.SKIPPED]),
        *_reasons("Wrong", [r for r in results if r.status is Status.WRONG]),
        *_reasons("Failed", [r for r in results if r.status is Status.FAILED]),
    ]
    return "\n".join(parts) + "\n"


def past_thresholds(results: list[Result]) -> str:
    """The part of that page on the second pass."""
    right = [r for r in results if r.status is Status.RIGHT]
    errors = [max(c.error for c in r.report.checks) for r in right]
    wrong = sum(r.status is Status.WRONG for r in results)
    rows = [["entry", "family", "mode", "thresholds", "outcome"]]
    for r in results:
        crossed = ", ".join(c.name.removeprefix("across ") for c in r.report.checks)
        error = max((c.error for c in r.report.checks), default=0.0)
        outcome = f"right, {error:.0e}" if r.status is Status.RIGHT else f"{r.status.value}: {r.report.reason[:120]}"
        rows.append([r.label, r.report.family, r.report.mode, crossed, outcome.replace("|", "\\|")])
    return "\n".join(
        [
            SECOND,
            f"Written by `make test-thresholds` with transformers {transformers.__version__} and torch\n"
            f"{torch.__version__.partition('+')[0]}. The models have the thresholds of the default configs up to\n"
            "20,000 (windows, chunks, position floors, top-k of sparse attention, original contexts), and tiny widths\n"
            "and depths. In each entry a session decodes past each of its thresholds by 500 tokens and is\n"
            "resumed twice, the second time from disk in another engine. All of it is fed again as one prompt.\n"
            "Other sessions share the steps.\n",
            f"Of {len(results)} entries {len(right)} are right, with differences of up to\n"
            f"{max(errors, default=0.0):.0e} of the largest logit; {wrong} are wrong.\n",
            _grid(rows),
        ]
    )


def written(before: str, results: list[Result], *, real: bool) -> str:
    """The page ``before``, with what these results tell in the place of what it told of that pass."""
    first, _, second = before.partition(SECOND)
    if real:
        return f"{first.rstrip()}\n\n{past_thresholds(results)}\n"
    return markdown(results) + (f"\n{SECOND}{second}" if second else "")


def _counts(results: list[Result]) -> list[list[str]]:
    """A header row, a row per family, a row of sums; columns are outcomes."""
    found = Counter(r.outcome for r in results)
    modes = [*_MODES, *sorted(set(found) - {*_MODES, *Status, _NOT_BUILT})]
    columns = [c for c in (*modes, "refused", _NOT_BUILT, "failed", "wrong") if found[c] or c == "wrong"]
    families: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for result in results:
        families[result.report.family or "?"][result.outcome] += 1
    rows = [["family", "entries", *columns]]
    for family, counts in sorted(families.items(), key=lambda item: -item[1].total()):
        rows.append([family, str(counts.total()), *(str(counts[c] or "") for c in columns)])
    rows.append(["all", str(len(results)), *(str(found[c]) for c in columns)])
    return rows


def _grid(rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    lines.insert(1, "|---" * len(rows[0]) + "|")
    return "\n".join(lines)


def _members(right: list[Result]) -> list[str]:
    groups: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for result in right:
        groups[result.report.family, result.report.mode].append(result.label)
    return [f"* **{family}, {mode}**: {', '.join(names)}" for (family, mode), names in sorted(groups.items())]


def _reasons(title: str, results: list[Result]) -> list[str]:
    if not results:
        return []
    rows = [["entry", "family", "reason"]]
    rows += [[r.label, r.report.family, r.report.reason.replace("|", "\\|")] for r in results]
    return [f"\n## {title}\n", _grid(rows)]


def _reuse(report: Report) -> str:
    parts = [f"{c.name} {c.reused:.0%}" for c in report.checks if c.reused is not None]
    notes = [f"; {c.name}: {c.detail}" for c in report.checks if c.detail]
    return ("reused: " + ", ".join(parts) if parts else "nothing to reuse") + "".join(notes)


def _lossy(right: list[Result]) -> list[str]:
    """Entries that compute again what a resumed turn should have found."""
    found = [
        f"{r.label} ({c.reused:.0%})"
        for r in right
        for c in r.report.checks
        if c.name == "resume" and c.reused is not None and c.reused < 1
    ]
    return [f"\nResumed turns reuse the whole history, except for {', '.join(found)}."] if found else []
