"""Recurrent modules of several sessions in one call: what is sent to the device for it."""

from __future__ import annotations

import torch
from program_kit import CalledFunctions

from scheduler.forward.mixers import _batch
from scheduler.model.decode_graphs import DeviceReadWatch


def test_rows_are_taken_without_a_copy_from_the_host() -> None:
    rows = torch.tensor([0, 2], device="meta")
    inputs = {"hidden": torch.ones(1, 3, 4, device="meta"), "other": [torch.ones(1, 3, device="meta"), None]}
    with torch.no_grad(), DeviceReadWatch(), CalledFunctions() as seen:
        found = _batch(inputs, rows, 3)
    # A Python list as an index becomes a tensor inside of torch, where nothing sees the copy.
    assert "index" not in seen.names
    assert found["hidden"].shape == (2, 1, 4)
    assert found["other"][0].shape == (2, 1)
