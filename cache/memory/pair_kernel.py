"""``PairKernel``: stores keys and values as they are with one launch, on GPUs with Triton."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

import torch

from cache.memory.tried_kernel import tried_kernel

_TRIED = 5  # tokens


class PairKernel:
    """Stores tokens of one number of heads and one size of them. Raises ImportError without Triton."""

    def __init__(self, heads: int, key_dim: int, value_dim: int) -> None:
        self._heads, self._dims = heads, (key_dim, value_dim)
        self._kernels: Any = import_module("cache.memory.kernels.pairs")

    def store(
        self,
        pools: tuple[torch.Tensor, torch.Tensor],
        index: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> None:
        """Each pool, ``[places, heads, dim]``, gets ``keys`` or ``values``, ``[n, heads, dim]``, at ``index [n]``
        int64. Does not wait for the device.
        """
        keys, values = (one if one.stride(2) == 1 else one.contiguous() for one in (keys, values))
        dim, width = self._dims
        self._kernels.store[len(keys), self._heads](
            keys, values, *pools, index, *keys.stride()[:2], *values.stride()[:2], self._heads,
            DIM=dim, PADDED=1 << (dim - 1).bit_length(),
            VALUE=width, PADDED_VALUE=1 << (width - 1).bit_length(), num_warps=1,
        )  # fmt: skip

    def passes(self, dtype: torch.dtype, device: torch.device) -> bool:
        """Whether it stores what ``index_copy_`` does."""
        random = torch.Generator().manual_seed(0)
        tokens = [torch.randn(self._heads, _TRIED, dim, generator=random).to(device, dtype) for dim in self._dims]
        keys, values = (one.transpose(0, 1) for one in tokens)
        found, wanted = (
            [torch.zeros(_TRIED, self._heads, dim, dtype=dtype, device=device) for dim in self._dims] for _ in range(2)
        )
        index = torch.arange(_TRIED - 1, -1, -1, device=device)
        self.store((found[0], found[1]), index, keys, values)
        for pool, new in zip(wanted, (keys, values), strict=True):
            pool.index_copy_(0, index, new)
        return all(map(torch.equal, found, wanted))


@cache
def pair_kernel(
    heads: int, key_dim: int, value_dim: int, dtype: torch.dtype, device: torch.device
) -> PairKernel | None:
    """The kernel for such tokens on ``device``, tried before its first use; None on a CPU, and None with a line in the
    log, once, where it is not right or there is no Triton.
    """
    instead = "keys and values are stored by torch, in two launches"
    return tried_kernel(lambda: PairKernel(heads, key_dim, value_dim), dtype, device, instead)
