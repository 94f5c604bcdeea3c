"""Numbers of Python that become tensors in a captured step: they are made on the device, not copied there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributions import Distribution

_TENSOR = "tensor"
_copied = torch.tensor


def _filled(data: Any, **options: Any) -> torch.Tensor:
    """``torch.tensor``, but a number fills a tensor: it would be a copy, which a capture does not allow."""
    if options.get("device") is not None and isinstance(data, bool | int | float):
        return torch.full((), data, **options)
    return _copied(data, **options)


@contextmanager
def waitless_constants() -> Iterator[None]:
    """Within it no number is copied to the device, and distributions do not look at their parameters.

    ``torch.tensor`` is replaced, for all threads. A ``TorchFunctionMode`` would keep compiled layers from being used.
    """
    before = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    setattr(torch, _TENSOR, _filled)
    try:
        yield
    finally:
        setattr(torch, _TENSOR, _copied)
        Distribution.set_default_validate_args(before)
