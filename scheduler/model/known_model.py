"""``KnownModel``: what earlier loads of a model found out, kept in a file by the model's digest.

A verdict that this very program gave on this kind of machine is not measured on the whole again: a few tokens are
compared with what a from-scratch forward said of them then.
"""

from __future__ import annotations

import hashlib
import os
import platform
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Self

import msgspec
import torch
import transformers

from scheduler.accel.cpu.fusion import KnownPrograms
from scheduler.accel.cpu.program_kernel import kernel
from scheduler.forward.trace import KnownTrace

_SOURCES = Path(__file__).parents[2]  # what holds the packages named below
_PACKAGES = ("cache", "scheduler")
_KINDS = frozenset({".py", ".h", ".cpp"})


class MeasuredVerdict(msgspec.Struct, frozen=True):
    """A verdict that was measured on the whole. ``made_by``: see ``measured_by``. ``logits``: float32 ``[tokens,
    columns]`` of a from-scratch forward, as ``Measurement.sample`` takes them. The others are as in ``Verdict``;
    ``rounding`` is what rounding alone may do, ``windowed`` whether there are ``windows``, ``trace`` what a plain
    forward showed, None where it is to be shown again, ``in_place`` whether all layers read their keys in place, and
    ``programs`` which modules run as programs.
    """

    made_by: str
    rounding: float
    token_bytes: int
    crossed: tuple[str, ...]
    unproven: str
    windowed: bool
    logits: bytes
    trace: KnownTrace | None = None
    in_place: bool = False
    programs: KnownPrograms = KnownPrograms()


class KnownModel(msgspec.Struct):
    """The mode to measure first, as ``describe`` says it, which ways to multiply are faster, and the verdict."""

    mode: str = ""
    answers: dict[str, bool] = {}
    measured: MeasuredVerdict | None = None

    @classmethod
    def read(cls, path: Path | None) -> Self:
        """What the file says; nothing where there is none, or it cannot be read."""
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls) if path is not None else cls()
        except (OSError, msgspec.MsgspecError):
            return cls()

    def write(self, path: Path | None) -> None:
        """Keep it. Losing it costs time at the next load, so no failure matters."""
        with suppress(OSError):
            if path is not None and self.read(path) != self:
                path.parent.mkdir(parents=True, exist_ok=True)
                partial = path.with_suffix(f".{os.getpid()}")
                partial.write_bytes(msgspec.json.encode(self))
                partial.replace(path)


def measured_by(context: int | None) -> str:
    """A digest of what a measurement depends on beside the model: this program, its libraries, the processor, threads,
    and the length of the longest timelines.
    """
    compiled = kernel()
    facts = (
        *(sources(), torch.__version__, transformers.__version__, platform.python_version()),
        *(platform.machine(), torch.backends.cpu.get_cpu_capability(), sorted(torch.cpu.get_capabilities().items())),
        *(compiled.build if compiled is not None else "", torch.get_num_threads(), context),
    )
    return hashlib.blake2b(repr(facts).encode(), digest_size=16).hexdigest()


def packed_by() -> str:
    """A digest of what the tiles of a packed weight depend on beside the weight: this program and its kernel."""
    compiled = kernel()
    facts = sources(), compiled.build if compiled is not None else ""
    return hashlib.blake2b(repr(facts).encode(), digest_size=16).hexdigest()


@cache
def sources() -> str:
    """A digest of the sources that a forward runs through."""
    found = hashlib.blake2b(digest_size=16)
    for package in _PACKAGES:
        for path in sorted((_SOURCES / package).rglob("*")):
            if path.suffix in _KINDS:
                found.update(f"{path.relative_to(_SOURCES)} ".encode() + path.read_bytes())
    return found.hexdigest()
