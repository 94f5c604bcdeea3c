"""Measures the memory that loading a packed checkpoint takes: ``PYTHONPATH=tests python -m tools.load_memory``.

For each format a random model is written, and loaded by a process of its own on the CPU. What it has then, and what it
had at most, is compared with the file; what Python and the libraries take before is left out.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from packed_models import CASES, CONFIGS, write_case

from tools.tables import table

_LAYERS = {"llama": 8, "qwen3_moe": 4, "gpt_oss": 4}
_SIZES = {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "head_dim": 64, "vocab_size": 4096}
_EXPERTS = {"moe_intermediate_size": 512, "num_experts": 16, "num_local_experts": 16, "num_key_value_heads": 8}
_OF_GPT_OSS = {"intermediate_size": 512}
_FORMATS = [
    "GPTQ",
    "AWQ",
    "compressed-tensors",
    "AutoRound",
    "fp8",
    "fp8 of qwen",
    "mxfp4",
    "nf4",
    "torchao of 4 bits",
    "torchao of 4 bits in bytes",
]
_LOAD = """
import gc, json, sys, time
from scheduler.accel.cpu.program_kernel import kernel
from scheduler.engine_config import EngineConfig
from scheduler.model.loader import load
def status(name):
    line = next(line for line in open("/proc/self/status") if line.startswith(name))
    return int(line.split()[1]) * 1024
kernel()
open("/proc/self/clear_refs", "w").write("5")
base, began = status("VmRSS"), time.process_time()
loaded = load(EngineConfig("", sys.argv[1], device="cpu", dtype="bfloat16"), lambda _: None)
gc.collect()
print(json.dumps([status("VmHWM") - base, status("VmRSS") - base, time.process_time() - began]))
"""


def measured(name: str) -> Iterator[object]:
    """A row of the table: the format, bytes of the file, at most, after, CPU seconds."""
    architecture = CASES[name][0]
    config = CONFIGS[architecture]()
    sizes = _SIZES | _EXPERTS | (_OF_GPT_OSS if architecture == "gpt_oss" else {})
    for key, value in {**sizes, "num_hidden_layers": _LAYERS[architecture]}.items():
        setattr(config, key, value)
    if architecture == "gpt_oss":
        config.layer_types = ["full_attention"] * config.num_hidden_layers
    with tempfile.TemporaryDirectory() as scratch:
        write_case(Path(scratch), name, config)
        size = (Path(scratch) / "packed" / "model.safetensors").stat().st_size
        command = [sys.executable, "-c", _LOAD, str(Path(scratch) / "packed")]
        ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    most, after, seconds = json.loads(ran.stdout.splitlines()[-1])
    yield from (name, architecture, f"{size / 1e6:.0f}")
    yield from (f"{most / 1e6:.0f} ({most / size:.2f})", f"{after / 1e6:.0f} ({after / size:.2f})", f"{seconds:.0f}")


def main(names: list[str]) -> None:
    """Print the table, of the formats named or of all."""
    began = time.monotonic()
    rows = [list(measured(name)) for name in names or _FORMATS]
    print(table("format | model | file, MB | at most, MB (by file) | after, MB (by file) | CPU seconds", rows))
    print(f"\n{time.monotonic() - began:.0f} seconds in all")


if __name__ == "__main__":
    main(sys.argv[1:])
