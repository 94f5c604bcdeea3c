"""Compile the kernels for every processor that an image may meet: ``python kernels.py``, when the image is built.

What is compiled for one set of instructions is no use to a processor that has others (see ``cache.compiler``), and the
machine that builds an image is seldom the one that runs it.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator
from unittest import mock

from cache import compiler
from scheduler.checkup import sources

SOURCES = sources()


def instruction_sets() -> Iterator[list[str]]:
    """What the compiler is told for each kind of processor of this architecture."""
    yield []
    if platform.machine() == "x86_64":
        for capability, flags in compiler._INSTRUCTIONS.items():
            known = flags.split()
            yield known
            for more in compiler._MORE[capability].values():
                known = [*known, *more.split()]
                yield known


def main() -> int:
    """Raises ``compiler.NotBuilt``."""
    for flags in instruction_sets():
        with mock.patch.object(compiler, "_instructions", return_value=flags):
            for source in SOURCES:
                print(compiler.build(source).name, *flags, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
