"""Half-precision attention on a CPU is computed over rounded lengths, and says the same."""

from __future__ import annotations

import pytest
import torch

from cache.attention.torch_attention import attend


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (2, 5), (16, 16), (17, 40), (31, 33)])
def test_rounded_lengths_change_nothing(dtype: torch.dtype, rows: int, columns: int) -> None:
    generator = torch.Generator().manual_seed(rows * columns)
    query = torch.randn(4, rows, 16, generator=generator)
    keys, values = (torch.randn(columns, 2, 16, generator=generator) for _ in range(2))
    first = columns - rows
    seen = torch.arange(columns)[None] <= torch.arange(first, columns)[:, None]
    want = attend(query, keys, values, seen, 0.25)
    got = attend(query.to(dtype), keys.to(dtype), values.to(dtype), seen, 0.25)
    assert got.shape == want.shape
    assert (got.float() - want).abs().max() < 0.05
