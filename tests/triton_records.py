"""``python triton_records.py``: the kernel that stores records, by Triton's interpreter, against what torch stores;
prints a JSON object for each case: the bytes that differ.
"""

from __future__ import annotations

import json
import os

os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported

import torch

from cache.memory.codec import Codec
from cache.memory.record_kernel import RecordKernel
from cache.memory.token_record import TokenRecord

TOKENS, PLACES = 12, 20


def different(record: TokenRecord, dtype: torch.dtype) -> int:
    """How many bytes differ, those of other places among them."""
    random = torch.Generator().manual_seed(1)
    tokens = torch.randn(record.heads, TOKENS, record.dim, generator=random).transpose(0, 1)
    tokens = (tokens * torch.exp(4 * torch.randn(TOKENS, record.heads, 1, generator=random))).clamp(-6e4, 6e4)
    tokens[3] = 0.0
    tokens[4, 0] = torch.logspace(-9, 0, record.dim, base=4)  # subnormals of fp8 among them
    tokens[5, 0] = torch.linspace(-1, 1, record.dim).round(decimals=1)  # halves between two numbers among them
    index = torch.randperm(PLACES, generator=random)[:TOKENS]
    found, wanted = (torch.zeros(PLACES, record.nbytes, dtype=torch.uint8) for _ in range(2))
    RecordKernel(record).store(found, index, tokens.to(dtype))
    wanted.index_copy_(0, index, record.pack(tokens.to(dtype)))
    return int((found != wanted).sum())


if __name__ == "__main__":
    for codec in (Codec.INT8, Codec.FP8):
        for heads, dim in ((3, 64), (1, 5), (8, 128)):
            for dtype in (torch.float32, torch.float16):
                print(
                    json.dumps({"codec": codec, "different": different(TokenRecord(heads, dim, codec), dtype)}),
                    flush=True,
                )
