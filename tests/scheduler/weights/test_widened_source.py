"""Packed weights of several types as one: codes, scales and minima in another form, and the same values."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

import pytest
import torch

from scheduler.weights.gguf.file import GgufTensor
from scheduler.weights.gguf.source import GgufSource
from scheduler.weights.gguf.types import TYPES
from scheduler.weights.joined_source import JoinedSource
from scheduler.weights.packed_source import PackedRows
from scheduler.weights.packed_values import unpack
from scheduler.weights.widened_source import widen

PACKED = {each.name: kind for kind, each in TYPES.items() if each.dtype is None}


def made_up(name: str, rows: int) -> GgufSource:
    """Random bytes, none of which are an infinite float16."""
    kind = TYPES[PACKED[name]]
    of = torch.Generator().manual_seed(rows)
    shape = rows, 512 // kind.elements * kind.nbytes
    data = torch.randint(0, 256, shape, generator=of, dtype=torch.uint8) & 0b10111011
    return GgufSource([GgufTensor("x", (rows, 512), PACKED[name], data)])


@pytest.mark.parametrize(("one", "other"), list(combinations(PACKED, 2)))
def test_values_of_two_types_stay_as_they_are(one: str, other: str) -> None:
    sources = [made_up(one, 5), made_up(other, 3)]
    widened = widen(sources)
    for source, wide in zip(sources, widened, strict=True):
        want = source.dequantise(0, source.out)
        rows = wide.rows(0, source.out)
        assert int(rows.codes.max()) < 1 << wide.bits <= 256
        assert torch.equal(unpack(rows, wide.zero, wide.table), want)
        assert torch.equal(wide.dequantise(1, 3), want[1:3])
        assert torch.equal(wide.take(torch.tensor([2, 0])), want[[2, 0]])
    order = torch.tensor([7, 0, 1, 5, 6, 4, 3, 2])
    joined, want = JoinedSource(widened, order), torch.cat([source.dequantise(0, source.out) for source in sources])
    assert torch.equal(joined.dequantise(0, 8), want[order])
    assert torch.equal(joined.take(torch.tensor([6, 0])), want[order][[6, 0]])


@pytest.mark.parametrize(
    ("one", "other", "bits", "group", "fine"),
    [
        ("Q4_K", "Q6_K", 6, 16, True),
        ("Q4_K", "Q5_K", 5, 32, True),
        ("Q5_K", "Q6_K", 6, 16, True),
        ("IQ4_XS", "Q5_K", 8, 32, True),
        ("Q4_0", "Q8_0", 8, 32, False),
        ("Q8_0", "Q6_K", 8, 16, False),
    ],
)
def test_the_form_is_as_small_as_can_be(one: str, other: str, bits: int, group: int, fine: bool) -> None:
    for wide in widen([made_up(one, 5), made_up(other, 3)]):
        assert (wide.bits, wide.group) == (bits, group)
        assert (wide.rows(0, 2).fine_scales is not None) is fine


@dataclass
class Stub:
    """A weight of which only its form matters."""

    bits: int = 4
    group: int = 32
    zero: int = 0
    table: tuple[float, ...] | None = None
    order: torch.Tensor | None = None
    zeros: torch.Tensor | None = None
    out: int = 1
    inside: int = 96
    nbytes: int = 48

    def rows(self, start: int, stop: int) -> PackedRows:
        return PackedRows(torch.zeros(stop - start, 96).byte(), torch.ones(stop - start, 3), zeros=self.zeros)

    def take(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(ids), 96)

    def dequantise(self, start: int, stop: int) -> torch.Tensor:
        return torch.zeros(stop - start, 96)


@pytest.mark.parametrize(
    ("stub", "reason"),
    [
        (Stub(order=torch.arange(96)), "another order"),
        (Stub(zeros=torch.zeros(1, 3, dtype=torch.int8)), "zeros of their groups"),
        (Stub(table=(0.5,) * 16), "no whole numbers"),
        (Stub(group=48), "no form"),
        (Stub(bits=8), "no form"),
    ],
)
def test_what_no_form_holds_is_refused(stub: Stub, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        widen([Stub(bits=8, zero=128), stub])
