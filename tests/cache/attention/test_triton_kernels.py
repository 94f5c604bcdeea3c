"""The Triton kernels without a GPU: compiled for GPUs that are not there, and their numbers by Triton's interpreter."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).resolve().parents[2]
SHARED = 99 << 10  # bytes that a block may have on the GPUs that have the least (8.6, 8.9, 12.0)
SPILLED = {80: 64, 89: 64, 90: 0, 100: 32}  # bytes of stack, at most

if importlib.util.find_spec("triton") is None:
    pytest.skip(
        "Triton is not installed (torch's wheels for CPUs have none): pip install triton", allow_module_level=True
    )


def told(script: str, *args: str) -> list[dict[str, Any]]:
    """What a script says, in a process of its own: Triton is set up when it is imported."""
    path = os.pathsep.join([str(TESTS), str(TESTS.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(TESTS / script), *args],
        env={**environment, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=550,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def fits(chip: int, kernel: dict[str, Any], spilling: str = "") -> bool:
    """Whether a kernel needs no more than the chip has; one of the dtype ``spilling`` may have any stack."""
    stack = kernel["stack"] <= SPILLED[chip] or kernel["variant"][1:2] == [spilling]
    return bool(kernel["shared"] <= SHARED and stack and kernel["registers"] * kernel["warps"] * 32 <= 65536)


@pytest.mark.parametrize(
    "chip", [90, *(pytest.param(chip, marks=pytest.mark.slow) for chip in (80, 89, 100))]
)  # a minute each
def test_the_kernels_compile_within_what_a_gpu_has(chip: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    found = told("triton_offline.py", str(chip), "few")
    assert [kernel for kernel in found if not fits(chip, kernel)] == []
    attend = [kernel for kernel in found if kernel["variant"][0] == "attend"]
    assert {kernel["variant"][4] for kernel in attend} >= {24, 64, 128, 256, 512}
    # Decode steps of usual heads read two blocks at a time: of 64 keys and values, 128 numbers of 2 bytes.
    first = next(kernel for kernel in attend if kernel["variant"][2:5] == [32, 8, 128])
    assert first["shared"] >= 2 * 2 * 64 * 128 * 2, first
    assert first["asynchronous"]
    # Those over rows of latents, of 32 rows of 576 numbers, which are keys and values.
    latent = next(kernel for kernel in attend if kernel["variant"][2:6] == [16, 1, 576, 1])
    assert 2 * 32 * 576 * 2 <= latent["shared"] < 2 * 32 * (576 + 512) * 2, latent
    assert latent["asynchronous"]
    assert {kernel["variant"][-1] for kernel in attend} == {"exact", "int8", "fp8"}
    rounded = [kernel for kernel in attend if kernel["variant"][-1] != "exact"]
    assert all(kernel["asynchronous"] for kernel in rounded)  # records are read in 16 bytes at a time
    assert [sum(kernel["variant"][0] == name for kernel in found) for name in ("min_probabilities", "store")] == [1, 3]


@pytest.mark.slow
@pytest.mark.parametrize("chip", [80, 89, 90, 100])
def test_all_variants_compile_within_what_a_gpu_has(chip: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    found = told("triton_offline.py", str(chip), "all")
    assert [kernel for kernel in found if not fits(chip, kernel, spilling="float32")] == []  # slower, and rare


def test_the_kernels_compute_attention() -> None:
    found = told("triton_interpreted.py")
    assert len(found) == 18
    assert sum(case["merged"] > 0 for case in found) >= 5
    for number, case in enumerate(found):
        assert case["error"] <= {"float32": 1e-5, "float16": 3e-3}[case["dtype"]], (number, case)


def test_the_kernel_of_truncation_keeps_what_a_sort_keeps() -> None:
    found = told("triton_truncation.py")
    assert [case["width"] for case in found] == [1, 1, 1, 300, 300, 300, 9001, 9001, 9001]
    assert not any(case["different"] for case in found)


def test_the_kernels_that_store_keys_and_values_store_what_torch_stores() -> None:
    found = told("triton_records.py")
    assert len(found) == 18
    assert not any(case["different"] for case in found)


@pytest.mark.parametrize("chip", [90, *(pytest.param(chip, marks=pytest.mark.slow) for chip in (80, 89, 100))])
def test_the_kernels_of_packed_weights_compile_within_what_a_gpu_has(
    chip: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    found = told("triton_packed_offline.py", str(chip), "few")
    assert [kernel for kernel in found if not fits(chip, kernel)] == []
    assert {kernel["variant"][0] for kernel in found} == {"multiply", "add_parts", "decode"}
    assert {kernel["variant"][3] for kernel in found} == {0, 4}  # of experts too


@pytest.mark.slow
@pytest.mark.parametrize("chip", [80, 89, 90, 100])
def test_they_compile_for_all_formats(chip: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    found = told("triton_packed_offline.py", str(chip), "all")
    assert [kernel for kernel in found if not fits(chip, kernel, spilling="float32")] == []


def test_the_kernels_of_packed_weights_multiply_with_what_the_checkpoint_says() -> None:
    found = told("triton_packed.py")
    assert len(found) == 33
    for case in found:
        assert case["decoded"] == 0.0, case
        assert case["product"] <= {"float32": 1e-6, "float16": 2e-3}[case["dtype"]], case
        assert case["alone"], case  # no row depends on those beside it


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral"])
def test_a_decode_step_launches_few_kernels_in_a_dense_layer(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not counted: the launch that merges parts of divided keys."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    (found,) = told("layer_kernels.py", name, "64")
    assert found["products"] == 4
    assert found["attention"] == 2  # one stores keys and values
    assert sum(found.values()) <= 12, found
