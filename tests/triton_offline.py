"""``python triton_offline.py CHIP few|all``: compiles the Triton kernels for a GPU that is not there, each variant as
the product launches it; prints what each needs, one JSON object a line.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import triton  # type: ignore[import-not-found,unused-ignore]
from triton.backends.compiler import GPUTarget  # type: ignore[import-not-found,unused-ignore]
from triton.runtime import driver  # type: ignore[import-not-found,unused-ignore]

from cache.attention.backend import Signature
from cache.attention.self_test import LAYERS, StepSpec, random_step
from cache.attention.triton import TritonBackend
from cache.memory.codec import Codec
from cache.memory.memory_tier import PageShape
from cache.memory.pair_kernel import PairKernel
from cache.memory.record_kernel import RecordKernel
from cache.memory.token_record import TokenRecord
from cache.pages.layers import Reach, ScoreOptions
from scheduler.accel.gpu.truncation_kernel import TruncationKernel

CPU = torch.device("cpu")
FULL_PRECISION, HALVES = torch.float32, (torch.bfloat16, torch.float16)
SHAPES = (  # heads, key heads, numbers of a key's head and of a value's
    (32, 8, 128, 128),
    (16, 8, 64, 64),
    (8, 1, 256, 256),
    (32, 4, 512, 512),
    (16, 16, 192, 128),
    (6, 2, 24, 24),
    (71, 1, 64, 64),
)
ROWS = ((16, 576, 512), (128, 576, 512), (40, 288, 256))  # heads, numbers of a row of a latent, and of the latent


class Chip:
    """A driver of Triton's for a GPU that is not there."""

    launcher_cls = utils = None

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> Any:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_device_capability(self, device: int = 0) -> tuple[int, int]:
        return self.capability // 10, self.capability % 10

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)

    def is_active(self) -> bool:
        return True

    def map_python_to_cpp_type(self, kind: str) -> str:
        return kind


class Recorded(NamedTuple):
    """A kernel in the place of itself: a launch compiles it."""

    kernel: Any
    name: str
    found: list[tuple[str, Any]]

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **options: self.found.append(
            (self.name, self.kernel.warmup(*args, grid=(1, 1, 1), **options))
        )


def variants(all_of_them: bool) -> Iterator[Signature]:
    """What layers there are: every shape in one dtype or in all, one shape with all that scores can have."""
    for heads, key_heads, dim, width in SHAPES:
        for dtype in (*HALVES, FULL_PRECISION) if all_of_them else HALVES[:1]:
            yield Signature(PageShape(key_heads, dim, key_heads, width, dtype), heads, dim, dtype, False, False, False)
    for dtype in (*HALVES, FULL_PRECISION) if all_of_them else (HALVES[0], FULL_PRECISION):
        yield Signature(PageShape(8, 128, 8, 128, dtype), 32, 128, dtype, True, True, all_of_them)
    for heads, dim, width in ROWS:
        for dtype in (*HALVES, FULL_PRECISION) if all_of_them else HALVES[:1]:
            for scored in (False, True) if all_of_them else (heads == 16,):
                shape = PageShape(1, dim, 1, width, dtype, joined=True)
                yield Signature(shape, heads, dim, dtype, scored, scored, False)
    for codec in (Codec.INT8, Codec.FP8):  # pages of records
        for heads, key_heads, dim, width in SHAPES if all_of_them else SHAPES[:1]:
            for dtype in (*HALVES, FULL_PRECISION) if all_of_them else HALVES[:1]:
                shape = PageShape(key_heads, dim, key_heads, width, dtype, codec=codec)
                yield Signature(shape, heads, dim, dtype, False, False, False)


def launched(signature: Signature, hidden: bool) -> list[tuple[str, Any]]:
    """The kernels of a step with a prompt, short spans and a divided history, compiled."""
    backend, found = TritonBackend(CPU), list[tuple[str, Any]]()
    module = backend._functions
    backend._functions = type(
        "Kernels", (), {name: Recorded(getattr(module, name), name, found) for name in ("attend", "merge")}
    )
    spec = StepSpec(((700, 1), (20, 90), (9, 1)), hidden)
    step = random_step(spec, CPU, signature.shape, torch.Generator().manual_seed(0))
    query = torch.zeros(step.tokens, signature.heads, signature.dim, dtype=signature.dtype).transpose(0, 1)
    scores = ScoreOptions(0.1, 3.0 if signature.capped else None, torch.zeros(1) if signature.sinks else None)
    layer = next(one for one in LAYERS if (one.reach is Reach.CHUNKED) is signature.chunked)
    plan = backend.plan(step, layer, step.numbers, True)
    assert plan is not None
    out = torch.zeros(step.tokens, signature.heads, signature.shape.value_dim, dtype=signature.dtype)
    backend.attend(plan, step, layer, 0, query, scores, out)
    return found


def truncation() -> Iterator[tuple[str, Any]]:
    """The kernel of truncation, compiled."""
    found = list[tuple[str, Any]]()
    truncation_kernel = TruncationKernel()
    kernel = truncation_kernel._kernels.min_probabilities
    truncation_kernel._kernels = SimpleNamespace(min_probabilities=Recorded(kernel, "min_probabilities", found))
    count, share = torch.ones(1, dtype=torch.int64), torch.ones(1, dtype=torch.float64)
    truncation_kernel.find(torch.ones(1, 9000), count, share, torch.zeros(1))
    yield from found


def records() -> Iterator[tuple[str, Any]]:
    """The kernels that store records, compiled."""
    for codec in (Codec.INT8, Codec.FP8):
        found, record = list[tuple[str, Any]](), TokenRecord(8, 128, codec)
        kernel = RecordKernel(record)
        kernel._kernels = SimpleNamespace(store=Recorded(kernel._kernels.store, "store", found))
        pool, index = torch.zeros(2, record.nbytes, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64)
        kernel.store(pool, index, torch.zeros(2, 8, 128, dtype=torch.bfloat16))
        yield from found


def pairs() -> Iterator[tuple[str, Any]]:
    """The kernel that stores keys and values as they are, compiled."""
    found, kernel = list[tuple[str, Any]](), PairKernel(8, 128, 128)
    kernel._kernels = SimpleNamespace(store=Recorded(kernel._kernels.store, "store", found))
    pool, tokens = (torch.zeros(2, 8, 128, dtype=torch.bfloat16) for _ in range(2))
    kernel.store((pool, pool), torch.zeros(2, dtype=torch.int64), tokens, tokens)
    yield from found


def needs(kernel: Any) -> dict[str, Any]:
    """Registers, stack and shared memory, by the assembler."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        tool = os.path.join(os.path.dirname(triton.__file__), "backends/nvidia/bin/cuobjdump")
        told = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    line = next(line for line in told.stdout.splitlines() if "REG:" in line)
    usage = dict(part.split(":", 1) for part in line.split() if ":" in part)
    return {
        "registers": int(usage["REG"]),
        "stack": int(usage["STACK"]),
        "shared": int(kernel.metadata.shared),
        "asynchronous": "cp.async" in kernel.asm["ptx"],
    }


def main(chip: int, all_of_them: bool) -> None:
    """Compile and tell."""
    driver.set_active(Chip(chip))
    for signature in variants(all_of_them):
        shape, seen = signature.shape, set()
        for hidden in (False, True) if signature.capped else (False,):
            for name, kernel in launched(signature, hidden):
                if kernel.hash in seen:
                    continue
                seen.add(kernel.hash)
                variant = [
                    name,
                    str(signature.dtype)[6:],
                    signature.heads,
                    *shape[:4],
                    signature.capped,
                    hidden,
                    shape.codec,
                ]
                told = {"variant": variant, "warps": kernel.metadata.num_warps, **needs(kernel)}
                print(json.dumps(told), flush=True)
    for name, kernel in (*truncation(), *records(), *pairs()):
        print(json.dumps({"variant": [name], "warps": kernel.metadata.num_warps, **needs(kernel)}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2] == "all")
