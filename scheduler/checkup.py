"""Reports torch's version, devices, CPU features and compiled kernels: ``python -m scheduler.checkup`` prints it as one
line of JSON.

``warmturn doctor`` runs it in a process of its own, because the server process does not import torch. Missing kernels
are compiled, as the engine would.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from pathlib import Path

import msgspec
import torch
import transformers

import cache
from cache.compiler import NotBuilt, build
from cache.error_line import first_line
from cache.memory import huge
from scheduler import cores

_READ = 1 << 28  # bytes that are read to measure memory: far more than any cache holds
_TRIES = 3


class Gpu(msgspec.Struct, frozen=True):
    """A device that torch sees. ``error``: why nothing can be computed on it, in torch's words."""

    name: str
    memory: int  # bytes
    free: int
    capability: str
    error: str | None = None


class Checkup(msgspec.Struct, frozen=True):
    """``cuda``: the CUDA version that torch was built for, None for a build without; ``trouble``: why such a build
    finds no GPU. ``kernels``: for each compiled kernel None, or why there is none. ``bandwidth``: bytes a second that
    all threads together read from memory. ``threads``: how many compute, at most; ``processors``: how many may be used.
    """

    torch: str
    transformers: str
    cuda: str | None
    gpus: tuple[Gpu, ...]
    trouble: str | None
    instructions: str
    matrix_units: bool
    bfloat16: bool
    threads: int
    processors: float
    bandwidth: float
    kernels: dict[str, str | None]


def checkup() -> Checkup:
    """Look and measure."""
    cores.share()
    trouble = None if torch.version.cuda is None else _trouble()
    count = torch.cuda.device_count() if torch.version.cuda is not None and trouble is None else 0
    return Checkup(
        torch=str(torch.__version__),
        transformers=transformers.__version__,
        cuda=torch.version.cuda,
        gpus=tuple(_gpu(number) for number in range(count)),
        trouble=trouble,
        instructions=torch.backends.cpu.get_cpu_capability(),
        matrix_units=torch.cpu._is_amx_tile_supported(),
        bfloat16=torch.cpu._is_avx512_bf16_supported(),
        threads=torch.get_num_threads(),
        processors=cores.processors(),
        bandwidth=_bandwidth(),
        kernels={source.stem: _find_missing(source) for source in sources()},
    )


def sources() -> list[Path]:
    """The kernels that are compiled on the machine that runs them."""
    folders = (Path(cache.__file__).parent, Path(__file__).parent)
    return [source for folder in folders for source in sorted(folder.rglob("kernels/*.cpp"))]


def _trouble() -> str | None:
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:  # no driver, one that is too old, no GPU
        return first_line(error)
    return None


def _gpu(number: int) -> Gpu:
    facts = torch.cuda.get_device_properties(number)
    error, free = None, 0
    try:
        free = torch.cuda.mem_get_info(number)[0]
        torch.ones(2, device=f"cuda:{number}").sum().item()
    except RuntimeError as failed:  # a build without code for this GPU, one that others hold, a broken one
        error = first_line(failed)
    return Gpu(facts.name, facts.total_memory, free, f"{facts.major}.{facts.minor}", error)


def _bandwidth() -> float:
    data = huge.empty(_READ // 4, torch.float32).fill_(1)
    seconds = []
    for _ in range(_TRIES):
        began = time.perf_counter()
        data.sum()
        seconds.append(time.perf_counter() - began)
    return _READ / min(seconds)


def _find_missing(source: Path) -> str | None:
    try:
        build(source)
    except NotBuilt as error:
        return str(error)
    return None


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # torch warns of what is told here
    sys.stdout.write(msgspec.json.encode(checkup()).decode() + os.linesep)
