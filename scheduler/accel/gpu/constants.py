"""Numbers of Python that become tensors in a captured step: they are made on the device, not copied there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributions import Distribution
from torch.overrides import TorchFunctionMode


class _Filled(TorchFunctionMode):
    """``torch.tensor`` of a number fills a tensor with it; else it would be a copy, which a capture does not allow."""

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Every function of torch's."""
        given = kwargs or {}
        if func is torch.tensor and given.get("device") is not None and isinstance(args[0], bool | int | float):
            return torch.full((), args[0], **given)
        return func(*args, **given)


@contextmanager
def waitless_constants() -> Iterator[None]:
    """Within it no number is copied to the device, and distributions do not look at their parameters."""
    before = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        with _Filled():
            yield
    finally:
        Distribution.set_default_validate_args(before)
