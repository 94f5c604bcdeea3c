"""The GPU benchmark runs to its end where there is no GPU, and its page says all that it is to say."""

from __future__ import annotations

import time

import pytest
import torch

from tools import bench_gpu
from tools.floors import Floors


def test_the_page_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(bench_gpu, "beside", lambda *about: ["### beside\n"])  # transformers' takes half a minute
    page = "\n".join(bench_gpu.report(True, time.monotonic()))
    assert page.count("GB/s") == 2
    for shape in bench_gpu.shapes(True):
        part = page.split(f"## {shape}\n")[1].split("\n## ")[0]
        assert "mode packed" in part
        heads = ("### Decode", "### A cold prompt", "### A turn of 16 tokens", "### 3 chats at once", "### beside")
        assert all(part.count(head) == 1 for head in heads)
        for count in bench_gpu.TINY.sessions:
            assert f"\n| {count} | " in part
        for history in bench_gpu.TINY.histories:
            assert f"\n| {history} | " in part


def test_floors_follow_from_what_was_measured() -> None:
    class Model:
        active, width, weights, kv = 1000, 10, 4000, 8

    floor = Floors(memory=1e3, matrix=1e6, link=1.0)
    served: bench_gpu.Served = Model()  # type: ignore[assignment]
    assert bench_gpu.prompt_floor(served, floor, 1) == pytest.approx(4.008)  # reading the weights
    many = bench_gpu.prompt_floor(served, floor, 5000)
    assert many == pytest.approx((2 * 1000 * 5000 + 4 * 10 * 5000 * 5000 / 2) / 1e6)  # multiplying
    behind = bench_gpu.prompt_floor(served, floor, 5000, 1000)
    assert behind == pytest.approx(many + 4 * 10 * 5000 * 1000 / 1e6)
