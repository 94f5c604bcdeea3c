"""Weights as programs read them: the same numbers, and the same product whatever rows are beside a row."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from program_kit import compiled

from scheduler.accel.cpu.matrix import TILED, Matrix
from scheduler.accel.cpu.program import product

ROOT = Path(__file__).resolve().parent.parent.parent.parent.parent
SHAPES = [(1, 1), (3, 5), (16, 32), (64, 32), (63, 31), (65, 33), (130, 257), (48, 2048), (200, 1100)]  # out, in
ROWS = (1, 2, 3, 4, 5, 6, 7, 9, 11, 13, 15, 16, 17, 31, 32, 33, 48, 255, 256, 257, 600)
KINDS = [(torch.float32, False), (torch.bfloat16, False), (torch.float16, False), (torch.bfloat16, True)]
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}  # of the largest result


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def skip_without(tiled: bool) -> None:
    if tiled and not compiled().tiles:
        pytest.skip("the system lets no process use its matrix units")


@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_weight_comes_back_to_the_bit(shape: tuple[int, int], tiled: bool) -> None:
    weight = random(*shape, dtype=torch.bfloat16)
    matrix = Matrix(weight, tiled)
    assert (matrix.out, matrix.inside) == shape
    assert torch.equal(matrix.dense(), weight)
    assert matrix.dense().is_contiguous()


def test_tiles_are_copies_and_plain_weights_are_not() -> None:
    weight = random(130, 70, dtype=torch.bfloat16)
    assert Matrix(weight, False).data.data_ptr() == weight.data_ptr()
    tiled = Matrix(weight, True)
    assert tiled.kind == TILED
    assert tiled.data.data_ptr() % 64 == 0
    assert tiled.nbytes == 2 * 192 * 96  # whole groups of columns, whole tiles of depth


def test_columns_of_64_follow_each_other_in_one_stream() -> None:
    weight = torch.arange(128 * 32).view(128, 32).to(torch.bfloat16)
    stream = Matrix(weight, True).data.view(2, 16, 64, 2)  # groups of columns, pairs of elements, columns, elements
    assert torch.equal(stream, weight.view(2, 64, 16, 2).transpose(1, 2))


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("shape", [(65, 33), (200, 1100)])
def test_all_ways_to_go_through_a_weight_give_the_same_bits(
    shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    skip_without(True)
    kernel = compiled()
    multiply = product(Matrix(random(*shape, dtype=torch.bfloat16), True), None, torch.bfloat16, kernel)
    x = random(max(ROWS), shape[1], dtype=torch.bfloat16, seed=2)
    whole = multiply(x)
    for way in kernel.ways_through(packed=False, rows=max(ROWS)):
        monkeypatch.setattr(kernel, "ways", (way, way, way))
        for rows in ROWS:
            assert torch.equal(multiply(x[:rows]), whole[:rows]), f"{rows} rows, way {way}"


def test_a_weight_that_lies_the_other_way_round_is_read_right() -> None:
    weight = random(70, 130, dtype=torch.float32)
    matrix = Matrix(weight.t(), False)
    x = random(5, 70, dtype=torch.float32, seed=1)
    torch.testing.assert_close(product(matrix, None, torch.float32, compiled())(x), x @ weight, rtol=1e-5, atol=1e-4)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("dtype", "tiled"), KINDS)
def test_products_of_any_number_of_rows(dtype: torch.dtype, tiled: bool, shape: tuple[int, int], bias: bool) -> None:
    skip_without(tiled)
    weight, added = random(*shape, dtype=dtype), random(shape[0], dtype=dtype, seed=1) if bias else None
    multiply = product(Matrix(weight, tiled), added, dtype, compiled())
    x = random(max(ROWS), shape[1], dtype=dtype, seed=2)
    exact = F.linear(x.double(), weight.double(), added.double() if added is not None else None)
    whole = multiply(x)
    assert (whole.shape, whole.dtype) == (exact.shape, dtype)
    assert float((whole.double() - exact).abs().max()) <= BOUNDS[dtype] * float(exact.abs().max())
    for rows in ROWS:
        first = (7 * rows) % (max(ROWS) - rows + 1)
        part = multiply(x[first : first + rows])
        assert torch.equal(part, whole[first : first + rows]), f"{rows} rows from {first} on"


@pytest.mark.wide
@pytest.mark.parametrize("instructions", ["default", "avx2"])
def test_older_processors_compute_the_same(instructions: str) -> None:
    """This machine's processor runs what is compiled for those that have less."""
    if torch.backends.cpu.get_cpu_capability().lower() == instructions:
        pytest.skip("all other tests show it, as this processor has no more")
    here = {**os.environ, "ATEN_CPU_CAPABILITY": instructions}
    wanted = f"test_products_of_any_number_of_rows[2-dtype{KINDS.index((torch.bfloat16, True))}-True-shape6-True]"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"{__file__}::{wanted}"]
    ran = subprocess.run(command, env=here, cwd=ROOT, capture_output=True, text=True, check=False)
    assert "1 passed" in ran.stdout, ran.stdout


@pytest.mark.parametrize(("dtype", "tiled"), KINDS)
def test_what_is_not_finite_stays_in_its_row(dtype: torch.dtype, tiled: bool) -> None:
    skip_without(tiled)
    multiply = product(Matrix(random(70, 40, dtype=dtype), tiled), None, dtype, compiled())
    x = random(40, 40, dtype=dtype)
    want = multiply(x)
    x[5], x[20, 3] = torch.nan, torch.inf
    got = multiply(x)
    others = [row for row in range(40) if row not in (5, 20)]
    assert torch.equal(got[others], want[others])
    assert bool(got[5].isnan().all())
    assert bool(got[20].isinf().all())


def test_inputs_in_any_form() -> None:
    weight = random(6, 40, dtype=torch.float32)
    multiply = product(Matrix(weight, False), None, torch.float32, compiled())
    wide = random(5, 80, dtype=torch.float32)
    for x in (wide[:, :40], wide[:, ::2], wide[0, :40], wide.view(5, 2, 40), wide[:0, :40], wide.view(2, 5, 40)[None]):
        torch.testing.assert_close(multiply(x), F.linear(x, weight), rtol=1e-5, atol=1e-5)


def test_the_number_of_threads_changes_no_bit() -> None:
    before = torch.get_num_threads()
    multiply = product(Matrix(random(700, 300, dtype=torch.float32), False), None, torch.float32, compiled())
    x = random(333, 300, dtype=torch.float32)
    try:
        torch.set_num_threads(1)
        one = multiply(x)
        torch.set_num_threads(2)
        assert all(torch.equal(multiply(x), one) for _ in range(5))
    finally:
        torch.set_num_threads(before)
