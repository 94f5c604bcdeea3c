"""What an engine on a CPU does not import, and that whoever wants it nevertheless gets it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

START = """
import json, sys
from scheduler.import_savings import spare
from scheduler.protocol import EngineConfig

config = EngineConfig(address="", model=sys.argv[1], device="cpu", tensor_parallel=int(sys.argv[2]))
spare(config)
import torch
from scheduler import process
"""
LOAD = (
    START
    + """
loaded = process.load(config, lambda _: None)
heavy = ("torch._inductor", "torch.distributed.tensor", "torch.distributed.fsdp")
print(json.dumps([loaded.verdict.report, [name for name in heavy if name in sys.modules]]))
"""
)
COMPILE = (
    START
    + """
from pathlib import Path
import transformers
from transformers import models
from transformers.utils.import_utils import create_import_structure_from_path, spread_import_structure

before = type(sys.modules["torch._dynamo"]).__name__
import torch._dynamo.utils
compiled = torch.compile(lambda x: x * 2 + 1, backend="eager")(torch.ones(2)).tolist()
scanned = spread_import_structure(create_import_structure_from_path(str(Path(transformers.__file__).parent / "models")))
names = {name for files in scanned.values() for file in files.values() for name in file}
same = sys.modules["torch._dynamo.utils"] is torch._dynamo.utils and torch._dynamo.eval_frame is not None
after = type(sys.modules["torch._dynamo"]).__name__
print(json.dumps([before, after, compiled, same, sorted(names - set(dir(models)))]))
"""
)


def run(program: str, ranks: int = 1) -> Any:
    """What a program prints as JSON, in a fresh interpreter."""
    command = [sys.executable, "-W", "ignore", "-c", program, str(ROOT / "server" / "demo"), str(ranks)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_model_is_loaded_and_measured_without_compiler_and_distribution() -> None:
    report, heavy = run(LOAD)
    assert heavy == []
    assert "packed" in report


def test_the_compiler_is_there_for_whoever_uses_it_and_so_is_every_model() -> None:
    before, after, compiled, same, unknown = run(COMPILE)
    assert (before, after) == ("_Dynamo", "module")
    assert compiled == [3.0, 3.0]
    assert same
    assert unknown == []
