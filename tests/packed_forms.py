"""Weights of few bits in every form, with random codes."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from scheduler.weights.packed_source import PackedRows
from scheduler.weights.packed_values import E4M3
from tools.held_source import HeldSource

IQ4 = (-127.0, -104.0, -83.0, -65.0, -49.0, -35.0, -22.0, -10.0, 1.0, 13.0, 25.0, 38.0, 53.0, 69.0, 89.0, 113.0)
MXFP4 = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, -0.0, -1.0, -2.0, -3.0, -4.0, -6.0, -8.0, -12.0)
LEVELS = tuple(float(level) for level in torch.linspace(-1, 1, 16) ** 3)  # no whole numbers


@dataclass
class Source(HeldSource):
    """Random codes with random scales of any form."""

    out: int
    inside: int
    bits: int = 8
    group: int = 32
    zero: int = 0
    table: tuple[float, ...] | None = None
    minima: bool = False
    fine: bool = False
    floats: bool = False
    zeros: bool = False
    shuffled: bool = False
    order: torch.Tensor | None = field(init=False, default=None)
    all: PackedRows = field(init=False)

    def __post_init__(self) -> None:
        of = torch.Generator().manual_seed(self.out)
        groups = -(-self.inside // self.group)
        codes = torch.randint(0, 1 << self.bits, (self.out, self.inside), generator=of).to(torch.uint8)

        def some(*shape: int) -> torch.Tensor:
            numbers = torch.rand(*shape, generator=of) / 32
            return numbers if self.floats else numbers.half().float()

        if not self.fine:
            minima = some(self.out, groups) if self.minima else None
            zeros = torch.randint(-8, 9, (self.out, groups), generator=of).to(torch.int8) if self.zeros else None
            self.all = PackedRows(codes, some(self.out, groups), minima, zeros=zeros)
            self.order = torch.randperm(self.inside, generator=of) if self.shuffled else None
            return
        signed = torch.randint(0 if self.minima else -32, 64, (2, self.out, groups), generator=of).to(torch.int8)
        coarse = some(2, self.out, self.inside // 256) / 8
        coarse = coarse.half().float()
        smaller = (coarse[1], signed[1]) if self.minima else (None, None)
        self.all = PackedRows(codes, None, None, coarse[0], signed[0], *smaller)


FORMS = {
    "8 bits": Source(130, 96, zero=128),
    "4 bits": Source(70, 64, bits=4, zero=8),
    "4 bits with minima": Source(64, 160, bits=4, minima=True),
    "5 bits": Source(65, 32, bits=5, zero=16),
    "6 bits": Source(63, 160, bits=6, zero=32),
    "6 bits with minima": Source(62, 96, bits=6, minima=True),
    "7 bits": Source(61, 64, bits=7, zero=64),
    "8 bits with minima": Source(3, 128, minima=True),
    "8 bits with minima and a zero": Source(85, 96, zero=128, minima=True),
    "scales in float32": Source(100, 96, bits=4, zero=7, floats=True),
    "minima in float32": Source(101, 96, bits=4, floats=True, minima=True),
    "fine scales": Source(129, 512, bits=4, fine=True, minima=True),
    "fine scales of 5 bits": Source(64, 256, bits=5, fine=True, minima=True),
    "fine scales of 16": Source(66, 256, bits=6, group=16, zero=32, fine=True),
    "fine scales of 16 with minima": Source(67, 512, bits=4, group=16, fine=True, minima=True),
    "fine scales of 16 with minima and a zero": Source(80, 512, bits=6, group=16, zero=32, fine=True, minima=True),
    "groups of 128": Source(68, 256, bits=4, group=128, zero=8),
    "a row is a group": Source(69, 96, group=96, zero=128),
    "a table": Source(71, 96, bits=4, table=IQ4),
    "a table with fine scales": Source(78, 512, bits=4, table=IQ4, fine=True),
    "a table with scales in float32": Source(79, 96, bits=4, table=MXFP4, floats=True),
    "a table of 8 bits": Source(64, 64, table=tuple(float(value) for value in range(-128, 128))),
    "a table of floats": Source(81, 96, bits=4, table=LEVELS, floats=True),
    "a table of floats in groups of 64": Source(82, 192, bits=4, group=64, table=LEVELS, floats=True),
    "floats of 8 bits": Source(83, 160, table=E4M3, floats=True),
    "floats of 8 bits in groups of 128": Source(84, 384, group=128, table=E4M3, floats=True),
    "zeros": Source(73, 256, bits=4, zero=8, zeros=True),
    "5 bits in groups of 16": Source(70, 96, bits=5, group=16, zero=16),
    "zeros beside scales in float32": Source(74, 96, bits=4, zero=8, zeros=True, floats=True),
    "zeros of groups of 16": Source(77, 96, bits=4, group=16, zero=8, zeros=True),
    "another order": Source(75, 96, bits=4, zero=8, shuffled=True),
    "another order with zeros": Source(76, 256, group=64, zero=128, zeros=True, shuffled=True),
    "an odd width": Source(72, 33 * 32 + 32, bits=4, zero=8),
}
