"""The report of `warmturn bench`: a Markdown table with a row per load, the same figures as JSON, and the
environment.
"""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec

from scheduler.model_facts import WeightReading
from server.cli.bench.bench_load import BenchLoad

HEAD = (
    "| load | output tokens | per server-CPU-second | per wall second | first turn, ms to first token "
    "| later turns | cached | between tokens, ms, p50 / p95 | failed |\n|---|---|---|---|---|---|---|---|---|"
)


def figures(load: BenchLoad) -> dict[str, Any]:
    """One load in numbers: seconds, tokens a second, shares. None where nothing can be told."""
    every = [turn for chat in load.chats for turn in chat]
    answered = [turn for turn in every if turn.error is None]
    first = [chat[0].first for chat in load.chats if chat and chat[0].error is None]
    later = [turn.first for chat in load.chats for turn in chat[1:] if turn.error is None]
    gaps = [gap for turn in answered for gap in turn.gaps]
    output, prompt = sum(turn.output for turn in answered), sum(turn.prompt for turn in answered)
    return {
        "load": load.name,
        "turns": len(answered),
        "failed": len(every) - len(answered),
        "wall_seconds": load.wall,
        "server_cpu_seconds": load.cpu,
        "output_tokens": output,
        "prompt_tokens": prompt,
        "output_tokens_per_cpu_second": output / load.cpu if load.cpu else None,
        "output_tokens_per_second": output / load.wall,
        "first_turn_ttft_p50": quantile(first, 0.5),
        "first_turn_ttft_p95": quantile(first, 0.95),
        "later_turns_ttft_p50": quantile(later, 0.5),
        "later_turns_ttft_p95": quantile(later, 0.95),
        "inter_token_p50": quantile(gaps, 0.5),
        "inter_token_p95": quantile(gaps, 0.95),
        "cached_share": sum(turn.cached for turn in answered) / prompt if prompt else None,
        "errors": sorted({turn.error for turn in every if turn.error is not None}),
    }


def weight_reading(facts: dict[str, Any], loads: Sequence[BenchLoad]) -> dict[str, float]:
    """Bytes of weights that a step of one chat reads per second, beside what its products read, without all else that a
    step does, and what memory gives: of a server that tells these. Empty where it does not, or where no load was one
    chat.
    """
    told = facts.get("weight_reading")
    alone = [figures(load)["inter_token_p50"] for load in loads if load.name.startswith("1 sessions")]
    if not isinstance(told, dict) or not alone or not alone[0]:
        return {}
    found = msgspec.convert(told, WeightReading)
    steps = found.weight_bytes / alone[0]
    shares = {"share": steps / found.memory, "products_share": found.share}
    return {"bytes_per_second": steps, "products_per_second": found.speed, "memory": found.memory, **shares}


def reading_line(read: dict[str, float]) -> str:
    """``weight_reading`` in words."""
    return (
        f"one chat: products read {read['products_per_second'] / 1e9:.1f} GB/s of weights, "
        f"{100 * read['products_share']:.0f} % of the {read['memory'] / 1e9:.1f} GB/s that memory gives; whole steps "
        f"{read['bytes_per_second'] / 1e9:.1f} GB/s, {100 * read['share']:.0f} %"
    )


def row(load: BenchLoad) -> str:
    """One line of the table."""
    of = figures(load)
    cpu, share = of["output_tokens_per_cpu_second"], of["cached_share"]
    cells = (
        of["load"],
        of["output_tokens"],
        "-" if cpu is None else f"{cpu:.1f}",
        f"{of['output_tokens_per_second']:.1f}",
        milliseconds(of["first_turn_ttft_p50"]),
        milliseconds(of["later_turns_ttft_p50"]),
        "-" if share is None else f"{100 * share:.0f} %",
        f"{milliseconds(of['inter_token_p50'])} / {milliseconds(of['inter_token_p95'])}",
        of["failed"],
    )
    return f"| {' | '.join(map(str, cells))} |"


def quantile(values: Sequence[float], part: float) -> float | None:
    """The value below which that part of them lies, between neighbours in proportion; None of none."""
    if len(values) < 2:
        return values[0] if values else None
    return statistics.quantiles(values, n=100, method="inclusive")[round(100 * part) - 1]


def milliseconds(seconds: float | None) -> str:
    """For people."""
    return "-" if seconds is None else f"{1000 * seconds:.0f}"


def about(what: str, left_out: Sequence[str]) -> str:
    """Machine, versions and date, which every report names."""
    date = datetime.now(UTC).date().isoformat()
    machine = f"{processor()}, {os.cpu_count()} processors, {platform.system()}"
    packages = ", ".join(
        f"{name} {of}" for name in ("warmturn", "torch", "transformers") if (of := package_version(name))
    )
    told = f"{date}; {machine}; {packages}; {what}"
    return told + (f"; without {', '.join(left_out)}, which it does not take" if left_out else "")


def processor() -> str:
    """The processor's name, as the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def package_version(package: str) -> str:
    """The version of a package; empty where it is not there."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
