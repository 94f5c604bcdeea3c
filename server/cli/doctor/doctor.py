"""`warmturn doctor`: runs the checks, each with a time limit, and prints what keeps a server from starting or slows
it.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TextIO

import msgspec

from server import __version__
from server.cli.doctor import doctor_machine, doctor_model, doctor_storage
from server.cli.doctor.findings import Finding, Level, within
from server.config.doctor_options import DoctorConfig

Check = Callable[[DoctorConfig], Iterable[Finding]]

# Each with the seconds that it may take. The first are quick and explain what goes wrong with those behind them.
CHECKS: tuple[tuple[str, float, Check], ...] = (
    ("python", 20, doctor_machine.python),
    ("torch", doctor_machine.CHECKUP_SECONDS + 30, doctor_machine.torch),
    ("memory", 20, doctor_machine.memory),
    ("files", 20, doctor_machine.files),
    ("port", 30, doctor_storage.port),
    ("data", 30, doctor_storage.data),
    ("disk", 60, doctor_storage.disk),
    ("packed", 30, doctor_storage.packed),
    ("log", 60, doctor_storage.log),
    ("remote", 60, doctor_storage.remote),
    ("hub", 30, doctor_storage.hub),
    ("model", doctor_model.LOAD_SECONDS + 120, doctor_model.model),
)
COLOURS = {Level.OK: "\x1b[32m", Level.WARNING: "\x1b[33m", Level.FAULT: "\x1b[31m"}
PLAIN = "\x1b[0m"
COLUMNS = (60, 110)  # of a line, at least and at most


def doctor(
    config: DoctorConfig, terminal: TextIO | None = None, checks: Sequence[tuple[str, float, Check]] = CHECKS
) -> int:
    """Look at everything; the exit status: 1 with a fault, else 0."""
    out = terminal or sys.stdout
    found: list[Finding] = []
    for finding in findings(config, checks):
        found.append(finding)
        if not config.as_json:
            show(out, finding)
    levels = [finding.level for finding in found]
    faults, warnings = levels.count(Level.FAULT), levels.count(Level.WARNING)
    if config.as_json:
        answer = {"object": "doctor", "version": __version__, "faults": faults, "warnings": warnings}
        json.dump(answer | {"findings": msgspec.to_builtins(found)}, out, indent=2, ensure_ascii=False)
        out.write("\n")
    else:
        out.write(f"{count_in_words(faults, 'fault')}, {count_in_words(warnings, 'warning')}\n")
    return 1 if faults else 0


def findings(config: DoctorConfig, checks: Sequence[tuple[str, float, Check]]) -> Iterator[Finding]:
    """What all checks find. A model is not loaded where the hub has said that it is not to be had."""
    out_of_reach = False
    for name, seconds, check in checks:
        if name == "model" and out_of_reach:
            return
        for finding in within(seconds, name, partial(check, config)):
            out_of_reach |= finding.check == "hub" and finding.level is Level.FAULT
            yield finding


def count_in_words(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"


def show(out: TextIO, finding: Finding) -> None:
    """A finding for people, as soon as it is there."""
    least, most = COLUMNS
    width = max(least, min(most, shutil.get_terminal_size().columns - 1))
    text = "\n".join(finding.lines(width))
    if out.isatty():
        text = text.replace(finding.level, f"{COLOURS[finding.level]}{finding.level}{PLAIN}", 1)
    out.write(f"{text}\n")
    out.flush()
