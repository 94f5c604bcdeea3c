"""Checks of the machine: Python, torch and its GPUs, the processor, threads, memory, open files."""

from __future__ import annotations

import math
import os
import platform
import resource
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
from packaging.requirements import Requirement

from scheduler.cgroups import memory_limit, read_text
from server.cli.doctor.findings import Finding, fault, ok, size, warning
from server.config.doctor_options import DoctorConfig
from server.engine.launcher import engine_environment

CHECKUP = (sys.executable, "-P", "-m", "scheduler.checkup")
CHECKUP_SECONDS = 240.0  # it may have to compile
SMI_SECONDS = 20.0
FEW_FILES = 1024
TORCH_PAGE = "see Torch in the README"


def python(config: DoctorConfig) -> Iterator[Finding]:
    """The interpreter and the packages that are there besides the required ones."""
    told = f"{platform.python_version()}, {platform.system()} {platform.machine()}"
    if sys.maxsize < 2**32:
        yield fault("python", f"{told}: a 32-bit build", "use a 64-bit Python")
    else:
        yield ok("python", told)
    there = sorted(extra for extra, packages in extras().items() if all(map(is_installed, packages)))
    yield ok("extras", ", ".join(there) if there else "none installed", installed=there)


def extras() -> dict[str, list[str]]:
    """The names of the packages of each extra."""
    found: dict[str, list[str]] = {}
    try:
        texts = requires("warmturn") or []
    except PackageNotFoundError:
        return {}
    for requirement in map(Requirement, texts):
        marker = str(requirement.marker or "")
        if "extra ==" in marker:
            name = marker.rpartition("extra ==")[2].split()[0].strip("\"')")
            found.setdefault(name, []).append(requirement.name)
    return found


def is_installed(package: str) -> bool:
    """Whether a package is there."""
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True


def torch(config: DoctorConfig, command: Sequence[str] = CHECKUP) -> Iterator[Finding]:
    """torch, in a process of its own: whether it suits the GPUs, what it finds of the processor, its kernels."""
    environment = engine_environment() | ({"CUDA_VISIBLE_DEVICES": ""} if config.device == "cpu" else {})
    try:
        ran = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=CHECKUP_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        yield fault("torch", f"importing it took more than {CHECKUP_SECONDS:.0f} seconds", "check the disk")
        return
    if ran.returncode:
        last = (ran.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        yield fault("torch", f"it cannot be used: {last}", f"reinstall it: {TORCH_PAGE}")
        return
    facts = msgspec.json.decode(ran.stdout)
    build = f"built for CUDA {facts['cuda']}" if facts["cuda"] else "built without CUDA"
    yield ok("torch", f"{facts['torch']}, {build}; transformers {facts['transformers']}", cuda=facts["cuda"])
    yield gpu(config, facts, nvidia_smi())
    if facts["gpus"]:
        yield triton()
    elif config.device != "cuda":
        yield from processor(facts)
        yield threads(facts["threads"], facts["processors"], "OMP_NUM_THREADS" in os.environ)


def triton() -> Finding:
    """What Triton needs to make the kernels for a GPU."""
    slower = "torch's own functions run instead, slower"
    if find_spec("triton") is None:
        return warning(
            "kernels", f"there is no Triton: {slower}", "pip install triton, the version that torch asks for"
        )
    named = os.environ.get("CC")  # as Triton looks for it
    found = shutil.which(named) if named is not None else shutil.which("gcc") or shutil.which("clang")
    if found is None:
        return warning(
            "kernels",
            f"Triton cannot compile them without a C compiler: {slower}",
            "install one (Debian: apt-get install gcc libc6-dev) or name one with CC",
        )
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")  # the latter is Debian's packages
    header = Path(sysconfig.get_paths(scheme)["include"]) / "Python.h"
    if not header.is_file():
        return warning(
            "kernels",
            f"Triton cannot compile them without {header}: {slower}",
            "install Python's headers (Debian: apt-get install python3-dev)",
        )
    return ok("kernels", f"Triton compiles them with {found}")


def nvidia_smi() -> list[str]:
    """A line per GPU that the driver tells of: name, memory, driver; none where there is no nvidia-smi or no GPU."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    query = [program, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        ran = subprocess.run(query, capture_output=True, text=True, timeout=SMI_SECONDS, check=False)
    except (subprocess.TimeoutExpired, OSError):
        return []
    return [] if ran.returncode else [line.strip() for line in ran.stdout.splitlines() if line.strip()]


def gpu(config: DoctorConfig, facts: dict[str, Any], seen: list[str]) -> Finding:
    """Whether torch computes on what the driver has. Without a GPU that is a fault only where one was asked for."""
    bad = fault if config.device == "cuda" else warning
    devices: list[dict[str, Any]] = facts["gpus"]
    used = devices[: config.tensor_parallel]
    broken = next((device for device in used if device["error"]), None)
    if broken is not None:
        return fault(
            "gpu",
            f"{broken['name']}: {broken['error']}",
            f"a build of torch with code for this GPU is needed, or the GPU is in use: {TORCH_PAGE}",
            gpus=devices,
        )
    if devices:
        told = "; ".join(f"{d['name']}, {size(d['free'])} of {size(d['memory'])} free" for d in devices)
        if len(devices) < config.tensor_parallel:
            return fault("gpu", told, f"--tensor-parallel {config.tensor_parallel} needs as many GPUs", gpus=devices)
        advice = "--device cpu is what was tried; `make test-cuda` in a source tree tries this GPU"
        return warning("gpu", f"{told}; no version of warmturn has run on a GPU yet", advice, gpus=devices)
    if seen and facts["cuda"] is None and config.device != "cpu":
        return bad("gpu", f"{seen[0]}, and torch is built without CUDA", f"install a build with it: {TORCH_PAGE}")
    if seen and config.device != "cpu":
        advice = (
            "update the driver, or install a build of torch for the CUDA version that it knows (nvidia-smi shows it)"
        )
        if os.environ.get("CUDA_VISIBLE_DEVICES") is not None:
            advice = "CUDA_VISIBLE_DEVICES hides GPUs: unset it; else " + advice
        return bad("gpu", f"{seen[0]}, and torch finds none: {facts['trouble'] or 'no device'}", advice)
    if config.device == "cuda":
        return fault(
            "gpu",
            f"none was found, and --device cuda needs one: {facts['trouble'] or 'torch is built without CUDA'}",
            "in a container: start it with GPUs (docker run --gpus all); otherwise install NVIDIA's driver",
        )
    return ok("gpu", "none, the model runs on the CPU" if config.device == "auto" else "not asked for")


def processor(facts: dict[str, Any]) -> Iterator[Finding]:
    """What the processor can do for a model, and the kernels that make use of it."""
    units = [name for name, there in (("AVX512_BF16", facts["bfloat16"]), ("AMX", facts["matrix_units"])) if there]
    told = f"{facts['instructions']}{''.join(f', {name}' for name in units)}"
    told += f"; memory gives {facts['bandwidth'] / 1e9:.1f} GB/s"
    figures = {"instructions": facts["instructions"], "units": units, "bandwidth": facts["bandwidth"]}
    if facts["instructions"] in ("AVX512", "AVX2") or platform.machine() not in ("x86_64", "AMD64"):
        yield ok("cpu", told, **figures)
    else:
        yield warning("cpu", told, "without AVX2 a model is very slow: use a processor that has it", **figures)
    missing = {name: reason for name, reason in facts["kernels"].items() if reason is not None}
    if not missing:
        yield ok("kernels", "compiled: " + ", ".join(facts["kernels"]))
        return
    why = "; ".join(f"{name}: {reason}" for name, reason in missing.items())
    yield warning(
        "kernels",
        f"torch's own functions run instead, at half the speed or less: {why}",
        "install a C++ compiler (Debian: apt-get install g++) or name one with CXX; the cache folder "
        "($XDG_CACHE_HOME/warmturn or ~/.cache/warmturn) must be this user's alone",
        missing=missing,
    )


def threads(count: int, limit: float, chosen: bool) -> Finding:
    """Compute threads against the processors that this process may use."""
    told = f"{count} compute threads, {limit:g} processors may be used"
    figures = {"threads": count, "processors": limit}
    if count > math.ceil(limit):
        return warning(
            "threads", told, f"threads wait for each other: set OMP_NUM_THREADS={max(1, math.floor(limit))}", **figures
        )
    if count < math.floor(limit) and not chosen:
        return warning("threads", told, f"set OMP_NUM_THREADS={math.floor(limit)} to use all", **figures)
    return ok("threads", told, **figures)


def memory(config: DoctorConfig) -> Iterator[Finding]:
    """Memory of the machine, and what this process's cgroups allow of it: the engine takes its shares of the less."""
    total, free = machine_memory()
    limit = min(total, memory_limit() or total)
    told = f"{size(total)}, {size(free)} available"
    if limit < total:
        told += f"; limited to {size(limit)} here"
    yield ok("memory", told, total=total, available=free, limit=limit)


def machine_memory() -> tuple[int, int]:
    """Bytes of memory, and how many of them are to be had now (Linux; zeros elsewhere)."""
    lines = dict(line.split(":", 1) for line in read_text(Path("/proc/meminfo")).splitlines() if ":" in line)
    total, free = (int(lines.get(name, "0 kB").split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    return total, free


def files(config: DoctorConfig) -> Iterator[Finding]:
    """Open files: every connection is one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    told = "open files are not limited" if hard == resource.RLIM_INFINITY else f"{hard} may be open"
    if hard != resource.RLIM_INFINITY and hard < FEW_FILES:
        yield warning(
            "files", told, "raise the hard limit (ulimit -Hn), as every connection is an open file", limit=hard
        )
    else:
        yield ok("files", told, limit=hard)
