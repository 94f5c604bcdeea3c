"""``python triton_packed.py``: products with packed weights by Triton's interpreter, against their values in float64;
prints a JSON object for each case. Its bfloat16 is wrong, so it has none.
"""

from __future__ import annotations

import json
import os

os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported

from typing import Any, NamedTuple

import torch
from device_weights import KINDS, device_weight

from scheduler.accel.gpu.packed_product import ProductKernels, tiles_of

CPU = torch.device("cpu")


class Case(NamedTuple):
    """A weight of one of ``KINDS``; ``experts``: 0 for none."""

    kind: str
    dtype: torch.dtype
    out: int
    inside: int
    tokens: int
    experts: int = 0


CASES = (
    *(Case(kind, torch.float16, 72, 512, 3) for kind in KINDS),
    Case("Q4_K", torch.float32, 130, 768, 19),
    Case("Q6_K", torch.float32, 40, 256, 1),
    Case("Q8_0", torch.float32, 64, 96, 33),
    Case("Q4_0", torch.float16, 24, 64, 9, experts=5),
    Case("MXFP4", torch.float32, 40, 96, 20, experts=2),
)


def error(case: Case) -> dict[str, Any]:
    """The errors of products and of decoded rows, as a share of the largest number, and whether a row depends on
    others.
    """
    count = max(1, case.experts)
    weight = device_weight(case.kind, case.out * count, case.inside, count)
    values, form = weight.dequantise(0, case.out * count).double(), weight.form
    kernels, random = ProductKernels(CPU), torch.Generator().manual_seed(1)
    x = torch.randn(case.tokens, case.inside, generator=random).to(case.dtype)
    order = form.by_name(weight.parts).get("order")
    given = x if order is None else x[:, order]
    decoded = kernels.decode(weight.parts, form, torch.float32, 5, case.out)
    stored = values if order is None else values[:, order]
    if case.experts:
        chosen = torch.randint(0, case.experts, (case.tokens * 2,), generator=random)
        got = kernels.multiply_routed(given, tiles_of(chosen, case.experts), len(chosen), 2, weight.parts, form)
        each = values.view(count, case.out, case.inside)[chosen]
        want = torch.einsum("ni,noi->no", x.double().repeat_interleave(2, 0), each)
        alone = kernels.multiply_routed(given[:1], tiles_of(chosen[:2], case.experts), 2, 2, weight.parts, form)
    else:
        got, want = kernels.multiply(given, weight.parts, form), x.double() @ values.t()
        alone = kernels.multiply(given[:1], weight.parts, form)
    return {
        "kind": case.kind,
        "dtype": str(case.dtype)[6:],
        "product": float((got.double() - want).abs().max() / want.abs().max()),
        "decoded": float((decoded.double() - stored[5 : case.out]).abs().max() / stored.abs().max()),
        "alone": torch.equal(alone, got[: len(alone)]),
    }


if __name__ == "__main__":
    for case in CASES:
        print(json.dumps(error(case)), flush=True)
