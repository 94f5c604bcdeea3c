"""The float32 values of packed rows."""

from __future__ import annotations

import torch

from scheduler.weights.packed_source import PackedRows


def _e4m3(code: int) -> float:
    exponent, mantissa = code >> 3 & 15, code & 7
    size = (8 + mantissa) * 2.0 ** (exponent - 10) if exponent else mantissa * 2.0**-9
    return -size if code & 128 else size


# Floats of 8 bits: a sign, 4 bits of exponent, 3 of mantissa. Of the codes 127 and 255, which are no number, values are
# those that they would have.
E4M3 = tuple(_e4m3(code) for code in range(256))


def unpack(rows: PackedRows, zero: int, table: tuple[float, ...] | None) -> torch.Tensor:
    """float32 ``[rows, inside]``: ``scale * (value - zero) - minimum``, or ``scale * table[value]``.
    Raises ValueError.
    """
    scales = multiply_levels(rows.scales, rows.coarse_scales, rows.fine_scales)
    minima = multiply_levels(rows.minima, rows.coarse_minima, rows.fine_minima)
    if scales is None:
        raise ValueError("packed rows have no scales")
    if rows.zeros is not None:
        minima = scales * rows.zeros
    if table is not None:
        values = torch.tensor(table, dtype=torch.float32)[rows.codes.int()]
    else:
        values = rows.codes.float() - zero
    values = values.view(*scales.shape, -1) * scales[..., None]
    if minima is not None:
        values -= minima[..., None]
    return values.flatten(1)


def multiply_levels(
    whole: torch.Tensor | None, coarse: torch.Tensor | None, fine: torch.Tensor | None
) -> torch.Tensor | None:
    """float32 ``[rows, groups]``: ``whole`` numbers, or those of two levels, of which ``coarse`` has one for several
    groups of ``fine``; None where there are neither.
    """
    if coarse is None or fine is None:
        return whole
    return (coarse[..., None] * fine.view(*coarse.shape, -1)).view(fine.shape)


def in_order(stored: torch.Tensor, order: torch.Tensor | None) -> torch.Tensor:
    """``[rows, inside]`` with the columns in the order of the inputs, see `PackedSource`."""
    if order is None:
        return stored
    found = torch.empty_like(stored)
    found[:, order] = stored
    return found
