"""Depthwise convolutions along tokens, in 16 bits on a CPU.

Layers that keep a state of their last few inputs (Mamba, gated delta rules) convolve each channel with a kernel of a
few taps. Where a processor cannot multiply bfloat16, torch does that one number after the other, which then takes most
of a step. Which is faster is timed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F

_TYPES = (torch.bfloat16, torch.float16)
_CHANNELS, _TOKENS, _TAPS = 512, 4, 4  # of the convolution that is timed
_ROUNDS = 5
_TORCH = F.conv1d


def hasten(model: torch.nn.Module) -> bool:
    """Where ``model`` has such convolutions and torch is slower at them, let ``torch.nn.functional.conv1d`` compute
    them as this module does, in this process and for good. Returns whether it does.
    """
    kinds = {
        module.weight.dtype
        for module in model.modules()
        if isinstance(module, torch.nn.Conv1d) and module.weight.device.type == "cpu" and module.weight.shape[1] == 1
    }
    if any(kind in _TYPES and _is_faster(kind) for kind in kinds):
        F.conv1d = convolve
    return F.conv1d is convolve


def convolve(input: torch.Tensor, weight: torch.Tensor, bias: Any = None, *options: Any, **named: Any) -> torch.Tensor:
    """``torch.nn.functional.conv1d``. Sums are of float32 and rounded once. Not within a ``TorchDispatchMode``, which
    is to see what is called.
    """
    plain = _padding(options, named)
    if (
        plain is None
        or input.dtype not in _TYPES
        or input.device.type != "cpu"
        or input.dim() != 3
        or weight.dtype is not input.dtype
        or weight.shape[0] != input.shape[1]
        or weight.shape[1] != 1
        or torch._C._len_torch_dispatch_stack()
        or input.shape[-1] + 2 * plain < weight.shape[-1]
    ):
        return _TORCH(input, weight, bias, *options, **named)
    return _taps(F.pad(input, (plain, plain)) if plain else input, weight, bias)


def _padding(options: tuple[Any, ...], named: dict[str, Any]) -> int | None:
    """The padding of a convolution of every token by itself, None if it is another one."""
    given = dict(zip(("stride", "padding", "dilation", "groups"), options, strict=False)) | named
    values = {name: value[0] if isinstance(value, (tuple, list)) else value for name, value in given.items()}
    if values.get("stride", 1) != 1 or values.get("dilation", 1) != 1 or values.get("groups", 1) == 1:
        return None
    padding = values.get("padding", 0)
    return padding if isinstance(padding, int) else None


def _taps(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The sum of the taps of ``input [B, C, T]``: ``[B, C, T - taps + 1]``."""
    wide, kernel = input.float(), weight.float()
    tokens = input.shape[-1] - weight.shape[-1] + 1
    total = wide[..., :tokens] * kernel[:, 0, :1]
    for tap in range(1, weight.shape[-1]):
        total = torch.addcmul(total, wide[..., tap : tap + tokens], kernel[:, 0, tap : tap + 1])
    return (total if bias is None else total + bias.float()[:, None]).to(input.dtype)


@cache
def _is_faster(kind: torch.dtype) -> bool:
    """Whether a decode step's convolution of that type takes less time here than in torch."""
    x, weight = torch.ones(1, _CHANNELS, _TOKENS, dtype=kind), torch.ones(_CHANNELS, 1, _TAPS, dtype=kind)
    ours = _seconds(lambda: _taps(x, weight, None))
    return ours < _seconds(lambda: _TORCH(x, weight, groups=_CHANNELS))


def _seconds(work: Callable[[], object]) -> float:
    """The best time of some runs; the first one may make a kernel."""
    best = float("inf")
    for _ in range(_ROUNDS):
        start = time.thread_time()
        work()
        best = min(best, time.thread_time() - start)
    return best
