"""Products with packed weights on a device: a Triton kernel that decodes tiles of the weight where it multiplies for a
few rows; for many, or without Triton, some rows of the weight after others are decoded and multiplied by torch.

``multiply`` and ``multiply_routed`` are opaque operators for compiled code. Neither waits for the device, but
``multiply_routed`` with many rows outside of ``waitless_products``, which asks how many rows each expert has.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from cache.error_line import first_line
from scheduler.accel.gpu.device_form import DeviceForm, Parts

log = logging.getLogger("warmturn.engine")

ROWS = 16  # of a tile, for any number of rows: what a row gives does not depend on others
_FEW = 64  # rows up to which the kernel multiplies; of more, decoding is little of the work
_FEW_ROUTED = 1024  # rows of experts, likewise
_COLUMNS, _WARPS = 64, 4
_SMALLEST, _LARGEST = 32, 128  # inputs of a block
_PROGRAMS = 4  # for each processor: sums are divided among as many
_LONGEST = 16  # parts of a sum, at most
_DECODED = 1 << 22  # values that are decoded at a time
_ADDED = 1024  # sums that a program adds
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_NAMES = ("eights", "fours", "twos", "ones", "scales", "minima", "zeros", "fine_scales", "fine_minima", "table")
_waiting = True  # whether products may wait for the device


class Tiles(NamedTuple):
    """Rows of experts in tiles of ``ROWS``: ``owners`` int32 ``[tiles * ROWS]``, the number of each row or -1, and
    ``experts`` int32 ``[tiles]``, the expert of each tile or -1.
    """

    owners: torch.Tensor
    experts: torch.Tensor


class ProductKernels:
    """The Triton kernels on one device. Raises ImportError without Triton."""

    def __init__(self, device: torch.device) -> None:
        self._kernels: Any = import_module("scheduler.accel.gpu.kernels.packed_products")
        cuda = device.type == "cuda"
        self._processors = torch.cuda.get_device_properties(device).multi_processor_count if cuda else 8
        self.refused: set[tuple[int, ...]] = set()  # forms, without their sizes, of which results were wrong

    def fits(self, form: DeviceForm, dtype: torch.dtype) -> bool:
        """Whether the kernels multiply with such a weight."""
        block = block_of(form)
        return dtype in _DTYPES and block > 0 and kind_of(form, dtype) not in self.refused

    def multiply(self, x: torch.Tensor, parts: Parts, form: DeviceForm) -> torch.Tensor:
        """``x [n, inside]`` by the weight: ``[n, out]``."""
        return self._multiply(x, parts, form, len(x), 1, None)

    def multiply_routed(
        self, x: torch.Tensor, tiles: Tiles, count: int, share: int, parts: Parts, form: DeviceForm
    ) -> torch.Tensor:
        """``[count, out]``: of row ``n`` the product of ``x [count / share, inside]``, row ``n / share``, by the expert
        of its tile.
        """
        return self._multiply(x, parts, form, count, share, tiles)

    def _multiply(
        self, x: torch.Tensor, parts: Parts, form: DeviceForm, count: int, share: int, tiles: Tiles | None
    ) -> torch.Tensor:
        x, block = x.contiguous(), block_of(form)
        columns, blocks = -(-form.out // _COLUMNS), form.inside // block
        splits = max(1, min(_LONGEST, -(-_PROGRAMS * self._processors // columns), blocks))
        each = -(-blocks // splits)
        splits = -(-blocks // each)
        out = x.new_empty(count, form.out)
        sums = out if splits == 1 else x.new_empty(splits, count, form.out, dtype=torch.float32)
        number = -(-count // ROWS) if tiles is None else len(tiles.experts)
        self._kernels.multiply[columns, number, splits](
            x, sums, *((x, x) if tiles is None else tiles), *self._tensors(parts, form),
            count, form.out, form.out * form.experts, form.inside, share, each,
            ROWS=ROWS, COLUMNS=_COLUMNS, ROUTED=tiles is not None, num_warps=_WARPS, **_constants(form),
        )  # fmt: skip
        if splits > 1:
            size = out.numel()
            self._kernels.add_parts[-(-size // _ADDED),](sums, out, size, splits, BLOCK=_ADDED)
        return out

    def decode(self, parts: Parts, form: DeviceForm, dtype: torch.dtype, start: int, stop: int) -> torch.Tensor:
        """Rows ``start`` to ``stop`` of the weight, ``[rows, inside]``, columns as they are stored."""
        out = parts[0].new_empty(stop - start, form.inside, dtype=dtype)
        grid = -(-(stop - start) // _COLUMNS), form.inside // block_of(form)
        self._kernels.decode[grid](
            out, *self._tensors(parts, form), start, stop, form.out * form.experts, form.inside,
            COLUMNS=_COLUMNS, num_warps=_WARPS, **_constants(form),
        )  # fmt: skip
        return out

    def _tensors(self, parts: Parts, form: DeviceForm) -> list[torch.Tensor]:
        """Those that the kernels are given; in the place of one that there is not, any other."""
        there = form.by_name(parts)
        if form.joined:
            there["fine_minima"] = there["fine_scales"]
        return [there.get(name, parts[0]) for name in _NAMES]


def block_of(form: DeviceForm) -> int:
    """Inputs that a tile has: as many of a group as the kernel takes, or two groups of 16; 0 where it takes none.

    Codes of fewer than 4 bits are looked up one by one: more of them at once than the fewest do not fit into registers.
    """
    block = min(form.group & -form.group, _LARGEST if form.bits >= 4 else _SMALLEST)
    if block < _SMALLEST:
        block = _SMALLEST if form.group == _SMALLEST // 2 else 0
    return block if block and form.inside % block == 0 else 0


def kind_of(form: DeviceForm, dtype: torch.dtype) -> tuple[int, ...]:
    """What the kernels are compiled for."""
    return (form.present, form.bits, form.group, form.zero, form.joined, _DTYPES.index(dtype))


def _constants(form: DeviceForm) -> dict[str, Any]:
    fine = form.has("fine_scales")
    return {
        "BLOCK": block_of(form),
        "GROUP": form.group,
        "ZERO": form.zero,
        "BITS": form.bits,
        "FINE": int(fine) + form.joined,
        "MINIMA": form.has("minima"),
        "ZEROS": form.has("zeros"),
        "TABLE": form.has("table"),
    }


@cache
def product_kernels(device: torch.device) -> ProductKernels | None:
    """The kernels for ``device``; None on a CPU, and None with a line in the log, once, without Triton."""
    if device.type != "cuda":
        return None
    try:
        return ProductKernels(device)
    except ImportError as error:
        log.info("packed weights are decoded by torch at every step, which is slow: %s", error)
        return None


def try_kernels(parts: Parts, form: DeviceForm, dtype: torch.dtype, most: float) -> None:
    """Compare the kernels with torch on such a weight, and use them for none of its kind where they differ by more than
    ``most`` of the results (root mean square), with a line in the log.
    """
    kernels = product_kernels(parts[0].device)
    if kernels is None or not kernels.fits(form, dtype):
        return
    count, device = ROWS + 3, parts[0].device
    x = torch.randn(count, form.inside, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    try:
        few = min(form.out, _COLUMNS + 5)
        weight = form.values(parts, slice(0, few))
        off = _error(kernels.decode(parts, form, dtype, 0, few).float(), weight)
        if form.experts == 1:
            got = kernels.multiply(x, parts, form)
        else:
            tiles = tiles_of(torch.zeros(count, dtype=torch.int64, device=device), form.experts)
            got = kernels.multiply_routed(x, tiles, count, 1, parts, form)
        off = max(off, _error(got[:, :few].float(), (x.double() @ weight.double().t()).float()))
        why = "" if off <= most else f"the results differ by {off:.1e}"
    except Exception as error:  # whatever a compiler or a launch raises
        why = first_line(error, 160)
    if why:
        kernels.refused.add(kind_of(form, dtype))
        log.warning("packed weights of %d bits are decoded by torch at every step: %s", form.bits, why)


def _error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float(((got - want).norm() / want.norm().clamp_min(1e-30)).nan_to_num(nan=torch.inf))


def decoded(
    parts: Parts, form: DeviceForm, dtype: torch.dtype, start: int, stop: int
) -> Iterator[tuple[int, torch.Tensor]]:
    """Rows ``start`` to ``stop`` of a weight, some after others: the first of each lot, and ``[rows, inside]`` of
    ``dtype`` with columns as they are stored.
    """
    kernels, together = product_kernels(parts[0].device), max(1, _DECODED // form.inside)
    ours = kernels if kernels is not None and kernels.fits(form, dtype) else None
    for first in range(start, stop, together):
        last = min(first + together, stop)
        if ours is not None:
            yield first, ours.decode(parts, form, dtype, first, last)
        else:
            yield first, form.values(parts, slice(first, last)).to(dtype)


def multiply(x: torch.Tensor, parts: Parts, form: DeviceForm) -> torch.Tensor:
    """``x [.., inside]`` by a packed weight: ``[.., out]``."""
    found: torch.Tensor = torch.ops.warmturn.multiply_packed(x, parts, form)
    return found


def multiply_routed(x: torch.Tensor, chosen: torch.Tensor, parts: Parts, form: DeviceForm) -> torch.Tensor:
    """``x [n, inside]`` by packed experts ``chosen [n * k]``, int64, ``k`` of each row after the other: ``[n * k,
    out]``.
    """
    found: torch.Tensor = torch.ops.warmturn.multiply_routed(x, chosen, parts, form)
    return found


def waits() -> bool:
    """Whether products may wait for the device."""
    return _waiting


@contextmanager
def waitless_products() -> Iterator[None]:
    """Within it products do not wait for the device."""
    global _waiting
    before, _waiting = _waiting, False
    try:
        yield
    finally:
        _waiting = before


def _multiply(x: torch.Tensor, parts: list[torch.Tensor], numbers: list[int]) -> torch.Tensor:
    form = DeviceForm(*numbers)
    rows = _in_order(x.reshape(-1, form.inside), parts, form)
    kernels = product_kernels(x.device)
    if kernels is not None and 0 < len(rows) <= _FEW and kernels.fits(form, x.dtype):
        found = kernels.multiply(rows, parts, form)
    else:
        found = _of_expert(rows, 0, parts, form)  # the only one
    return found.view(*x.shape[:-1], form.out)


def _multiply_routed(
    x: torch.Tensor, chosen: torch.Tensor, parts: list[torch.Tensor], numbers: list[int]
) -> torch.Tensor:
    form, count = DeviceForm(*numbers), len(chosen)
    x, found = _in_order(x, parts, form), x.new_empty(count, form.out)
    if not count:
        return found
    share = count // len(x)
    if _waiting and count > _FEW_ROUTED:
        order, first = chosen.argsort(stable=True), 0
        for expert, size in enumerate(_sizes(chosen, form.experts).tolist()):
            mine, first = order[first : first + size], first + size
            if size:
                found[mine] = _of_expert(x[mine // share], expert, parts, form)
        return found
    tiles, kernels = tiles_of(chosen, form.experts), product_kernels(x.device)
    if kernels is not None and kernels.fits(form, x.dtype):
        return kernels.multiply_routed(x, tiles, count, share, parts, form)
    spare = found.new_empty(count + 1, form.out)  # the last row is nobody's
    row = torch.arange(form.out, device=x.device)
    for owners, expert in zip(tiles.owners.view(-1, ROWS).long(), tiles.experts.long(), strict=True):
        weight = form.values(parts, expert.clamp_min(0) * form.out + row).to(x.dtype)
        made = F.linear(x[owners.clamp_min(0) // share], weight)
        spare[torch.where(owners < 0, count, owners)] = made
    return spare[:count]


def _of_expert(x: torch.Tensor, expert: int, parts: Parts, form: DeviceForm) -> torch.Tensor:
    first, found = expert * form.out, x.new_empty(len(x), form.out)
    for start, weight in decoded(parts, form, x.dtype, first, first + form.out):
        found[:, start - first : start - first + len(weight)] = F.linear(x, weight)
    return found


def _sizes(chosen: torch.Tensor, experts: int) -> torch.Tensor:
    """How many of the rows are of each expert: ``[experts]``."""
    return (chosen[None] == torch.arange(experts, device=chosen.device)[:, None]).sum(1)


def tiles_of(chosen: torch.Tensor, experts: int) -> Tiles:
    """Rows whose experts are ``chosen [n]``, int64, in tiles; as many tiles as there may be, whatever is chosen. Does
    not wait for the device.
    """
    count, device = len(chosen), chosen.device
    most = min(count, count // ROWS + min(experts, count))
    order = chosen.argsort(stable=True)
    sizes = _sizes(chosen, experts)
    tiles = (sizes + ROWS - 1) // ROWS
    ends, last = tiles.cumsum(0), sizes.cumsum(0)
    tile = torch.arange(most, device=device)
    expert = torch.searchsorted(ends, tile, right=True)
    there, expert = expert < experts, expert.clamp_max(experts - 1)
    within = (tile - (ends - tiles)[expert])[:, None] * ROWS + torch.arange(ROWS, device=device)
    real = there[:, None] & (within < sizes[expert][:, None])
    place = ((last - sizes)[expert][:, None] + within).clamp(0, count - 1)
    owners = torch.where(real, order[place], -1)
    return Tiles(owners.flatten().int(), torch.where(there, expert, -1).int())


def _in_order(x: torch.Tensor, parts: Parts, form: DeviceForm) -> torch.Tensor:
    """Rows with their columns as the weight stores its own."""
    return x[:, form.by_name(parts)["order"]] if form.has("order") else x


def _product_like(x: torch.Tensor, parts: list[torch.Tensor], numbers: list[int]) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], DeviceForm(*numbers).out)


def _routed_like(x: torch.Tensor, chosen: torch.Tensor, parts: list[torch.Tensor], numbers: list[int]) -> torch.Tensor:
    return x.new_empty(chosen.shape[0], DeviceForm(*numbers).out)


_library: Any = torch.library.Library("warmturn", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("multiply_packed(Tensor x, Tensor[] parts, int[] form) -> Tensor")
_library.define("multiply_routed(Tensor x, Tensor chosen, Tensor[] parts, int[] form) -> Tensor")
_library.impl("multiply_packed", _multiply, "CompositeExplicitAutograd")
_library.impl("multiply_routed", _multiply_routed, "CompositeExplicitAutograd")
torch.library.register_fake("warmturn::multiply_packed", _product_like, lib=_library)
torch.library.register_fake("warmturn::multiply_routed", _routed_like, lib=_library)
