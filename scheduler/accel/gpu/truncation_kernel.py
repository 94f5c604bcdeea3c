"""``TruncationKernel``: the smallest probability that truncation keeps, without a sort, on GPUs with Triton."""

from __future__ import annotations

import logging
from functools import cache
from importlib import import_module
from typing import Any

import torch

log = logging.getLogger("warmturn.engine")

_BLOCK, _WARPS = 4096, 16  # tokens of a row that a program looks at together


class TruncationKernel:
    """Finds the smallest probabilities with one launch. Raises ImportError without Triton."""

    def __init__(self) -> None:
        self._kernels: Any = import_module("scheduler.accel.gpu.kernels.min_probabilities")

    def find(self, probs: torch.Tensor, top_k: torch.Tensor, share: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
        """float32 ``[rows, 1]`` for ``probs [rows, V]`` float32: the ``top_k [rows]`` (int64, at most V) largest, of
        these the likeliest with ``share [rows]`` (float64; above 1: all) of their sum, then those of at least ``min_p
        [rows]`` (float32) of the largest. Does not wait for the device.
        """
        rows, width = probs.shape
        out = torch.empty(rows, dtype=torch.float32, device=probs.device)
        self._kernels.min_probabilities[rows,](
            probs.contiguous(), out, top_k, share, min_p, width, width, BLOCK=_BLOCK, num_warps=_WARPS
        )
        return out[:, None]


@cache
def truncation_kernel(device: torch.device) -> TruncationKernel | None:
    """The kernel for ``device``; None on a CPU, and None with a line in the log, once, without Triton."""
    if device.type != "cuda":
        return None
    try:
        return TruncationKernel()
    except ImportError as error:
        log.info("top_p and top_k sort the vocabulary, which is slower: %s", error)
        return None
