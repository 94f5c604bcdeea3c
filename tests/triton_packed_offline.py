"""``python triton_packed_offline.py CHIP few|all``: compiles the Triton kernels of products with packed weights for a
GPU that is not there; prints what each needs, one JSON object a line.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from device_weights import KINDS, device_weight
from triton.runtime import driver  # type: ignore[import-not-found,unused-ignore]
from triton_offline import CPU, FULL_PRECISION, HALVES, Chip, Recorded, needs

from scheduler.accel.gpu.packed_product import ProductKernels, tiles_of

DTYPES = (*HALVES, FULL_PRECISION)
FEW = (("Q4_K", 0), ("Q6_K", 1), ("Q8_0", 2), ("GPTQ", 1), ("fp8", 0), ("Q2_K", 0), ("Q5_K", 2))
KERNELS = ("multiply", "add_parts", "decode")


def launched(kind: str, dtype: torch.dtype, experts: int) -> Iterator[tuple[str, Any]]:
    """The kernels of a product with a weight of one kind, compiled."""
    weight, kernels = device_weight(kind, 256, 512, max(1, experts)), ProductKernels(CPU)
    found: list[tuple[str, Any]] = []
    module = kernels._kernels
    kernels._kernels = SimpleNamespace(**{name: Recorded(getattr(module, name), name, found) for name in KERNELS})
    x = torch.zeros(5, 512, dtype=dtype)
    if experts:
        tiles = tiles_of(torch.zeros(5, dtype=torch.int64), experts)
        kernels.multiply_routed(x, tiles, 5, 1, weight.parts, weight.form)
    else:
        kernels.multiply(x, weight.parts, weight.form)
        kernels.decode(weight.parts, weight.form, dtype, 0, 64)
    yield from found


def main(chip: int, all_of_them: bool) -> None:
    """Compile and tell."""
    driver.set_active(Chip(chip))
    wanted = [(kind, at) for kind in KINDS for at in range(3)] if all_of_them else FEW
    for kind, at in wanted:
        for experts in (0, 4) if all_of_them or kind == FEW[0][0] else (0,):
            for name, kernel in launched(kind, DTYPES[at], experts):
                variant = [name, str(DTYPES[at])[6:], kind, experts]
                told = {"variant": variant, "warps": kernel.metadata.num_warps, **needs(kernel)}
                print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2] == "all")
