"""``RecordKernel``: stores keys or values as records with one launch, on GPUs with Triton."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

import torch

from cache.memory.codec import Codec
from cache.memory.token_record import TokenRecord
from cache.memory.tried_kernel import tried_kernel

_TRIED = 5  # tokens


class RecordKernel:
    """Stores tokens as records of one layout. Raises ImportError without Triton."""

    def __init__(self, record: TokenRecord) -> None:
        self._record = record
        self._kernels: Any = import_module("cache.memory.kernels.records")

    def store(self, pool: torch.Tensor, index: torch.Tensor, tokens: torch.Tensor) -> None:
        """``pool [places, nbytes]`` uint8 gets ``tokens [n, heads, dim]`` as records at ``index [n]`` int64. Does not
        wait for the device.
        """
        record = self._record
        tokens = tokens if tokens.stride(2) == 1 else tokens.contiguous()
        self._kernels.store[len(tokens), record.heads](
            tokens, record.numbers(pool), record.scales(pool), index, *tokens.stride()[:2], record.nbytes,
            DIM=record.dim, PADDED=1 << (record.dim - 1).bit_length(), FP8=record.codec is Codec.FP8, num_warps=1,
        )  # fmt: skip

    def passes(self, dtype: torch.dtype, device: torch.device) -> bool:
        """Whether it stores what ``TokenRecord.pack`` makes, bit for bit."""
        record = self._record
        random = torch.Generator().manual_seed(0)
        sizes = torch.logspace(-3, 3, _TRIED)[:, None, None]
        tokens = torch.randn(_TRIED, record.heads, record.dim, generator=random).mul(sizes).to(device, dtype)
        tokens[1] = 0.0
        pool = torch.zeros(_TRIED, record.nbytes, dtype=torch.uint8, device=device)
        index = torch.arange(_TRIED - 1, -1, -1, device=device)
        self.store(pool, index, tokens)
        return torch.equal(pool.flip(0), record.pack(tokens))


@cache
def record_kernel(record: TokenRecord, dtype: torch.dtype, device: torch.device) -> RecordKernel | None:
    """The kernel for tokens of ``dtype`` on ``device``, tried before its first use; None on a CPU, and None with a line
    in the log, once, where it is not right or there is no Triton.
    """
    instead = "keys and values are rounded by torch, which takes more launches"
    return tried_kernel(lambda: RecordKernel(record), dtype, device, instead)
