"""The GPU benchmark runs to its end where there is no GPU, and its page says all that it is to say."""

from __future__ import annotations

import re
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tools import bench_gpu
from tools.bench_gpu import Sizes
from tools.floors import Floors
from tools.served import Served

CPU = torch.device("cpu")


@pytest.mark.slow
@pytest.mark.wide
def test_the_page_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    page = "\n".join(bench_gpu.report(True, time.monotonic()))
    assert page.count("GB/s") == 2
    for shape in bench_gpu.shapes(True):
        part = page.split(f"## {shape}\n")[1].split("\n## ")[0]
        assert "mode packed" in part
        assert "no room" not in part
        assert re.search(r"^\| generate_batch \| \w+[^ ]* \| [\d.]+ \| [\d,]+ \|$", part, re.MULTILINE)
        heads = ("### Decode", "### A cold prompt", "### A turn of 16 tokens", "### 3 chats at once", "### 1 prompts")
        assert all(part.count(head) == 1 for head in heads)
        for count in bench_gpu.TINY.sessions:
            assert f"\n| {count} | " in part
        for history in bench_gpu.TINY.histories:
            assert f"\n| {history} | " in part


def made(shape: str, sizes: Sizes) -> Served:
    """A tiny one, with room for all of ``sizes``."""
    return Served(bench_gpu.shapes(True)[shape], CPU, max(sizes.sessions), sizes.tokens, 2 * max(sizes.histories))


def test_a_step_is_measured_when_all_sessions_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_gpu, "REPLY", 8)
    sizes = Sizes((16,), 300, (64,))  # ten steps, until the last of them has begun
    served = made("Llama, 8B", sizes)
    page = "\n".join(bench_gpu.decode(served, Floors(memory=1e3, matrix=1.0, link=1.0), sizes))
    found = re.search(r"^\| 16 \| [\d.]+ \| ([\d.]+) \|", page, re.MULTILINE)
    assert found is not None, page
    seen = (float(found[1]) - served.read) / served.kv  # of a floor in ms, at a byte a ms
    assert 16 * 310 < seen <= 16 * (300 + sizes.reply(16))


def test_what_every_step_reads_and_multiplies() -> None:
    vocabulary = 2048 * 64
    for shape, tied in (("Llama, 8B", False), ("Qwen3, 0.6B", True)):
        served = made(shape, bench_gpu.TINY)
        numbers = served.weights // 2
        assert served.head == vocabulary
        assert served.active == numbers - (0 if tied else vocabulary)
        assert served.read == 2 * served.active


def test_a_step_is_measured() -> None:
    session = SimpleNamespace(length=7)
    plan = [(SimpleNamespace(session=session), 1), (SimpleNamespace(session=session), 4)]

    def step(deliver: Any) -> None:
        time.sleep(0.01)
        launched = SimpleNamespace(plan=plan, launched=time.perf_counter())
        deliver(launched, SimpleNamespace(deltas=[SimpleNamespace(turn="t", tokens=[5], error=None)]))
        time.sleep(0.02)

    served = object.__new__(Served)
    engine: Any = SimpleNamespace(step=step)
    served.engine = engine
    replies: dict[str, list[int]] = {}
    measured = served._step(replies)
    assert (measured.tokens, measured.seen, replies) == (5, 14, {"t": [5]})
    assert 0.01 <= measured.launching < measured.seconds - 0.02


class Theirs(torch.nn.Module):
    """A model of transformers as far as its ``generate_batch`` goes."""

    def __init__(self, reply: int) -> None:
        super().__init__()
        self.config = SimpleNamespace(_attn_implementation="sdpa")
        self.reply = reply
        self.manager: list[int] | None = None
        self.managers = 0

    def forward(self) -> None:
        """A step."""

    def generate_batch(
        self, prompts: Any, generation_config: Any, persistent_manager: bool = False, **options: Any
    ) -> dict[int, Any]:
        self.managers += self.manager is None
        self.manager = [] if persistent_manager else None
        self.config._attn_implementation = "paged|sdpa"
        self()
        self.config._attn_implementation = "sdpa"
        return {n: SimpleNamespace(generated_tokens=[1] * self.reply) for n in range(len(prompts))}

    def destroy_cached_continuous_batching_manager(self) -> None:
        assert self.manager is not None
        self.manager = None


class Older(Theirs):
    def generate_batch(self, prompts: Any, generation_config: Any, **options: Any) -> dict[int, Any]:  # type: ignore[override]
        return super().generate_batch(prompts, generation_config)


def test_transformers_keeps_what_it_has_built() -> None:
    for kind, managers in ((Theirs, 1), (Older, 2)):
        model = kind(bench_gpu.REPLY)
        attention, seconds, tokens = bench_gpu.generate_batch(model, [[1], [2, 3]])
        assert (attention, tokens) == ("paged|sdpa", 2 * bench_gpu.REPLY)
        assert 0 <= seconds < 60
        assert model.managers == managers
        assert model.manager is None
    model = Theirs(3)
    with pytest.raises(RuntimeError, match=f"6 tokens came of {2 * bench_gpu.REPLY}"):
        bench_gpu.generate_batch(model, [[1], [2, 3]])
    assert model.manager is None


def test_floors_follow_from_what_was_measured() -> None:
    served: Any = SimpleNamespace(active=1000, head=100, width=10, weights=9000, read=4000, kv=8)
    floor = Floors(memory=1e3, matrix=1e6, link=1.0)
    assert bench_gpu.prompt_floor(served, floor, 1) == pytest.approx(4.008)  # reading the weights
    many = bench_gpu.prompt_floor(served, floor, 5000)
    assert many == pytest.approx((2 * 900 * 5000 + 2 * 100 + 4 * 10 * 5000 * 5000 / 2) / 1e6)  # multiplying
    behind = bench_gpu.prompt_floor(served, floor, 5000, 1000)
    assert behind == pytest.approx(many + 4 * 10 * 5000 * 1000 / 1e6)
