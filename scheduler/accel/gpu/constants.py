"""Numbers and ranges of Python that become tensors in a captured step are made on the device, not copied there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributions import Distribution

_TENSOR, _ARANGE = "tensor", "arange"
_copied, _ranged = torch.tensor, torch.arange


def _filled(data: Any, **options: Any) -> torch.Tensor:
    """``torch.tensor``, but a number fills a tensor: it would be a copy, which a capture does not allow."""
    if options.get("device") is not None and isinstance(data, bool | int | float):
        return torch.full((), data, **options)
    return _copied(data, **options)


@contextmanager
def waitless_constants(device: torch.device) -> Iterator[None]:
    """Within it no number is copied to the device, a range that says no device is made on ``device``, and distributions
    do not look at their parameters.

    ``torch.tensor`` and ``torch.arange`` are replaced, for all threads. A ``TorchFunctionMode`` would keep compiled
    layers from being used.
    """

    def ranged(*args: Any, **options: Any) -> torch.Tensor:
        return _ranged(*args, **{**options, "device": options.get("device") or device})

    before = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    setattr(torch, _TENSOR, _filled)
    setattr(torch, _ARANGE, ranged)
    try:
        yield
    finally:
        setattr(torch, _TENSOR, _copied)
        setattr(torch, _ARANGE, _ranged)
        Distribution.set_default_validate_args(before)
