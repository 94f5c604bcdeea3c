"""Weights of few bits: they come back as their source has them, and products with them are those of float64."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from packed_forms import FORMS, LEVELS, MXFP4, Source
from program_kit import compiled

from scheduler.accel.cpu.packed_matrix import NotPackable, PackedMatrix
from scheduler.accel.cpu.program import product
from scheduler.accel.cpu.real_form import RealForm
from scheduler.weights.code_layout import ONE_TO_A_BYTE
from scheduler.weights.gguf.file import GgufTensor
from scheduler.weights.gguf.source import GgufSource
from scheduler.weights.gguf.types import TYPES
from scheduler.weights.joined_source import JoinedSource
from scheduler.weights.packed_source import PackedRows
from scheduler.weights.widened_source import widen

ROOT = Path(__file__).resolve().parents[4]


@pytest.mark.parametrize("name", FORMS)
def test_a_packed_weight_comes_back(name: str) -> None:
    source = FORMS[name]
    matrix = PackedMatrix(source)
    assert torch.equal(matrix.dense(), source.dequantise(0, source.out))
    part = matrix.dequantise(1, min(67, source.out))
    assert torch.equal(part, source.dequantise(1, min(67, source.out)))
    assert matrix.nbytes == matrix.data.nbytes


def test_values_of_a_table_stay_4_bits() -> None:
    whole, floats = PackedMatrix(Source(64, 256, bits=4, table=MXFP4)), PackedMatrix(FORMS["a table of floats"])
    assert whole.nbytes == 64 * 256 // 2 + 64 * 8 * 2 + 64
    assert floats.nbytes == 2 * (64 * 96 // 2 + 64 * 3 * 4 + 64)


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7, 11, 51])
def test_products_are_those_of_float64(name: str, rows: int) -> None:
    source = FORMS[name]
    x = torch.randn(rows, source.inside, generator=torch.Generator().manual_seed(rows))
    x[:, ::37] *= 12
    bias = torch.randn(source.out)
    got = product(PackedMatrix(source), bias, torch.float32, compiled())(x)
    want = F.linear(x.double(), source.dequantise(0, source.out).double(), bias.double())
    assert ((got - want).norm() / want.norm()).item() < 2e-4


@pytest.mark.parametrize("name", FORMS)
def test_a_row_is_the_same_whatever_is_beside_it(name: str) -> None:
    matrix = PackedMatrix(FORMS[name])
    run = product(matrix, None, torch.float32, compiled())
    x = torch.randn(61, matrix.inside, generator=torch.Generator().manual_seed(1))
    together = run(x)
    for row in (0, 1, 17, 36, 47, 48, 59, 60):
        assert torch.equal(run(x[row : row + 1])[0], together[row])
    assert torch.equal(run(x[5:10]), together[5:10])


@pytest.mark.parametrize("code", [0, 63])
def test_the_largest_values_times_the_largest_scales_have_a_place(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scales of 8 bits are multiplied while products are whole numbers of 32 bits."""
    source = Source(64, 256, bits=6, group=16, zero=32, fine=True)
    codes, fine = torch.full((64, 256), code, dtype=torch.uint8), torch.full((64, 16), -128, dtype=torch.int8)
    source.all = PackedRows(codes, None, None, torch.full((64, 1), 2.0**-9), fine)
    x = torch.randn(13, 256, generator=torch.Generator().manual_seed(4))
    x[0], x[1], x[2, ::2], x[3, 5], x[4, 32:48] = 1.0, -1.0, 3.0, 100.0, -7.0
    kernel, want = compiled(), F.linear(x.double(), source.dequantise(0, 64).double())
    run = product(PackedMatrix(source), None, torch.float32, kernel)
    for way in kernel.ways_through(packed=True, rows=16):
        monkeypatch.setattr(kernel, "ways", (way, way, way))
        assert torch.allclose(run(x).double(), want, atol=1e-3 * float(want.abs().mean()), rtol=1e-4), way


WHOLE = [name for name, form in FORMS.items() if form.order is None and not form.inside % 32 and not RealForm.of(form)]


@pytest.mark.parametrize("name", WHOLE)
def test_inputs_of_one_byte_give_exact_products_of_what_they_round_to(name: str) -> None:
    """Where the processor multiplies bytes; elsewhere nothing changes."""
    source, kernel = FORMS[name], compiled()
    x = torch.randn(51, source.inside, generator=torch.Generator().manual_seed(3))
    matrix = PackedMatrix(source)
    blocks = x.view(51, -1, 32)
    scales = blocks.abs().amax(2, keepdim=True) / 127
    rounded = (blocks / scales).round() * scales if kernel.multiplies_bytes else blocks
    run = product(matrix, None, torch.float32, kernel)
    kernel.activation_bytes = 1
    try:
        got, few = run(x), run(x[30:33])
    finally:
        kernel.activation_bytes = 2
    want = F.linear(rounded.view(51, -1).double(), source.dequantise(0, source.out).double())
    assert ((got - want).norm() / want.norm()).item() < 2e-4
    assert torch.equal(few, got[30:33])
    if kernel.multiplies_bytes:
        assert ((run(x) - got).norm() / got.norm()).item() > 1e-3


@pytest.mark.wide
@pytest.mark.parametrize("flag", ["", " -DWARMTURN_BYTES"])
def test_processors_of_other_kinds_compute_the_same(flag: str) -> None:
    """Those that do not multiply bytes, and those that do, in C++ without their instructions."""
    here = {**os.environ, "ATEN_CPU_CAPABILITY": "avx2", "CXX": f"{os.environ.get('CXX') or 'c++'}{flag}"}
    wanted = "comes_back or (float64 and 11) or whatever or one_byte or all_ways or largest"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-k", wanted]
    ran = subprocess.run(command, env=here, cwd=ROOT, capture_output=True, text=True, check=False)
    assert f"{4 * len(FORMS) + len(WHOLE) + 2} passed" in ran.stdout, ran.stdout


@pytest.mark.parametrize("name", FORMS)
def test_all_ways_to_go_through_a_weight_give_the_same_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, matrix = compiled(), PackedMatrix(FORMS[name])
    run = product(matrix, None, torch.float32, kernel)
    x = torch.randn(109, matrix.inside, generator=torch.Generator().manual_seed(2))
    x[::3, ::5] *= 1e3
    x[5], x[6] = 1.0, -1.0  # whole blocks of the largest number: next to the largest code of one scale it fills 16 bits
    monkeypatch.setattr(kernel, "ways", (0, 0, 0))
    whole = run(x)
    for way in kernel.ways_through(packed=True, rows=16)[1:]:
        for ways in ((way, way, way), (0, 0, way), (0, way, 0)):
            monkeypatch.setattr(kernel, "ways", ways)
            for rows in (1, 3, 4, 6, 7, 8, 9, 12, 16, 31, 48, 49, 50, 51, 52, 53, 61, 109):
                assert torch.equal(run(x[:rows]), whole[:rows]), f"{rows} rows, ways {ways}"


def test_inputs_that_are_no_numbers_are_seen() -> None:
    run = product(PackedMatrix(FORMS["4 bits"]), None, torch.float32, compiled())
    x = torch.zeros(4, 64)
    assert torch.equal(run(x), torch.zeros(4, 70))
    for row, value in enumerate((float("nan"), float("inf"), -float("inf"))):
        x[row, 40] = value
    found = run(x)
    assert found[:3].isnan().all()
    assert torch.equal(found[3], torch.zeros(70))


def test_bfloat16_in_and_out() -> None:
    source = FORMS["8 bits"]
    x = torch.randn(5, source.inside).bfloat16()
    got = product(PackedMatrix(source), None, torch.bfloat16, compiled())(x)
    want = F.linear(x.double(), source.dequantise(0, source.out).double())
    assert got.dtype is torch.bfloat16
    assert ((got.double() - want).norm() / want.norm()).item() < 4e-3


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (Source(8, 64, group=24), "24 elements have a scale"),
        (Source(8, 64, bits=3, table=(0.5,) * 8), "no whole numbers"),
        (Source(8, 48, bits=4, group=16, table=LEVELS), "16 elements have a scale"),
        (Source(8, 64, zero=300), "zero is 300"),
    ],
)
def test_what_has_no_form_is_refused(source: Source, reason: str) -> None:
    with pytest.raises(NotPackable, match=reason):
        PackedMatrix(source)


class OneToAByte:
    """Another source with its codes as bytes, and scales that torch unpacks."""

    def __init__(self, source: GgufSource) -> None:
        self._source = source

    def __getattr__(self, name: str) -> Any:
        if name == "stored":
            raise AttributeError
        return getattr(self._source, name)

    def rows(self, start: int, stop: int) -> PackedRows:
        rows = self._source.rows(start, stop)
        return replace(rows, values=rows.codes, layout=ONE_TO_A_BYTE)


def made_up(kind: int, out: int, inside: int) -> GgufSource:
    """Random blocks of a type of GGUF."""
    of = torch.Generator().manual_seed(kind)
    row = inside // TYPES[kind].elements * TYPES[kind].nbytes
    data = torch.randint(0, 256, (out, row), generator=of, dtype=torch.uint8) & 0b10111011  # no scale is infinite
    return GgufSource([GgufTensor("x", (out, inside), kind, data)])


@pytest.mark.parametrize(
    "kind", [kind for kind, each in TYPES.items() if each.dtype is None], ids=lambda kind: TYPES[kind].name
)
@pytest.mark.parametrize(("out", "inside"), [(128, 512), (145, 768)])
def test_codes_are_packed_from_where_a_file_has_them(kind: int, out: int, inside: int) -> None:
    source = made_up(kind, out, inside)
    packed, wanted = PackedMatrix(source), PackedMatrix(OneToAByte(source))
    assert packed.kind == wanted.kind
    assert torch.equal(packed.data, wanted.data) or out % 64  # codes of columns that pad differ, whose scales are 0
    assert torch.equal(packed.dense(), wanted.dense())
    assert torch.equal(packed.dense(), source.dequantise(0, out))


@pytest.mark.parametrize(("one", "other"), [(12, 14), (12, 13), (13, 14), (8, 2), (8, 14), (23, 13), (39, 3)])
def test_weights_of_two_types_are_packed_as_one(one: int, other: int) -> None:
    order = torch.randperm(224, generator=torch.Generator().manual_seed(one))
    source = JoinedSource(widen([made_up(one, 128, 512), made_up(other, 96, 512)]), order)
    assert torch.equal(PackedMatrix(source).dense(), source.dequantise(0, 224))
