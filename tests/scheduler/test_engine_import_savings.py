"""What an engine on a CPU does not import, and that whoever wants it nevertheless gets it."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from scheduler import engine_import_savings

pytestmark = pytest.mark.wide

ROOT = Path(__file__).resolve().parents[2]

START = """
import json, sys
from scheduler.engine_import_savings import leave_out_unused
from scheduler.engine_config import EngineConfig

config = EngineConfig(address="", model=sys.argv[1], device="cpu", tensor_parallel=int(sys.argv[2]))
leave_out_unused(config)
import pytest
import torch
from scheduler import process
"""
LOAD = (
    START
    + """
loaded = process.load(config, lambda _: None)
heavy = ("torch._inductor", "torch.distributed.tensor", "torch.distributed.fsdp", "torch._prims", "sympy")
there = [name for name in heavy if name in sys.modules]
from scheduler.model.weights import AllOperators

def shape_of(lengths):
    return list(torch.roll(torch.empty(*lengths, device="meta"), 1).shape)

try:
    shape_of((2, 3))
    refused = False
except NotImplementedError:
    refused = True
with AllOperators():
    drawn = torch.rand(2, generator=torch.Generator().manual_seed(1)).tolist()
    print(json.dumps([loaded.verdict.report, there, refused, shape_of((2, 3)), drawn]))
"""
)
COMPILE = (
    START
    + """
before = type(sys.modules["torch._dynamo"]).__name__
import torch._dynamo.utils
compiled = torch.compile(lambda x: x * 2 + 1, backend="eager")(torch.ones(2)).tolist()
same = sys.modules["torch._dynamo.utils"] is torch._dynamo.utils and torch._dynamo.eval_frame is not None
same &= torch._dynamo.convert_frame.counters is torch._dynamo.utils.counters  # it ran once
after = type(sys.modules["torch._dynamo"]).__name__
print(json.dumps([before, after, compiled, same, "torch._prims" in sys.modules]))
"""
)
DISTRIBUTION = (
    START
    + """
class Other(torch.Tensor):
    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return torch.ones(3)

other = torch.Tensor._make_wrapper_subclass(Other, (2,))
found = (other + 1).tolist()
before = "torch.distributed.tensor" in sys.modules
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Shard
after = isinstance(other, DTensor), issubclass(DTensor, torch.Tensor), Shard is torch.distributed.tensor.Shard
print(json.dumps([found, before, *after]))
"""
)
NAMES = """
import json, sys
from pathlib import Path

if sys.argv[2] == "2":
    from scheduler import model_names
    model_names.read_quickly()
sys.modules["torch"] = None
import transformers
from transformers import models

known = [[sorted(p._modules), p._class_to_module, sorted(p.__all__)] for p in (transformers, models)]
print(json.dumps([known, transformers.utils.import_utils.fetch__all__.__qualname__]))
"""


def run(program: str, ranks: int = 1) -> Any:
    """What a program prints as JSON, in a fresh interpreter."""
    command = [sys.executable, "-W", "ignore", "-c", program, str(ROOT / "server" / "demo"), str(ranks)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_a_model_is_loaded_and_measured_without_compiler_and_distribution() -> None:
    """And an operator that needs Python for weights without memory gets it."""
    report, there, refused, shape, drawn = run(LOAD)
    assert there == []
    assert "packed" in report
    assert refused
    assert shape == [2, 3]
    assert drawn == torch.rand(2, generator=torch.Generator().manual_seed(1)).tolist()


@pytest.mark.slow
def test_the_compiler_is_there_for_whoever_uses_it_with_the_operators_that_it_follows() -> None:
    before, after, compiled, same, operators = run(COMPILE)
    assert (before, after) == ("_Dynamo", "module")
    assert compiled == [3.0, 3.0]
    assert same
    assert operators


@pytest.mark.slow
def test_a_tensor_of_another_class_needs_no_distribution_which_is_there_for_whoever_imports_it() -> None:
    assert run(DISTRIBUTION) == [[1.0, 1.0, 1.0], False, False, True, True]


def test_the_names_of_all_models_are_those_that_transformers_reads() -> None:
    (known, theirs), (quickly, ours) = run(NAMES, 1), run(NAMES, 2)
    assert (theirs, "Quick" in ours) == ("fetch__all__", True)
    assert all(len(modules) > 1000 for modules, *_ in known)
    assert quickly == known


def test_the_module_of_a_frame_is_found_without_a_look_at_all_files(monkeypatch: pytest.MonkeyPatch) -> None:
    def stats() -> int:
        return len(vars(inspect)["modulesbyfile"])

    frame = sys._getframe()
    for known in ("modulesbyfile", "_filesbymodname"):
        monkeypatch.setattr(inspect, known, {})
    with engine_import_savings.callers_found_quickly():
        assert inspect.getmodule(frame) is sys.modules[__name__]
        assert inspect.getmodule(Path) is sys.modules[Path.__module__]
        assert inspect.getframeinfo(frame).lineno == frame.f_lineno
        assert stats() == 0
    assert inspect.getmodule(frame) is sys.modules[__name__]
    assert stats() > 0
