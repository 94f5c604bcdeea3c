"""Pages that are copied together, and the copies as they are where there is no GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cache.memory.host_offload import runs
from cache.memory.stream import HostCopy, concurrent_stream, put


@pytest.mark.parametrize(
    ("slots", "want"),
    [
        ([], []),
        ([7], [(0, 7, 1)]),
        ([3, 4, 5], [(0, 3, 3)]),
        ([3, 4, 9, 5, 6, 0], [(0, 3, 2), (2, 9, 1), (3, 5, 2), (5, 0, 1)]),
        ([5, 4, 3], [(0, 5, 1), (1, 4, 1), (2, 3, 1)]),
    ],
)
def test_runs(slots: list[int], want: list[tuple[int, int, int]]) -> None:
    assert list(runs(slots)) == want


def test_on_a_cpu_nothing_is_in_between() -> None:
    with concurrent_stream(torch.device("cpu")):
        there = put(np.array([1, 2, 3]), torch.device("cpu"))
    assert HostCopy(there, there + 1).wait()[1].tolist() == [2, 3, 4]
