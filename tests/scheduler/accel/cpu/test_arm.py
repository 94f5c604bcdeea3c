"""ARM processors: the kernels compile for them, and in an emulator products are those of float64."""

from __future__ import annotations

import itertools
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from packed_forms import FORMS

from cache import compiler
from scheduler.accel.cpu.matrix import Matrix
from scheduler.accel.cpu.packed_matrix import PackedMatrix
from scheduler.accel.cpu.program_kernel import kernel
from scheduler.accel.cpu.real_form import RealForm

HERE, ROOT = Path(__file__).parent, Path(__file__).resolve().parents[4]
KERNELS = ROOT / "scheduler/accel/cpu/kernels", ROOT / "cache/attention/kernels"
COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
PROCESSORS = {  # flags, and how many elements of a column lie together
    "plain": ("-march=armv8-a", 2),
    "dot products": (compiler.arm_flags({"dot"}), 4),
    "dot products, bfloat16": (compiler.arm_flags({"dot", "bf16"}), 4),
}
AARCH64 = b"\xb7\0"  # the machine in the header of an ELF file
ROWS = (1, 2, 3, 4, 7, 9, 19)
PLAIN = ((torch.bfloat16, True), (torch.bfloat16, False), (torch.float16, False), (torch.float32, False))

pytestmark = [
    pytest.mark.wide,
    pytest.mark.skipif(not shutil.which(COMPILER), reason=f"{COMPILER} is not installed"),
]


def weights() -> Iterator[tuple[str, Matrix | PackedMatrix, torch.Tensor]]:
    """Each with its values."""
    for name, source in FORMS.items():
        if source.order is None:
            yield name, PackedMatrix(source), source.dequantise(0, source.out)
    for dtype, tiled in PLAIN:
        weight = torch.randn(130, 100, generator=torch.Generator().manual_seed(1)).to(dtype)
        yield f"{dtype} {'in tiles' if tiled else ''}", Matrix(weight, tiled), weight


def in_bytes(x: torch.Tensor) -> torch.Tensor:
    """Inputs as they are rounded to one byte, 32 with one scale."""
    blocks = F.pad(x, (0, -x.shape[1] % 32)).view(len(x), -1, 32)
    scales = blocks.abs().amax(2, keepdim=True) / 127
    return ((blocks / scales).round() * scales).flatten(1)[:, : x.shape[1]]


def write(cases: Path, wanted: Path, together: int) -> None:
    """What arm_products.cpp reads, and what float64 gives, by a process whose kernel lays weights out as ARM's."""
    ours, results = kernel(), []
    if ours is None or ours.together != together:
        sys.exit("weights lie in another order")
    with cases.open("wb") as file:
        for name, matrix, values in weights():
            quantised = isinstance(matrix, PackedMatrix) and not RealForm.of(FORMS[name])
            sizes = (2, 1) if together == 4 and quantised else (2,)  # bytes of an input
            for rows, size in itertools.product(ROWS, sizes):
                x = torch.randn(rows, matrix.inside, generator=torch.Generator().manual_seed(rows))
                x[:, ::37] *= 12
                data = matrix.data.contiguous().view(torch.uint8).numpy()
                head = matrix.kind, matrix.out, matrix.inside, rows, rows % 2, size, data.size
                file.write(np.array(head, np.int64).tobytes() + data.tobytes() + x.numpy().tobytes())
                inputs = in_bytes(x) if size == 1 else x
                results.append((name, F.linear(inputs.double(), values.double()).numpy()))
    wanted.write_bytes(pickle.dumps(results))


def cases(folder: Path, together: int) -> tuple[Path, list[tuple[str, np.ndarray]]]:
    """The cases, and their names with what is to come out."""
    paths = [str(folder / name) for name in ("cases", "wanted")]
    where = os.pathsep.join(map(str, (HERE, ROOT / "tests", ROOT)))
    command = (os.environ.get("CXX") or "c++") + (" -DWARMTURN_BYTES" if together == 4 else "")
    here = {**os.environ, "ATEN_CPU_CAPABILITY": "avx2", "CXX": command, "PYTHONPATH": where}
    code = "import sys, test_arm; from pathlib import Path; test_arm.write(*map(Path, sys.argv[1:3]), int(sys.argv[3]))"
    given = [*paths, str(together)]
    ran = subprocess.run([sys.executable, "-c", code, *given], env=here, capture_output=True, text=True, check=False)
    if "another order" in ran.stderr:
        pytest.skip("this processor's kernel lays weights out in another order")
    assert not ran.returncode, ran.stderr
    return folder / "cases", pickle.loads((folder / "wanted").read_bytes())


def build(source: Path, to: Path, *flags: str) -> None:
    options = [flag for flag in compiler._FLAGS.split() if flag != "-shared"]
    headers = [f"-I{folder}" for folder in KERNELS]
    subprocess.run([COMPILER, *options, *flags, *headers, str(source), "-o", str(to), "-lpthread"], check=True)


@pytest.mark.parametrize("processor", PROCESSORS)
def test_products_are_those_of_float64(processor: str, tmp_path: Path) -> None:
    """And a row is the same whatever is beside it."""
    if not shutil.which(EMULATOR):
        pytest.skip(f"{EMULATOR} is not installed")
    flags, together = PROCESSORS[processor]
    given_cases, wanted = cases(tmp_path, together)
    build(HERE / "arm_products.cpp", tmp_path / "products", "-static", flags)
    with given_cases.open("rb") as given:
        ran = subprocess.run([EMULATOR, str(tmp_path / "products")], stdin=given, capture_output=True, check=False)
    assert ran.returncode == 0
    left = np.frombuffer(ran.stdout, np.float32)
    for name, want in wanted:
        got, left = left[: want.size].reshape(want.shape), left[want.size :]
        most = 5e-3 if "in tiles" in name else 2e-4  # tiles round inputs to bfloat16
        assert np.linalg.norm(got - want) < most * np.linalg.norm(want), f"{name}, {len(want)} rows"
    assert not left.size


@pytest.mark.parametrize("processor", PROCESSORS)
@pytest.mark.parametrize("name", ["attention", "team"])
def test_attention_compiles(processor: str, name: str, tmp_path: Path) -> None:
    build(KERNELS[1] / f"{name}.cpp", tmp_path / "object", "-shared", PROCESSORS[processor][0])
    assert (tmp_path / "object").read_bytes()[18:20] == AARCH64
