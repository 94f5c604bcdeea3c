"""Truncation of distributions: top-k, nucleus and min-p."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from cache.memory.stream import put
from scheduler.accel.gpu.truncation_kernel import truncation_kernel
from scheduler.sampling_params import Sampling


def truncate(probs: torch.Tensor, wanted: Sequence[Sampling]) -> torch.Tensor:
    """Zero what top-k, then nucleus (Holtzman et al., 2019), then min-p cut off; ``probs [rows, V]``. At least one
    token stays, and of equals all or none.
    """
    if probs.device.type == "cpu":
        found = [min_probability(row, w) for row, w in zip(probs.numpy(), wanted, strict=True)]
        least = torch.tensor(found, dtype=torch.float32)[:, None]
    else:
        least = min_probabilities(probs, wanted)
    return torch.where(probs >= least, probs, 0.0)


def min_probability(row: npt.NDArray[np.float32], wanted: Sampling) -> float:
    """The smallest probability in ``row [V]`` that stays. numpy sorts numbers thirty times as fast as torch sorts them
    with their places.
    """
    width, few = len(row), 0 < wanted.top_k < len(row)
    if few:
        left = np.sort(np.partition(row, width - wanted.top_k)[width - wanted.top_k :])[::-1]
        total = left.sum(dtype=np.float64)
    elif wanted.top_p < 1.0:  # all others together are less than what a nucleus leaves out
        total = row.sum(dtype=np.float64)
        left = np.sort(row[row >= (1 - wanted.top_p) * total / width])[::-1]
    else:
        return float(np.float32(wanted.min_p) * row.max())
    if not len(left):  # these are no numbers
        return 0.0
    last = len(left) - 1
    if wanted.top_p < 1.0:
        last = min(last, int(np.searchsorted(left.cumsum(dtype=np.float64), wanted.top_p * total)))
    return float(max(left[last], np.float32(wanted.min_p) * left[0]))


def min_probabilities(probs: torch.Tensor, wanted: Sequence[Sampling]) -> torch.Tensor:
    """``min_probability`` of all rows at once, where nobody waits for the device: ``[rows, 1]``."""
    device, width = probs.device, probs.shape[-1]
    top_k = put(np.array([min(w.top_k or width, width) for w in wanted]), device)
    # A sum reaches the whole before the rarest tokens: top_p 1 must still keep them.
    share = put(np.array([w.top_p if w.top_p < 1.0 else 2.0 for w in wanted]), device)
    min_p = put(np.array([w.min_p for w in wanted], np.float32), device)
    if not any(w.top_k or w.top_p < 1.0 for w in wanted):
        return min_p[:, None] * probs.amax(-1, keepdim=True)
    kernel = truncation_kernel(device)
    if kernel is not None:
        return kernel.find(probs, top_k, share, min_p)
    ordered = probs.sort(-1, descending=True).values
    kept = torch.where(torch.arange(width, device=device) < top_k[:, None], ordered, 0.0)
    mass = kept.cumsum(-1, dtype=torch.float64)
    count = torch.searchsorted(mass, share[:, None] * mass[:, -1:]) + 1
    least = ordered.gather(-1, torch.minimum(count, top_k[:, None]) - 1)
    return torch.maximum(least, min_p[:, None] * ordered[:, :1])
