"""Run the scenario over every architecture, each in a process of its own with a time limit.

    python tests/architectures/run.py [names...] [--kind causal|s2s|media] [--jobs 2] [--timeout 150] [--real]
        [--out FILE]

Prints a line per entry as it ends and a summary by family and mode; ``--out`` writes the table as Markdown.
With ``--kind media`` the entries are those that take pictures or sounds, with chats that have some.
With ``--real`` the entries that name thresholds up to 20,000 are grown past them; give it ``--timeout 900`` then.
Exit status 1 if any entry is wrong (other tokens or logits than the model's own) or failed, else 0; an entry
that the product refuses at load, or that transformers itself cannot build, is neither.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: an entry has one core
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import argparse
import importlib
import multiprocessing
import time
import warnings
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import transformers
from architectures import media_build
from architectures.build import ENTRIES, build, family_of, has_thresholds
from architectures.long import Crossings
from architectures.media_build import MEDIA_ENTRIES
from architectures.media_scenario import check_media
from architectures.media_table import media_page, media_summary
from architectures.overrides import DRIFTING, NO_MODEL
from architectures.scenario import LOOSE, STRICT, Report, Scenario, Status, check
from architectures.table import Result, summary, written

MEDIA = "media"
# Loaded once, before the processes are forked: what most models import.
_COMMON = (
    "llama.modeling_llama",
    "bart.modeling_bart",
    "clip.modeling_clip",
    "gemma3.modeling_gemma3",
    "qwen3_next.modeling_qwen3_next",
)


@dataclass
class Job:
    """One entry being run in a process."""

    name: str
    kind: str
    process: Any
    started: float


def main() -> int:
    """The command line; the exit status."""
    options = _options()
    known = [(name, MEDIA) for name in MEDIA_ENTRIES] if options.kind == MEDIA else ENTRIES
    entries = [e for e in known if options.kind in (None, e[1]) and (not options.names or e[0] in options.names)]
    if options.real:
        entries = [entry for entry in entries if has_thresholds(*entry)]
    unknown = set(options.names) - {name for name, _ in known}
    if unknown:
        print(f"transformers {transformers.__version__} has no {', '.join(sorted(unknown))}", file=sys.stderr)
    _prepare_to_fork()
    results = []
    for result in run(entries, options.jobs, options.timeout, options.real):
        results.append(result)
        print(f"{len(results):3} of {len(entries)} {result.line()}", flush=True)
    results.sort(key=lambda r: (r.name, r.kind))
    if options.kind == MEDIA:
        print("\n" + media_summary(results))
        if options.out is not None:
            options.out.write_text(media_page(results), encoding="utf-8")
        return int(any(r.status in (Status.WRONG, Status.FAILED) for r in results))
    print("\n" + summary(results))
    if options.out is not None:
        before = options.out.read_text(encoding="utf-8") if options.out.exists() else ""
        options.out.write_text(written(before, results, real=options.real), encoding="utf-8")
    return int(any(r.status in (Status.WRONG, Status.FAILED) for r in results))


def run(entries: list[tuple[str, str]], jobs: int, timeout: float, real: bool) -> Iterator[Result]:
    """Every entry's results as it ends, ``jobs`` at a time; one that takes longer than ``timeout`` seconds failed."""
    waiting, running = deque(entries), dict[Connection, Job]()
    context = multiprocessing.get_context("fork")
    while waiting or running:
        while waiting and len(running) < jobs:
            name, kind = waiting.popleft()
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_work, args=(name, kind, real, theirs), daemon=True)
            process.start()
            theirs.close()
            running[ours] = Job(name, kind, process, time.monotonic())
        for pipe in wait(list(running), timeout=0.5):
            assert isinstance(pipe, Connection)
            yield from _ended(running.pop(pipe), pipe)
        for pipe, job in list(running.items()):
            if time.monotonic() - job.started > timeout:
                job.process.kill()
                yield _result(running.pop(pipe), Report(Status.FAILED, "", reason=f"no end within {timeout:.0f} s"))


def examine(name: str, kind: str, real: bool) -> Report:
    """Build one entry and run the scenario on it."""
    try:
        model = build(name, kind, real=real)
    except Exception as error:
        reason = NO_MODEL.get(name) or f"{type(error).__name__}: {' '.join(str(error).split())}"
        return Report(Status.SKIPPED, "-", reason=reason.partition(". ")[0][:150])
    try:
        return check(model, LOOSE if name in DRIFTING else STRICT, Crossings if real else Scenario)
    except Exception as error:
        return Report(Status.FAILED, family_of(model), reason=f"{type(error).__name__}: {error}")


def examine_media(name: str) -> list[tuple[str, Report]]:
    """Build one entry and run the scenario of each kind of media on it."""
    if not media_build.takes_media(name):
        reason = "its forward has no argument for pictures or sounds"
        if media_build.class_of(name).forward is torch.nn.Module.forward:
            reason = "it has no forward of its own: of such a checkpoint the part that says text is served"
        return [("none", Report(Status.REFUSED, "-", reason=reason))]
    try:
        model = media_build.build(name)
    except Exception as error:
        reason = media_build.UNBUILT.get(name) or f"{type(error).__name__}: {' '.join(str(error).split())}"
        return [("none", Report(Status.SKIPPED, "-", reason=reason[:200]))]
    try:
        return [*check_media(model, LOOSE if name in DRIFTING else STRICT)]
    except Exception as error:
        return [("none", Report(Status.FAILED, family_of(model), reason=f"{type(error).__name__}: {error}"))]


def _work(name: str, kind: str, real: bool, pipe: Connection) -> None:
    pipe.send(examine_media(name) if kind == MEDIA else [(kind, examine(name, kind, real))])


def _ended(job: Job, pipe: Connection) -> list[Result]:
    """The reports that came through the pipe, or that none will come."""
    try:
        reports = pipe.recv()
    except EOFError:
        job.process.join()
        reports = [(job.kind, Report(Status.FAILED, "", reason=f"the process ended with {job.process.exitcode}"))]
    job.process.join()
    return [_result(job, report, kind) for kind, report in reports]


def _result(job: Job, report: Report, kind: str | None = None) -> Result:
    return Result(job.name, kind or job.kind, report, time.monotonic() - job.started)


def _prepare_to_fork() -> None:
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    for module in _COMMON:
        importlib.import_module(f"transformers.models.{module}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Check every architecture of transformers against its own forward.")
    parser.add_argument("names", nargs="*", help="architectures by their transformers name; all without any")
    parser.add_argument("--kind", choices=("causal", "s2s", MEDIA))
    parser.add_argument("--real", action="store_true", help="the second pass: thresholds as large as they really are")
    parser.add_argument("--jobs", type=int, default=2, help="entries at a time (default 2)")
    parser.add_argument("--timeout", type=float, default=150.0, help="seconds for one entry (default 150)")
    parser.add_argument("--out", type=Path, help="write the table here, as Markdown")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
