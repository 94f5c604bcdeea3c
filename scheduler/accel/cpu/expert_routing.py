"""What routers of experts compute, as ``functions`` has it for other code: products with a plain weight, the largest
elements of a row, and masks of them.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch

from scheduler.accel.cpu.basic_block import Ids, Opcode, Slot
from scheduler.accel.cpu.matrix import TYPES, Matrix
from scheduler.accel.cpu.recorder import Recorder, Unrecordable

aten = torch.ops.aten
Tensor = torch.Tensor
_LARGEST = 8 << 20  # bytes of a weight that no linear module has: larger ones are multiplied faster by torch
_HUGE = 3e38
_matrices: WeakValueDictionary[bytes, Matrix] = WeakValueDictionary()  # by their contents: one in both recordings


def _matrix(recorder: Recorder, weight: Tensor) -> Matrix:
    """A constant weight ``[in, out]``."""
    if recorder.is_row(weight) or weight.nbytes > _LARGEST or weight.dtype not in TYPES:
        raise Unrecordable("a product with a weight of no linear module")
    recorder.plain_products += 1
    plain = weight.detach().t().contiguous()
    contents = hashlib.blake2b(repr((plain.shape, plain.dtype)).encode())
    contents.update(plain.view(torch.uint8).numpy().data)
    return _matrices.setdefault(contents.digest(), Matrix(plain, False))


def _mm(recorder: Recorder, out: Tensor, x: Tensor, weight: Tensor) -> None:
    recorder.product(_matrix(recorder, weight), None, x, out)


def _addmm(
    recorder: Recorder, out: Tensor, bias: Tensor, x: Tensor, weight: Tensor, beta: Any = 1, alpha: Any = 1
) -> None:
    if (beta, alpha) != (1, 1) or recorder.is_row(bias) or bias.dim() != 1:
        raise Unrecordable("a scaled product")
    recorder.product(_matrix(recorder, weight), bias, x, out)


def _groups(recorder: Recorder, x: Tensor, dim: int) -> tuple[int, Ids, int]:
    if dim % x.dim() != x.dim() - 1:
        raise Unrecordable("a choice along an inner axis")
    return recorder.groups(x, dim)


def _topk(
    recorder: Recorder, outs: list[Tensor], x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> None:
    axis, ids, size = _groups(recorder, x, dim)
    if not largest:
        raise Unrecordable("the smallest elements")
    table = np.array([[len(ids) // size, size, k]])
    places = recorder.block.compute(Opcode.TOPK, len(ids) // size * k, recorder.block.whole(ids), extra=table)
    recorder.define(outs[0], _take_from(recorder, ids, places.ids, size, k), axis)
    recorder.define(outs[1], places, axis)


def _take_from(recorder: Recorder, ids: Ids, places: Ids, size: int, k: int) -> Slot:
    table, refs = np.array([[len(ids) // size, size, k]]), (recorder.block.whole(one) for one in (ids, places))
    return recorder.block.compute(Opcode.TAKE, len(places), *refs, extra=table)


def _gather(recorder: Recorder, out: Tensor, x: Tensor, dim: int, index: Tensor, sparse_grad: bool = False) -> None:
    (axis, ids, size), (other, places, k) = _groups(recorder, x, dim), _groups(recorder, index, dim)
    if axis != other or x.shape[:-1] != index.shape[:-1]:
        raise Unrecordable("a choice of some rows")
    recorder.define(out, _take_from(recorder, ids, places, size, k), axis)


def _scatter(recorder: Recorder, out: Tensor, zeros: Tensor, dim: int, index: Tensor, value: Any) -> None:
    axis, places, k = _groups(recorder, index, dim)
    if out.shape[:-1] != index.shape[:-1] or isinstance(value, Tensor):
        raise Unrecordable("values put at places")
    size = out.shape[-1]
    table = np.array([[len(places) // k, size, k]])
    slot = recorder.block.compute(Opcode.SCATTER, len(places) // k * size, recorder.block.whole(places), extra=table)
    if value != 1:
        slot = recorder.emit(Opcode.MUL, slot.ids, recorder.number(float(value), slot.size))
    recorder.define(out, slot, axis)


def _to_copy(recorder: Recorder, out: Tensor, x: Tensor, **kwargs: Any) -> None:
    """To a mask, where it is not 0; from a mask, or from places."""
    if out.dtype is torch.int64:
        raise Unrecordable("rounded to integers")
    axis, (ids,) = recorder.spread(out.shape, x)
    if out.dtype is not torch.bool:
        recorder.replace(out, x)
        return
    size = recorder.emit(Opcode.MUL, recorder.emit(Opcode.ABS, ids).ids, recorder.number(_HUGE, len(ids)))
    recorder.define(out, recorder.emit(Opcode.MIN, size.ids, recorder.number(1.0, len(ids))), axis)


def _not(recorder: Recorder, out: Tensor, x: Tensor) -> None:
    if x.dtype is not torch.bool:
        raise Unrecordable("bits of integers")
    recorder.elementwise(out, Opcode.SUB, 1.0, x)


def _masked_fill(recorder: Recorder, out: Tensor, x: Tensor, mask: Tensor, value: Any) -> None:
    if float(value) != -math.inf and float(value) != 0:
        raise Unrecordable("a mask with other numbers")
    axis, (ids, masked) = recorder.spread(out.shape, x, mask)
    if float(value) == 0:
        slot = recorder.emit(Opcode.MUL, ids, _kept(recorder, masked).ids)
    else:  # at most infinity, or minus infinity
        half = recorder.emit(Opcode.SUB, recorder.number(0.5, len(ids)), masked)
        most = recorder.emit(Opcode.DIV, half.ids, recorder.number(0.0, len(ids)))
        slot = recorder.emit(Opcode.MIN, ids, most.ids)
    recorder.define(out, slot, axis)


def _kept(recorder: Recorder, masked: Ids) -> Slot:
    return recorder.emit(Opcode.SUB, recorder.number(1.0, len(masked)), masked)


# What records each function: called with the recorder, the result (all of them for ``topk``) and the arguments.
ROUTING: dict[Any, Callable[..., None]] = {
    aten.mm: _mm,
    aten.addmm: _addmm,
    aten.topk: _topk,
    aten.gather: _gather,
    aten.scatter_: _scatter,
    aten._to_copy: _to_copy,
    aten.bitwise_not: _not,
    aten.logical_not: _not,
    aten.masked_fill: _masked_fill,
}
