"""Which decode steps can be captured as CUDA graphs, found without a GPU: the modeling code runs on torch's ``meta``
device, whose tensors have no values, so whatever reads one or copies it to the host is seen.

    python tests/architectures/capture.py [names...] [--out FILE]

Prints a line per causal entry of transformers and the counts; ``--out`` writes the table as Markdown. Not seen: what
waits inside of a CUDA library without an operation of torch's, and what a driver refuses.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import argparse
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from textwrap import fill
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import transformers
from architectures.build import ENTRIES, build, family_of
from torch.utils._python_dispatch import TorchDispatchMode

from cache.attention import packed_attention
from cache.attention.absorbed import Absorbed
from cache.attention.backend import Signature
from cache.attention.decode import DecodeStep, Tables
from cache.attention.decode_rows import RowsStep
from cache.attention.triton import TritonBackend
from cache.error_line import first_line
from cache.memory.memory_tier import MemoryTier
from cache.pages import state as states
from cache.pages.layers import read_layers
from scheduler.accel.gpu.captured_experts import waitless_experts
from scheduler.accel.gpu.constants import waitless_constants
from scheduler.forward.modes import PackedMode
from scheduler.forward.rope import LongRope
from scheduler.model.decode_graphs import DeviceRead, DeviceReadWatch
from scheduler.model.probe import UnsupportedModel, probe
from scheduler.model.verdict import Verdict

_ROWS, _PAGES, _PAGE = 4, 8, 16
_META = torch.device("meta")


class Found(NamedTuple):
    """What one entry came to: the ``mode`` it runs in, the ``operations`` of a decode step that can be captured, or the
    ``reason`` why none can.
    """

    name: str
    family: str
    mode: str
    operations: int = 0
    reason: str = ""

    @property
    def captured(self) -> bool:
        """Whether its decode steps can be captured."""
        return not self.reason

    def line(self) -> str:
        """For people who watch."""
        return f"{self.name:28} {self.mode:10} {self.reason or f'captured, {self.operations} operations'}"


class Everything(TritonBackend):
    """The Triton backend without its kernel: it takes what the kernel takes, and launches nothing. A launch is no
    operation of torch's.
    """

    def __init__(self) -> None:
        self.refused: list[Signature] = []
        self._self_test: Any = self

    def passes(self, signature: Signature) -> bool:
        """In place of the self-test, which needs the device."""
        return True

    def fits(self, signature: Signature) -> bool:
        """See ``Backend``."""
        if super().fits(signature):
            return True
        self.refused.append(signature)
        return False

    def attend(self, *args: Any) -> None:
        """Nothing."""


class Operations(TorchDispatchMode):
    """Counts operations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Every operation."""
        self.count += 1
        return func(*args, **(kwargs or {}))


def look(name: str) -> Found:
    """Whether the decode steps of a causal entry can be captured."""
    try:
        model = build(name, "causal")
        family = family_of(model)
        verdict = probe(model, read_layers(model.config.get_text_config(decoder=True)), _PAGE, LongRope(model))
    except UnsupportedModel:
        return Found(name, "-", "refused", reason="refused at load")
    except Exception as error:
        return Found(name, "-", "not built", reason=first_line(error, 120))
    verdict.mode.remove()
    if verdict.mode.graphed is None:
        stored = sum(layer.stores for layer in verdict.mode.layers)
        in_place = f"keeps states, and reads pages in place in {len(verdict.mode.in_place)} of {stored} layers"
        reason = in_place if verdict.mode.compiles else f"runs {verdict.mode.name}"
        return Found(name, family, verdict.mode.name, reason=reason)
    operations, reason = walk(model, verdict)
    return Found(name, family, verdict.mode.graphed.name, operations, reason)


def walk(model: Any, verdict: Verdict) -> tuple[int, str]:
    """The operations of a decode step of four sessions on the ``meta`` device, and what is in the way of its capture.
    In bfloat16; with states, whose types were found in it, in float32.
    """
    backend = Everything()
    dtype = torch.float32 if verdict.mode.stateful else torch.bfloat16
    with on_meta(model, verdict, backend, dtype) as mode:
        shapes = {index: shape._replace(dtype=dtype) for index, shape in verdict.shapes.items()}
        tier = MemoryTier(_ROWS * _PAGES, _PAGE, _META, shapes, scratch=True)
        if mode.stateful:
            mode.rows.reserve(states.move(verdict.skeleton, _META), _ROWS)
        tables, graphed = [Tables(tier, _ROWS, _PAGES)], mode.graphed
        in_place = graphed is mode
        step = DecodeStep(tier, tables, _ROWS) if in_place else RowsStep(tier, tables, _ROWS, _PAGES)
        keep = torch.arange(_ROWS, device=_META)

        def forward() -> None:
            try:
                with waitless_experts(mode.model), waitless_constants(_META):
                    graphed.forward(step, keep)
            finally:
                step.origins.clear()

        try:
            forward()  # whatever is made the first time
            with DeviceReadWatch():
                forward()
            with Operations() as seen:
                forward()
        except IndexError:  # of rows whose states are not what they were
            return 0, "a step leaves states elsewhere than where they were"
        except (DeviceRead, RuntimeError, NotImplementedError, ValueError, TypeError) as error:
            return 0, first_line(error, 120)
    if mode.rows.refused:
        return 0, "a step leaves states elsewhere than where they were"
    if backend.refused:
        return 0, f"the kernel does not take {len(backend.refused)} layers, heads of {backend.refused[0].dim}"
    return seen.count, ""


@contextmanager
def on_meta(model: Any, verdict: Verdict, backend: Any, dtype: torch.dtype) -> Iterator[Any]:
    """The mode of ``verdict`` on a model like ``model`` that has no values, whose attention is ``backend``."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with _META:
            twin = type(model)(model.config).eval()
    finally:
        torch.set_default_dtype(before)
    trace, names = verdict.mode.trace, {module: name for name, module in model.named_modules()}
    mixers = tuple(twin.get_submodule(names[module]) for module in trace.mixers)
    mode = type(verdict.mode)(twin, verdict.mode.layers, replace(trace, mixers=mixers))
    mode.in_place, mode.joined = verdict.mode.in_place, verdict.mode.joined
    if isinstance(mode, PackedMode) and isinstance(verdict.mode, PackedMode):
        absorbed = verdict.mode.attention.absorbed
        mode.attention.absorbed = {layer: like(one, dtype) for layer, one in absorbed.items()}
    with patch.object(packed_attention, "backends", lambda device: [backend]), torch.no_grad():
        mode.install()
        try:
            yield mode
        finally:
            mode.remove()


def like(absorbed: Absorbed, dtype: torch.dtype) -> Absorbed:
    """One that has no values."""
    keys, values = (part.to(_META, dtype) for part in (absorbed.keys, absorbed.values))
    return replace(absorbed, keys=keys, values=values)


def table(found: list[Found]) -> str:
    """The page ``docs/captured.md``."""
    captured = [one for one in found if one.captured]
    rest: defaultdict[str, list[str]] = defaultdict(list)
    for one in found:
        if not one.captured:
            rest[one.reason.replace("|", " ")].append(one.name)
    families = Counter(one.family for one in captured).most_common()
    version = torch.__version__.partition("+")[0]
    lines = [
        "# Decode steps as CUDA graphs\n",
        f"Written by `make test-capture` with transformers {transformers.__version__} and torch {version}. Each",
        "model's own code runs a decode step of four sessions on torch's `meta` device, where whatever",
        "reads a value is an error. No GPU was used: this says which steps can be captured, not which were.\n",
        "The keys of sessions are read where they lie, or gathered to a batch where the table says *rows*.\n",
        f"{len(captured)} of the {len(found)} causal entries of transformers can be captured:",
        fill(", ".join(f"{count} {family}" for family, count in families) + ".", 100) + "\n",
        "| outcome | entries |",
        "|---|---|",
        f"| captured | {', '.join(one.name for one in captured if one.mode != 'rows')} |",
        f"| captured, as rows | {', '.join(one.name for one in captured if one.mode == 'rows')} |",
    ]
    lines += [f"| {reason} | {', '.join(rest[reason])} |" for reason in sorted(rest, key=lambda r: -len(rest[r]))]
    return "\n".join(lines) + "\n"


def main() -> int:
    """The command line; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    found = []
    for name in (name for name, kind in ENTRIES if kind == "causal" and (not options.names or name in options.names)):
        found.append(look(name))
        print(found[-1].line(), flush=True)
    print(f"{sum(one.captured for one in found)} of {len(found)} can be captured")
    if options.out is not None:
        options.out.write_text(table(found), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
