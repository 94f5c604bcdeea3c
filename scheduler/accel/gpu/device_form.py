"""``DeviceForm``: how a packed weight lies in the memory of a device, and its values by torch, for any device.

Codes are planes of 8, or of 4, 2 and 1 of their bits, neighbours in a byte, the lowest bits first. Scales, minima and
zeros lie by groups, ``[groups, rows]``, those of neighbouring rows together. Floats have the least type that holds them
exactly, so a weight takes about what it takes in its file: at most ``MOST`` times as much, see ``DeviceWeight``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

MOST = 1.15  # of the bytes in the checkpoint
COARSE = 256  # elements of a coarse scale, where scales have two levels
PARTS = ("eights", "fours", "twos", "ones", "scales", "minima", "zeros", "fine_scales", "fine_minima", "table", "order")
_PLANES = {"eights": 8, "fours": 4, "twos": 2, "ones": 1}
_BY_ROWS = tuple(_PLANES)

Parts = Sequence[torch.Tensor]


class DeviceForm(NamedTuple):
    """``present`` has a bit for each of ``PARTS`` that the weight has, and its tensors are in that order. ``bits``: of
    a code. ``out`` rows, of each of the ``experts``. ``joined``: fine scales and minima are in one byte.
    """

    present: int
    bits: int
    group: int
    zero: int
    inside: int
    out: int
    experts: int = 1
    joined: int = 0

    def has(self, part: str) -> bool:
        """Whether the weight has this one of ``PARTS``."""
        return bool(self.present >> PARTS.index(part) & 1)

    def by_name(self, parts: Parts) -> dict[str, torch.Tensor]:
        """The tensors of a weight by their names."""
        return dict(zip([name for name in PARTS if self.has(name)], parts, strict=True))

    def values(self, parts: Parts, rows: slice | torch.Tensor) -> torch.Tensor:
        """Some rows, ``slice`` or int64 ``[n]``: float32 ``[n, inside]``, with columns as they are stored. Does not
        wait for the device.
        """
        some = {name: _some(name, part, rows) for name, part in self.by_name(parts).items()}
        codes = _codes({name: some[name] for name in _PLANES if name in some})
        found = some["table"][codes.int()] if "table" in some else codes.float() - self.zero
        scales, minima = some["scales"], some.get("minima")
        fine, fine_minima = some.get("fine_scales"), some.get("fine_minima")
        if fine is not None and self.joined:
            fine, fine_minima = fine & 15, fine >> 4
        scales, minima = _whole(scales, fine), None if minima is None else _whole(minima, fine_minima)
        if "zeros" in some:
            minima = scales * some["zeros"]
        found = found.view(*scales.shape, -1) * scales[..., None]
        if minima is not None:
            found -= minima[..., None]
        return found.flatten(1)


def planes_of(bits: int, inside: int) -> dict[str, int]:
    """The planes of codes of ``bits``, with their widths; of rows that are no whole number of bytes each, bytes."""
    if bits == 8 or inside % 8:
        return {"eights": 8}
    return {name: width for name, width in _PLANES.items() if bits & width}


def pack_codes(codes: torch.Tensor, planes: dict[str, int]) -> dict[str, torch.Tensor]:
    """The planes of codes, uint8 ``[rows, inside * width / 8]`` each, of uint8 ``[rows, inside]``."""
    made, up = {}, 0
    for name, width in planes.items():
        if width == 8:
            return {name: codes}
        each = codes >> up & ((1 << width) - 1)
        up += width
        together = each.reshape(len(codes), -1, 8 // width)
        made[name] = together[..., 0].clone()
        for at in range(1, 8 // width):
            made[name] |= together[..., at] << at * width
    return made


def least(numbers: torch.Tensor) -> torch.Tensor:
    """float32 numbers in the smallest type that has all of them."""
    for dtype in (torch.float16, torch.bfloat16):
        if torch.equal((less := numbers.to(dtype)).float(), numbers):
            return less
    return numbers


def _some(name: str, part: torch.Tensor, rows: slice | torch.Tensor) -> torch.Tensor:
    if name in ("table", "order"):
        return part
    if name in _BY_ROWS:
        return part[rows]
    found = part[:, rows].t()
    return found.float() if found.is_floating_point() else found


def _codes(planes: dict[str, torch.Tensor]) -> torch.Tensor:
    found, up = None, 0
    for name, plane in planes.items():
        width = _PLANES[name]
        if width == 8:
            return plane
        each = torch.stack([plane >> at & ((1 << width) - 1) for at in range(0, 8, width)], -1).flatten(1)
        found = each if found is None else found | each << up
        up += width
    assert found is not None
    return found


def _whole(coarse: torch.Tensor, fine: torch.Tensor | None) -> torch.Tensor:
    """Scales or minima, ``[rows, groups]``, contiguous."""
    if fine is None:
        return coarse.contiguous()
    return (coarse[..., None] * fine.reshape(*coarse.shape, -1)).flatten(1)
