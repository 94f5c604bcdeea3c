"""Recurrent modules of several sessions in one call: what is sent to the device for it."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from scheduler.forward.mixers import _batch
from scheduler.model.decode_graphs import DeviceReadWatch


class Names(TorchDispatchMode):
    """Names of operations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_rows_are_taken_without_a_copy_from_the_host() -> None:
    rows = torch.tensor([0, 2], device="meta")
    inputs = {"hidden": torch.ones(1, 3, 4, device="meta"), "other": [torch.ones(1, 3, device="meta"), None]}
    with torch.no_grad(), DeviceReadWatch(), Names() as seen:
        found = _batch(inputs, rows, 3)
    # A Python list as an index becomes a tensor inside of torch, where nothing sees the copy.
    assert "index" not in seen.names
    assert found["hidden"].shape == (2, 1, 4)
    assert found["other"][0].shape == (2, 1)
