"""A table from torch functions to the code that records each of them as instructions, for
``scheduler.accel.cpu.recorder``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from scheduler.accel.cpu.basic_block import Ids, Opcode, Slot
from scheduler.accel.cpu.recorder import Recorder, Unrecordable

aten = torch.ops.aten
Tensor = torch.Tensor


def _one(code: Opcode) -> Callable[..., None]:
    def record(recorder: Recorder, out: Tensor, x: Any) -> None:
        recorder.elementwise(out, code, x)

    return record


def _two(code: Opcode) -> Callable[..., None]:
    def record(recorder: Recorder, out: Tensor, x: Any, y: Any) -> None:
        recorder.elementwise(out, code, x, y)

    return record


def _sum(code: Opcode) -> Callable[..., None]:
    def record(recorder: Recorder, out: Tensor, x: Any, y: Any, alpha: float = 1) -> None:
        axis, (left, right) = recorder.spread(out.shape, x, y)
        if alpha != 1:
            right = recorder.emit(Opcode.MUL, right, recorder.number(alpha, len(right))).ids
        recorder.define(out, recorder.emit(code, left, right), axis)

    return record


def _subtract_from(recorder: Recorder, out: Tensor, x: Any, y: Any, alpha: float = 1) -> None:
    _sum(Opcode.SUB)(recorder, out, y, x, alpha)


def _divide(recorder: Recorder, out: Tensor, x: Any, y: Any, rounding_mode: str | None = None) -> None:
    recorder.elementwise(out, Opcode.DIV, x, y) if rounding_mode is None else _refuse("rounded division")


def _refuse(name: str) -> None:
    raise Unrecordable(name)


def _power(recorder: Recorder, out: Tensor, x: Any, exponent: Any) -> None:
    axis, (ids,) = recorder.spread(out.shape, x)
    recorder.define(out, _powers(recorder, ids, exponent), axis)


def _powers(recorder: Recorder, ids: Ids, exponent: Any) -> Slot:
    if exponent == 2:
        return recorder.emit(Opcode.MUL, ids, ids)
    if exponent == 3:
        return recorder.emit(Opcode.MUL, _powers(recorder, ids, 2).ids, ids)
    if exponent == 0.5:
        return recorder.emit(Opcode.SQRT, ids)
    if exponent in (-0.5, -1):
        below = ids if exponent == -1 else _powers(recorder, ids, 0.5).ids
        return recorder.emit(Opcode.DIV, recorder.number(1.0, len(ids)), below)
    raise Unrecordable(f"power {exponent}")


def _to_the(exponent: float) -> Callable[..., None]:
    return lambda recorder, out, x: _power(recorder, out, x, exponent)


def _with(code: Opcode, value: float) -> Callable[..., None]:
    return lambda recorder, out, x: recorder.elementwise(out, code, x, value)


def _clamp(recorder: Recorder, out: Tensor, x: Any, least: Any = None, most: Any = None) -> None:
    axis, (ids,) = recorder.spread(out.shape, x)
    slot = None
    for code, bound in ((Opcode.MAX, least), (Opcode.MIN, most)):
        if bound is not None:
            slot = recorder.emit(code, slot.ids if slot else ids, recorder.number(float(bound), len(ids)))
    if slot is None:
        raise Unrecordable("clamp to nothing")
    recorder.define(out, slot, axis)


def _gelu(recorder: Recorder, out: Tensor, x: Any, approximate: str = "none") -> None:
    axis, (ids,) = recorder.spread(out.shape, x)
    n = len(ids)
    if approximate == "tanh":
        square = recorder.emit(Opcode.MUL, ids, ids).ids
        inner = recorder.emit(Opcode.MUL, square, recorder.number(0.044715, n)).ids
        inner = recorder.emit(Opcode.ADD, inner, recorder.number(1.0, n)).ids
        inner = recorder.emit(Opcode.MUL, inner, ids).ids
        inner = recorder.emit(Opcode.MUL, inner, recorder.number(math.sqrt(2 / math.pi), n)).ids
        inner = recorder.emit(Opcode.TANH, inner).ids
    else:
        inner = recorder.emit(Opcode.MUL, ids, recorder.number(math.sqrt(0.5), n)).ids
        inner = recorder.emit(Opcode.ERF, inner).ids
    inner = recorder.emit(Opcode.ADD, inner, recorder.number(1.0, n)).ids
    half = recorder.emit(Opcode.MUL, ids, recorder.number(0.5, n)).ids
    recorder.define(out, recorder.emit(Opcode.MUL, half, inner), axis)


def _softplus(recorder: Recorder, out: Tensor, x: Any, beta: float = 1, threshold: float = 20) -> None:
    recorder.elementwise(out, Opcode.SOFTPLUS, x) if (beta, threshold) == (1, 20) else _refuse("another softplus")


def _total(recorder: Recorder, out: Tensor, x: Any, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> None:
    _, ids, count = recorder.groups(x, dim)
    _one_a_group(recorder, out, recorder.reduce(Opcode.REDUCE_SUM, ids, count))


def _mean(recorder: Recorder, out: Tensor, x: Any, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> None:
    _, ids, count = recorder.groups(x, dim)
    _one_a_group(recorder, out, _mean_of(recorder, ids, count))


def _most(recorder: Recorder, out: Tensor, x: Any, dim: Any = None, keepdim: bool = False) -> None:
    _, ids, count = recorder.groups(x, dim)
    _one_a_group(recorder, out, recorder.reduce(Opcode.REDUCE_MAX, ids, count))


def _one_a_group(recorder: Recorder, out: Tensor, slot: Slot) -> None:
    recorder.define(out, slot, recorder.token_axis(out))


def _mean_of(recorder: Recorder, ids: Any, count: int) -> Any:
    total = recorder.reduce(Opcode.REDUCE_SUM, ids, count).ids
    return recorder.emit(Opcode.MUL, total, recorder.number(1 / count, len(total)))


def _rms_norm(recorder: Recorder, out: Tensor, x: Tensor, shape: Any, weight: Any = None, eps: Any = None) -> None:
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    axis, ids, count = recorder.groups(x, range(-len(shape), 0))
    _normalise(recorder, out, axis, ids, count, weight, None, eps)


def _layer_norm(recorder: Recorder, out: Tensor, x: Tensor, shape: Any, weight: Any, bias: Any, eps: float) -> None:
    axis, ids, count = recorder.groups(x, range(-len(shape), 0))
    mean = _mean_of(recorder, ids, count).ids.repeat(count)
    _normalise(recorder, out, axis, recorder.emit(Opcode.SUB, ids, mean).ids, count, weight, bias, eps)


def _normalise(
    recorder: Recorder, out: Tensor, axis: int, ids: Any, count: int, weight: Any, bias: Any, eps: float
) -> None:
    """Over the root of the mean square of each group, times a weight, plus a bias (Zhang and Sennrich 2019)."""
    square = recorder.emit(Opcode.MUL, ids, ids).ids
    spread = _mean_of(recorder, square, count).ids
    spread = recorder.emit(Opcode.ADD, spread, recorder.number(eps, len(spread))).ids
    spread = recorder.emit(Opcode.SQRT, spread).ids
    slot = recorder.emit(Opcode.DIV, ids, spread.repeat(count))
    for code, part in ((Opcode.MUL, weight), (Opcode.ADD, bias)):
        if part is not None:
            again = len(ids) // part.numel()
            constant = recorder.block.constant(part.detach().float().flatten()).ids
            slot = recorder.emit(code, slot.ids, constant.reshape(1, -1).repeat(again, 0).flatten())
    recorder.define(out, slot, axis)


def _softmax(recorder: Recorder, out: Tensor, x: Tensor, dim: int, *args: Any, **kwargs: Any) -> None:
    axis, ids, count = recorder.groups(x, dim)
    if dim % x.dim() != x.dim() - 1:
        raise Unrecordable("softmax over an inner axis")
    most = recorder.reduce(Opcode.REDUCE_MAX, ids, count).ids.repeat(count)
    powers = recorder.emit(Opcode.EXP, recorder.emit(Opcode.SUB, ids, most).ids)
    total = recorder.reduce(Opcode.REDUCE_SUM, powers.ids, count).ids.repeat(count)
    recorder.define(out, recorder.emit(Opcode.DIV, powers.ids, total), axis)


# What records each function: called with the recorder, the result and the arguments.
COMPUTED: dict[Any, Callable[..., None]] = {
    aten.add: _sum(Opcode.ADD),
    aten.sub: _sum(Opcode.SUB),
    aten.rsub: _subtract_from,
    aten.mul: _two(Opcode.MUL),
    aten.div: _divide,
    aten.maximum: _two(Opcode.MAX),
    aten.minimum: _two(Opcode.MIN),
    aten.neg: _with(Opcode.MUL, -1.0),
    aten.relu: _with(Opcode.MAX, 0.0),
    aten.clamp: _clamp,
    aten.clamp_min: _clamp,
    aten.clamp_max: lambda recorder, out, x, most: _clamp(recorder, out, x, None, most),
    aten.hardtanh: lambda recorder, out, x, least=-1.0, most=1.0: _clamp(recorder, out, x, least, most),
    aten.abs: _one(Opcode.ABS),
    aten.exp: _one(Opcode.EXP),
    aten.sqrt: _one(Opcode.SQRT),
    aten.rsqrt: _to_the(-0.5),
    aten.reciprocal: _to_the(-1),
    aten.square: _to_the(2),
    aten.pow: _power,
    aten.tanh: _one(Opcode.TANH),
    aten.sigmoid: _one(Opcode.SIGMOID),
    aten.silu: _one(Opcode.SILU),
    aten.erf: _one(Opcode.ERF),
    aten.gelu: _gelu,
    aten.softplus: _softplus,
    aten.sum: _total,
    aten.mean: _mean,
    aten.amax: _most,
    aten._softmax: _softmax,
    aten.native_layer_norm: _layer_norm,
    aten._fused_rms_norm: _rms_norm,
}
