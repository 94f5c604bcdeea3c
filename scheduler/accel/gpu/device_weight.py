"""``DeviceWeight``: a packed weight in the memory of a device, which stays packed there."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch

from scheduler.accel.gpu.device_form import (
    COARSE,
    PARTS,
    DeviceForm,
    Parts,
    least,
    pack_codes,
    planes_of,
)
from scheduler.accel.gpu.packed_product import decoded
from scheduler.weights.code_layout import ONE_TO_A_BYTE
from scheduler.weights.packed_source import PackedRows, PackedSource
from scheduler.weights.packed_values import in_order
from scheduler.weights.quantised_weight import QuantisedWeight
from scheduler.weights.stand_in import WeightStandIn

_TOGETHER = 1 << 22  # values that are copied at a time
_NAMES = {"scales": "coarse_scales", "minima": "coarse_minima"}  # of those of two levels


class DeviceWeight:
    """What `WeightStandIn` stands for on a device: a weight ``[out, inside]``, or of experts ``[count, out, inside]``.

    Its values are those of its checkpoint exactly. It takes the bytes of its codes and of its scales in the types that
    the checkpoint has them in, or a byte where it has a few bits; ``parts`` are all that is kept.
    """

    def __init__(self, weight: QuantisedWeight, device: torch.device) -> None:
        """Copies a packed weight to ``device``, some rows at a time."""
        self.dtype, self.flipped, self.touched = weight.dtype, weight.flipped, False
        source = weight.source
        self.out, self.inside = source.out, source.inside  # rows of all experts
        self.form, self.parts = _copy(source, device, weight.count)
        weight.release()

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return sum(part.nbytes for part in self.parts)

    def dequantise(self, start: int, stop: int) -> torch.Tensor:
        """Rows ``start`` to ``stop``: float32 ``[rows, inside]``, columns in the order of the inputs, by torch."""
        return self._ordered(self.form.values(self.parts, slice(start, stop)))

    def dense(self) -> torch.Tensor:
        """The plain weight, in the module's layout: ``[out, inside]``."""
        form = self.form
        whole = self.parts[0].new_empty(form.experts * form.out, form.inside, dtype=self.dtype)
        for start, rows in decoded(self.parts, form, self.dtype, 0, len(whole)):
            whole[start : start + len(rows)] = self._ordered(rows)
        if form.experts > 1:
            whole = whole.view(form.experts, form.out, form.inside)
        return whole.transpose(-1, -2).contiguous() if self.flipped else whole

    def take(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of an embedding: ``[..., inside]`` for int64 ``ids [...]``. Does not wait for the device."""
        some = torch.split(ids.flatten(), max(1, _TOGETHER // self.inside))
        rows = [self._ordered(self.form.values(self.parts, each)).to(self.dtype) for each in some]
        return torch.cat(rows).view(*ids.shape, self.inside)

    def _ordered(self, stored: torch.Tensor) -> torch.Tensor:
        return in_order(stored, self.form.by_name(self.parts).get("order"))


def device_weight_of(parameter: Any) -> DeviceWeight | None:
    """The weight on a device that a parameter stands for; None if it is no stand-in of one."""
    of = parameter.of if isinstance(parameter, WeightStandIn) else None
    return of if isinstance(of, DeviceWeight) else None


def _copy(source: PackedSource, device: torch.device, count: int) -> tuple[DeviceForm, Parts]:
    sample = source.rows(0, 1)
    bits = source.bits if sample.layout is ONE_TO_A_BYTE else sample.layout.bits
    planes, inside = planes_of(bits, source.inside), source.inside
    made = {
        name: torch.empty(source.out, inside * width // 8, dtype=torch.uint8, device=device)
        for name, width in planes.items()
    }
    others: defaultdict[str, list[torch.Tensor]] = defaultdict(list)
    together = max(1, _TOGETHER // inside)
    for start in range(0, source.out, together):
        rows = source.rows(start, min(start + together, source.out))
        codes = rows.layout.unpack(rows.values.to(device))
        for name, plane in pack_codes(codes, planes).items():
            made[name][start : start + len(codes)] = plane
        for name, numbers in _numbers_of(rows).items():
            others[name].append(numbers)
    small = {name: torch.cat(parts).t().contiguous() for name, parts in others.items()}
    fine, fine_minima = small.get("fine_scales"), small.get("fine_minima")
    joined = fine is not None and fine_minima is not None and _are_nibbles(fine) and _are_nibbles(fine_minima)
    if joined and fine is not None and fine_minima is not None:
        small["fine_scales"] = fine.view(torch.uint8) | fine_minima.view(torch.uint8) << 4
        del small["fine_minima"]
    for name in ("scales", "minima"):
        if name in small:
            small[name] = least(small[name])
    if source.table is not None:
        small["table"] = torch.tensor(source.table, dtype=torch.float32)
    if source.order is not None:
        small["order"] = source.order.int()
    made |= {name: numbers.to(device) for name, numbers in small.items()}
    present = sum(1 << at for at, name in enumerate(PARTS) if name in made)
    group = source.group if fine is None else inside // len(fine)
    if fine is not None and inside % COARSE:
        raise ValueError("rows with scales of two levels are whole blocks")
    form = DeviceForm(
        present,
        bits if "eights" not in made else 8,
        group,
        source.zero,
        inside,
        source.out // count,
        count,
        int(joined),
    )
    return form, [made[name] for name in PARTS if name in made]


def _numbers_of(rows: PackedRows) -> dict[str, torch.Tensor]:
    """What rows have beside codes, by the names of ``PARTS``."""
    found = {
        "scales": rows.coarse_scales if rows.scales is None else rows.scales,
        "minima": rows.coarse_minima if rows.minima is None else rows.minima,
        "zeros": rows.zeros,
        "fine_scales": rows.fine_scales,
        "fine_minima": rows.fine_minima,
    }
    return {name: numbers for name, numbers in found.items() if numbers is not None}


def _are_nibbles(numbers: torch.Tensor) -> bool:
    return bool(((numbers >= 0) & (numbers < 16)).all())
