"""``python triton_records.py``: the kernels that store keys and values, as records and as they are, by Triton's
interpreter, against what torch stores; prints a JSON object for each case: the bytes or numbers that differ.
"""

from __future__ import annotations

import json
import os

os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported

import torch

from cache.memory.codec import Codec
from cache.memory.pair_kernel import PairKernel
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


def misplaced(heads: int, dims: tuple[int, int], dtype: torch.dtype) -> int:
    """How many numbers of two pools differ from what torch stores, for tokens that lie by heads and by tokens."""
    random = torch.Generator().manual_seed(2)
    tokens = [torch.randn(heads, TOKENS, dim, generator=random).to(dtype).transpose(0, 1) for dim in dims]
    tokens[1] = tokens[1].contiguous()
    index = torch.randperm(PLACES, generator=random)[:TOKENS]
    found, wanted = ([torch.zeros(PLACES, heads, dim, dtype=dtype) for dim in dims] for _ in range(2))
    PairKernel(heads, *dims).store((found[0], found[1]), index, tokens[0], tokens[1])
    for pool, new in zip(wanted, tokens, strict=True):
        pool.index_copy_(0, index, new)
    return sum(int((one != other).sum()) for one, other in zip(found, wanted, strict=True))


if __name__ == "__main__":
    for heads, dims in ((8, (128, 128)), (3, (24, 40)), (1, (5, 1))):
        for dtype in (torch.float32, torch.float16):
            print(json.dumps({"codec": None, "different": misplaced(heads, dims, dtype)}), flush=True)
    for codec in (Codec.INT8, Codec.FP8):
        for heads, dim in ((3, 64), (1, 5), (8, 128)):
            for dtype in (torch.float32, torch.float16):
                print(
                    json.dumps({"codec": codec, "different": different(TokenRecord(heads, dim, codec), dtype)}),
                    flush=True,
                )
