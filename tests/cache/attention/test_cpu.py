"""The compiled attention against a softmax in float64; what it may not depend on; how it is built, or not built."""

from __future__ import annotations

import ctypes
import logging
import os
import random
import stat
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from session_kit import session_of

from cache import compiler
from cache.attention import cpu, self_test
from cache.attention.backend import Signature
from cache.attention.cpu import CpuBackend, CpuPlan
from cache.attention.long_spans import kernel_is_faster
from cache.attention.packed_attention import PackedAttention
from cache.attention.torch_attention import attend
from cache.compiler import NotBuilt, build, has_tiles
from cache.memory.codec import Codec
from cache.memory.memory_tier import MemoryTier, PageShape
from cache.pages.layers import AttentionLayer, Reach, ScoreOptions
from cache.pages.packed import PackedCache, PackedStep
from cache.pages.pool import Page

CPU = torch.device("cpu")
FULL = AttentionLayer(Reach.FULL, None, stores=True)
WORK = [(0, 5), (11, 1), (700, 1), (60, 7), (255, 2), (320, 3), (45, 4)]  # tokens cached, tokens new
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}  # of the largest output


@pytest.fixture
def kernel() -> CpuBackend:
    found = cpu.cpu_backend()
    if found is None:
        pytest.skip("there is no C++ compiler")
    return found


class Scene:
    """Sessions over random pages of one layer; what no session owns is NaN."""

    def __init__(self, shape: PageShape, heads: int, work: list[tuple[int, int]], page: int = 16, hide: bool = False):
        generator = torch.Generator().manual_seed(7)
        pages = [-(-(cached + new) // page) for cached, new in work]
        self.tier = MemoryTier(sum(pages) + 3, page, CPU, {0: shape})
        slots = random.Random(5).sample(range(self.tier.slots), sum(pages))
        for pool in (self.tier.keys[0], self.tier.values[0]):
            pool.fill_(float("nan") if shape.codec is Codec.EXACT else 255)
        self.sessions = []
        self.history: list[tuple[torch.Tensor, torch.Tensor]] = []
        for (cached, new), count in zip(work, pages, strict=True):
            session = session_of([0] * (cached + new), new)
            if hide and cached > 9:
                session.hide(3, 9)
            session.pages = [Page(self.tier, slots.pop()) for _ in range(count)]
            place = torch.tensor([session.pages[p // page].slot * page + p % page for p in range(cached + new)])
            key = torch.randn(cached + new, shape.key_heads, shape.key_dim, generator=generator).to(shape.dtype)
            value = torch.randn(cached + new, shape.value_heads, shape.value_dim, generator=generator).to(shape.dtype)
            self.tier.write(0, place, key.transpose(0, 1)[None], value.transpose(0, 1)[None])
            if shape.key is not None and shape.value is not None:  # as it is stored
                key, value = (
                    record.unpack(record.pack(it), torch.float32)
                    for record, it in ((shape.key, key), (shape.value, value))
                )
            self.history.append((key, value))
            self.sessions.append((session, new))
        self.step = PackedStep(self.sessions, self.tier)
        self.query = torch.randn(heads, self.step.tokens, shape.key_dim, generator=generator).to(shape.dtype)
        self.dim = shape.value_dim

    def run(self, kernel: CpuBackend, layer: AttentionLayer, scores: ScoreOptions) -> torch.Tensor:
        """What the kernel computes: ``[T, H, Dv]``."""
        out = self.query.new_empty(self.step.tokens, self.query.shape[0], self.dim)
        plan = CpuPlan(self.step, layer, self.step.numbers)
        kernel.attend(plan, self.step, layer, 0, self.query, scores, out)
        return out

    def alone(self, number: int, kernel: CpuBackend, layer: AttentionLayer, scores: ScoreOptions) -> torch.Tensor:
        """What it computes of one session in a step of its own."""
        span = self.step.spans[number]
        rows = slice(span.row, span.row + span.size)
        out = self.query.new_empty(span.size, self.query.shape[0], self.dim)
        step = PackedStep([self.sessions[number]], self.tier)
        kernel.attend(CpuPlan(step, layer, step.numbers), step, layer, 0, self.query[:, rows], scores, out)
        return out

    def wanted(self, layer: AttentionLayer, scores: ScoreOptions) -> torch.Tensor:
        """The definition, in float64."""
        out = []
        for span, (key, value) in zip(self.step.spans, self.history, strict=True):
            group = self.query.shape[0] // key.shape[1]
            queries = self.query[:, span.row : span.row + span.size].double()
            logits = queries @ key.double().repeat_interleave(group, 1).permute(1, 2, 0) * scores.scale
            if scores.softcap is not None:
                logits = scores.softcap * torch.tanh(logits / scores.softcap)
            at = torch.arange(span.stop)
            seen = layer.sees(at[span.start :, None], at[None])
            seen[:, : span.start] &= torch.tensor(list(span.session.mask), dtype=torch.bool)
            logits = logits.masked_fill(~seen, float("-inf"))
            if scores.sinks is not None:
                logits = torch.cat([logits, scores.sinks.double().view(-1, 1, 1).expand(-1, span.size, 1)], 2)
            weights = torch.softmax(logits, -1)[..., : span.stop]
            out.append((weights @ value.double().repeat_interleave(group, 1).transpose(0, 1)).transpose(0, 1))
        return torch.cat(out)


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """The largest difference, of the largest output; NaN where either has one."""
    return float((got.double() - want).abs().max() / want.abs().max())


SHAPES = [  # heads, key heads, width of a key, width of a value
    (9, 3, 64, 64),
    (4, 2, 16, 16),
    (3, 1, 5, 7),
    (2, 2, 80, 80),
    (8, 1, 40, 96),
    (16, 1, 144, 128),
    (5, 5, 32, 33),
]


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_any_shape_is_a_softmax(kernel: CpuBackend, shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    heads, key_heads, key_dim, value_dim = shape
    scene = Scene(PageShape(key_heads, key_dim, key_heads, value_dim, dtype), heads, WORK)
    scores = ScoreOptions(key_dim**-0.5, None, None)
    assert error(scene.run(kernel, FULL, scores), scene.wanted(FULL, scores)) < BOUNDS[dtype]


@pytest.mark.parametrize("codec", [Codec.INT8, Codec.FP8])
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[2], SHAPES[4], (9, 3, 64, 32)], ids=str)
def test_records_are_read_as_what_they_stand_for(
    kernel: CpuBackend, shape: tuple[int, int, int, int], dtype: torch.dtype, codec: Codec
) -> None:
    heads, key_heads, key_dim, value_dim = shape
    stored = PageShape(key_heads, key_dim, key_heads, value_dim, dtype, codec=codec)
    scene = Scene(stored, heads, [*WORK, (40, 30)], hide=True)
    for layer, scores in (
        (FULL, ScoreOptions(key_dim**-0.5, None, torch.linspace(-3, 3, heads))),
        (AttentionLayer(Reach.SLIDING, 100, True), ScoreOptions(1.0, 5.0, None)),
    ):
        assert error(scene.run(kernel, layer, scores), scene.wanted(layer, scores)) < BOUNDS[dtype]


@pytest.mark.parametrize("codec", [Codec.INT8, Codec.FP8])
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_records_that_the_kernel_stores_are_those_that_torch_stores(
    kernel: CpuBackend, dtype: torch.dtype, codec: Codec
) -> None:
    shape = PageShape(3, 20, 3, 8, dtype, codec=codec)
    generator = torch.Generator().manual_seed(3)
    sizes = torch.exp(4 * torch.randn(40, 3, 1, generator=generator))
    key, value = (torch.randn(40, 3, dim, generator=generator).mul(sizes).to(dtype) for dim in (20, 8))
    key[7] = 0.0
    key[8, 0] = torch.linspace(-1, 1, 20).to(dtype)
    key[9, 1] = torch.logspace(-8, 0, 20, base=4).to(dtype)  # subnormals of fp8 among them
    ours, theirs = MemoryTier(3, 16, CPU, {0: shape}), MemoryTier(3, 16, CPU, {0: shape})
    places = torch.randperm(48, generator=generator)[:40]
    for tier in (ours, theirs):
        tier.keys[0].zero_()
        tier.values[0].zero_()
    theirs.write(0, places, key.transpose(0, 1)[None], value.transpose(0, 1)[None])
    call = cpu.StoreCall(key=key.data_ptr(), value=value.data_ptr(), rows=40)
    call.take(shape)
    call.key_pages, call.value_pages = ours.keys[0].data_ptr(), ours.values[0].data_ptr()
    kernel.store(call, places)
    assert kernel.stores(shape)
    assert torch.equal(ours.keys[0], theirs.keys[0])
    assert torch.equal(ours.values[0], theirs.values[0])


def test_a_kernel_that_stores_other_records_is_found(
    kernel: CpuBackend, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shape = PageShape(2, 7, 2, 7, torch.float32, codec=Codec.INT8)
    monkeypatch.setattr(kernel, "store", lambda call, places: None)
    caplog.set_level(logging.INFO)
    assert not kernel.stores(shape)
    assert "stores wrong records" in caplog.text
    kernel._stores.pop(shape)  # the backend is every test's


@pytest.mark.parametrize("page", [4, 16])
@pytest.mark.parametrize("hide", [False, True])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("softcap", [None, 0.5, 50.0])
@pytest.mark.parametrize(
    "layer",
    [FULL, *(AttentionLayer(Reach(kind), size, True) for kind in ("sliding", "chunked") for size in (1, 7, 100))],
    ids=str,
)
def test_every_kind_of_layer(
    kernel: CpuBackend, layer: AttentionLayer, softcap: float | None, sinks: bool, hide: bool, page: int
) -> None:
    scene = Scene(PageShape(2, 24, 2, 16, torch.float32), 6, WORK, page, hide)
    scores = ScoreOptions(0.7, softcap, torch.linspace(-3, 3, 6) if sinks else None)
    assert error(scene.run(kernel, layer, scores), scene.wanted(layer, scores)) < 1e-5


@pytest.mark.skipif(not has_tiles(), reason="no tiles here: long spans are torch's")
@pytest.mark.parametrize("hide", [False, True])
@pytest.mark.parametrize("softcap", [None, 30.0])
@pytest.mark.parametrize("scale", [0.1, 1.0])  # the latter: each block's largest score may be far above the last one's
@pytest.mark.parametrize(
    "layer",
    [FULL, *(AttentionLayer(Reach(kind), size, True) for kind in ("sliding", "chunked") for size in (50, 100))],
    ids=str,
)
def test_long_spans_by_matrix_units(
    kernel: CpuBackend, layer: AttentionLayer, scale: float, softcap: float | None, hide: bool
) -> None:
    scene = Scene(PageShape(3, 64, 3, 32, torch.bfloat16), 9, [(0, 150), (700, 33), (70, 100), (30, 1)], hide=hide)
    scores = ScoreOptions(scale, softcap, None)
    assert not CpuPlan(scene.step, layer, scene.step.numbers).unhandled
    assert error(scene.run(kernel, layer, scores), scene.wanted(layer, scores)) < BOUNDS[torch.bfloat16]


def test_the_longest_history_is_put_together_from_its_ranges(kernel: CpuBackend) -> None:
    scene = Scene(PageShape(1, 8, 1, 8, torch.float32), 2, [(20_000, 2)])
    scores = ScoreOptions(1.0, None, None)
    assert error(scene.run(kernel, FULL, scores), scene.wanted(FULL, scores)) < 1e-5


def test_scores_that_only_fit_relative_to_the_largest(kernel: CpuBackend) -> None:
    scene = Scene(PageShape(1, 16, 1, 16, torch.float32), 2, WORK)
    scores = ScoreOptions(300.0, None, None)
    assert error(scene.run(kernel, FULL, scores), scene.wanted(FULL, scores)) < 1e-3  # of scores around 1000


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("dim", [33, 35, 67])
def test_the_memory_of_each_thread_is_aligned(kernel: CpuBackend, dim: int) -> None:
    """Whatever the width of keys; an address that is not would end the process."""
    scene = Scene(PageShape(1, dim, 1, 32, torch.float32), 3, [(700, 1), (900, 1), (1100, 2)])
    scores = ScoreOptions(0.2, None, None)
    for _ in range(20):  # until the second thread takes a part
        assert error(scene.run(kernel, FULL, scores), scene.wanted(FULL, scores)) < BOUNDS[torch.float32]


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_what_later_tokens_hold_does_not_reach_earlier_ones(kernel: CpuBackend, dtype: torch.dtype) -> None:
    scene = Scene(PageShape(1, 64, 1, 64, dtype), 2, [(20, 3)])
    session, _ = scene.sessions[0]
    scene.tier.values[0][session.pages[1].slot, 22 - 16] = float("nan")
    found = scene.run(kernel, FULL, ScoreOptions(0.2, None, None))
    assert found[:2].isfinite().all()
    assert found[2].isnan().all()


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_neither_company_nor_threads_change_a_bit(kernel: CpuBackend, dtype: torch.dtype) -> None:
    scene = Scene(PageShape(2, 48, 2, 48, dtype), 6, [*WORK, (3000, 1), (1500, 4)], hide=True)
    scores = ScoreOptions(0.2, None, None)
    together = scene.run(kernel, FULL, scores)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        alone = torch.cat([scene.alone(n, kernel, FULL, scores) for n in range(len(scene.sessions))])
        assert torch.equal(alone, together)
    assert torch.equal(scene.run(kernel, FULL, scores), together)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_threads_divide_the_heads_of_long_spans(
    kernel: CpuBackend, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel, "_faster", {})
    monkeypatch.setattr("cache.attention.cpu.kernel_is_faster", lambda *_: True)
    scene = Scene(PageShape(3, 48, 3, 40, dtype), 6, [(100, 70), (0, 33)], hide=True)
    scores = ScoreOptions(0.2, None, None)
    together = scene.run(kernel, FULL, scores)
    assert error(together, scene.wanted(FULL, scores)) < BOUNDS[dtype]
    torch.set_num_threads(1)
    assert torch.equal(scene.run(kernel, FULL, scores), together)


def test_queries_may_lie_in_memory_as_they_like(kernel: CpuBackend) -> None:
    scene = Scene(PageShape(2, 24, 2, 16, torch.float32), 4, WORK)
    scores = ScoreOptions(0.5, None, None)
    want = scene.run(kernel, FULL, scores)
    for order in ((0, 1, 2), (1, 0, 2), (2, 1, 0)):
        laid = scene.query.permute(order).contiguous().permute([order.index(i) for i in range(3)])
        assert torch.equal(laid, scene.query)
        scene.query = laid
        assert torch.equal(scene.run(kernel, FULL, scores), want)


def normal(numbers: torch.Tensor) -> torch.Tensor:
    """Matrix units take the smallest numbers of bfloat16, those below its precision, for zero."""
    tiny = (numbers.abs() < torch.finfo(numbers.dtype).tiny) & (numbers.dtype is torch.bfloat16)
    return torch.where(tiny, 0, numbers)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_number_of_16_bits_survives(kernel: CpuBackend, dtype: torch.dtype) -> None:
    """A token that sees itself alone gets its own value, whatever that is."""
    scene = Scene(PageShape(1, 64, 1, 64, dtype), 1, [(0, 1)] * 1024, page=1)
    numbers = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype).view(1024, 64)
    scene.tier.write(0, scene.step.write_index, torch.zeros(1, 1, 1024, 64, dtype=dtype), numbers[None, None])
    out = scene.run(kernel, FULL, ScoreOptions(1.0, None, None))[:, 0]
    torch.testing.assert_close(normal(out), normal(numbers), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rounding_is_torchs(kernel: CpuBackend, dtype: torch.dtype) -> None:
    """Equal weights on two neighbouring numbers: what they give lies just between them."""
    scene = Scene(PageShape(1, 64, 1, 64, dtype), 1, [(1, 1)] * 1024, page=2)
    numbers = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype).view(1024, 64)
    above = torch.arange(1, 65537, dtype=torch.int32).to(torch.int16).view(dtype).view(1024, 64)
    nothing = torch.zeros(1, 1, 1024, 64, dtype=dtype)
    scene.tier.write(0, scene.step.write_index, nothing, numbers[None, None])
    scene.tier.write(0, scene.step.write_index - 1, nothing, above[None, None])
    out = scene.run(kernel, FULL, ScoreOptions(1.0, None, None))[:, 0]
    want = ((numbers.float() + above.float()) / 2).to(dtype)
    kept = (normal(numbers) == numbers) & (normal(above) == above) | ~numbers.isfinite()
    torch.testing.assert_close(out[kept], want[kept], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_no_number_stays_none_and_stays_where_it_is(kernel: CpuBackend, bad: float) -> None:
    scene = Scene(PageShape(2, 24, 2, 16, torch.float32), 4, [(40, 1), (300, 2)])
    scores = ScoreOptions(0.5, None, None)
    want = scene.run(kernel, FULL, scores)
    page = scene.sessions[1][0].pages[3].slot
    scene.tier.values[0][page, 5, 1, 2] = bad
    got = scene.run(kernel, FULL, scores)
    hurt = torch.zeros(got.shape, dtype=torch.bool)
    hurt[1:, 2:, 2] = True
    assert not got[hurt].isfinite().any()
    assert torch.equal(got[~hurt], want[~hurt])
    scene.tier.keys[0][page, 5, 1, 2] = float("nan")
    got = scene.run(kernel, FULL, scores)
    assert got[1:, 2:].isnan().all()
    assert torch.equal(got[:1], want[:1])
    assert torch.equal(got[1:, :2], want[1:, :2])


def test_float64_and_strange_heads_are_torchs(kernel: CpuBackend) -> None:
    def fits(shape: PageShape, query: torch.Tensor) -> bool:
        return kernel.fits(Signature.of(shape, query, ScoreOptions(1.0, None, None), FULL))

    assert fits(PageShape(2, 8, 2, 8, torch.float32), torch.zeros(4, 1, 8))
    assert not fits(PageShape(2, 8, 2, 8, torch.float64), torch.zeros(4, 1, 8, dtype=torch.float64))
    assert not fits(PageShape(2, 8, 2, 8, torch.float32), torch.zeros(4, 1, 8, dtype=torch.bfloat16))
    assert not fits(PageShape(2, 8, 2, 8, torch.float32), torch.zeros(3, 1, 8))
    assert not fits(PageShape(2, 8, 2, 8, torch.float32), torch.zeros(4, 1, 9))
    assert not fits(PageShape(2, 8, 1, 8, torch.float32), torch.zeros(4, 1, 8))


class Layered:
    """A scene seen through ``PackedAttention``, as a model calls it."""

    def __init__(self) -> None:
        self.scene = Scene(PageShape(2, 24, 2, 16, torch.float32), 4, [(30, 1), (3, 40), (300, 2)])
        self.rows: list[tuple[int, ...]] = []

    def run(self, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
        """The output, and in ``rows`` the spans of each call of the kernel."""
        attend = CpuBackend.attend

        def watched(self_: CpuBackend, plan: CpuPlan, *args: object) -> None:
            self.rows.append(tuple(sorted(plan.numbers)))
            attend(self_, plan, *args)  # type: ignore[arg-type]

        monkeypatch.setattr(CpuBackend, "attend", watched)
        step = self.scene.step
        attention = PackedAttention([FULL])
        cache = PackedCache([FULL], step, frozenset({0}))
        new = [(k[s.start :], v[s.start :]) for (k, v), s in zip(self.scene.history, step.spans, strict=True)]
        key, value = (torch.cat(part).transpose(0, 1)[None] for part in zip(*new, strict=True))
        module = torch.nn.Module()
        module.layer_idx = 0  # type: ignore[assignment]
        with attention.running(step):
            key, value = cache.update(key, value, 0)
            return attention(module, self.scene.query[None], key, value, None, scaling=0.5)[0][0]


@pytest.mark.parametrize("faster", [True, False])
def test_long_spans_go_the_faster_way(kernel: CpuBackend, faster: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    layered = Layered()
    torchs: list[int] = []
    timed: list[PageShape] = []

    def watched(query: torch.Tensor, *args: Any) -> torch.Tensor:
        torchs.append(query.shape[1])
        return attend(query, *args)

    def measure(shape: PageShape, *_: object) -> bool:
        timed.append(shape)
        return faster

    monkeypatch.setattr("cache.attention.packed_attention.attend", watched)
    monkeypatch.setattr("cache.attention.cpu.kernel_is_faster", measure)
    monkeypatch.setattr(kernel, "_faster", {})
    monkeypatch.setattr(kernel._self_test, "_passed", {})  # it tries long spans, whichever way they go
    for _ in range(2):
        got = layered.run(monkeypatch)
        assert layered.rows[-1] == ((0, 1, 2) if faster else (0, 2))
        assert error(got, layered.scene.wanted(FULL, ScoreOptions(0.5, None, None))) < 1e-5
    assert torchs == [] if faster else [40, 40]
    assert timed == [layered.scene.tier.shapes[0]]


def test_shapes_that_the_kernel_does_not_know_are_not_timed(
    kernel: CpuBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = PageShape(2, 8, 2, 8, torch.float32)
    monkeypatch.setattr("cache.attention.cpu.kernel_is_faster", lambda shape, _: shape == known)
    monkeypatch.setattr(kernel, "_faster", {})
    assert kernel._takes_all([known, PageShape(2, 8, 2, 8, torch.float64), PageShape(2, 8, 1, 8, torch.float32)])
    assert not kernel._takes_all([known, PageShape(2, 8, 2, 16, torch.float32)])


@pytest.mark.parametrize("codec", Codec)
def test_pages_of_records_are_timed(kernel: CpuBackend, codec: Codec) -> None:
    shape = PageShape(2, 32, 2, 32, torch.float32, codec=codec)
    assert kernel._is_faster(shape) in (True, False)


@pytest.mark.parametrize(("seconds", "faster"), [(0.0, True), (0.2, False)])
def test_the_faster_way_is_measured(seconds: float, faster: bool) -> None:
    shape = PageShape(2, 24, 2, 16, torch.float32)
    assert kernel_is_faster(shape, lambda *_: time.sleep(seconds)) is faster


def test_a_kernel_that_has_no_memory_to_be_timed_gets_no_long_spans(caplog: pytest.LogCaptureFixture) -> None:
    def fails(*_: object) -> None:
        raise MemoryError("no memory for attention")

    with caplog.at_level(logging.INFO, "warmturn.engine"):
        assert not kernel_is_faster(PageShape(2, 24, 2, 16, torch.float32), fails)
    assert [record.getMessage().rpartition(" ")[2] for record in caplog.records] == ["attention"]


def test_a_kernel_that_is_not_right_is_not_used(
    kernel: CpuBackend, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reference = self_test.reference
    monkeypatch.setattr(self_test, "reference", lambda *args: reference(*args) * 1.001)
    monkeypatch.setattr(kernel._self_test, "_passed", {})
    monkeypatch.setattr("cache.attention.cpu.kernel_is_faster", lambda *_: True)
    layered = Layered()
    with caplog.at_level(logging.INFO, "warmturn.engine"):
        layered.run(monkeypatch)
        got = layered.run(monkeypatch)
    assert error(got, layered.scene.wanted(FULL, ScoreOptions(0.5, None, None))) < 1e-5
    assert set(layered.rows) == {(0, 1, 2)}  # the comparison's own calls, each with three sessions
    assert [record.getMessage() for record in caplog.records if "wrong results" in record.getMessage()] == [
        f"the compiled attention gives wrong results for {layered.scene.tier.shapes[0]}: torch is used"
    ]


@pytest.mark.usefixtures("two_threads")
def test_a_team_is_as_large_as_torchs_and_called_only_for_more_than_one_task(
    kernel: CpuBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    teams: list[int] = []

    def together(member: Any, data: int, threads: int, waited: int) -> None:
        teams.append(threads)
        member(data)  # one of them may well do it all

    member = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    team = ctypes.CFUNCTYPE(None, member, ctypes.c_void_p, ctypes.c_uint, ctypes.c_void_p)(together)
    monkeypatch.setattr(kernel, "_team", ctypes.cast(team, ctypes.c_void_p).value)
    scores = ScoreOptions(0.5, None, None)
    for work in ([(200, 1)], [(300, 1)], [(5, 1), (6, 2)]):
        scene = Scene(PageShape(1, 16, 1, 16, torch.float32), 2, work)
        assert error(scene.run(kernel, FULL, scores), scene.wanted(FULL, scores)) < 1e-5
    assert teams == [2, 2]
    scene = Scene(PageShape(2, 16, 2, 16, torch.float32), 2, [(5, 20)])  # a task for each key head
    assert error(scene.run(kernel, FULL, scores), scene.wanted(FULL, scores)) < 1e-5
    assert teams == [2, 2, 2]
    torch.set_num_threads(1)
    scene.run(kernel, FULL, scores)
    assert teams == [2, 2, 2]


# -- building -------------------------------------------------------------------------------------------------------

FAKE = """#!/bin/sh
case "$1" in --version) echo made up; exit 0;; esac
for last; do :; done
echo "$@" >> "$0.calls"
echo object > "$last"
"""


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A source file, a folder for what is made of it, and a compiler that makes the same of everything."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "objects"))
    monkeypatch.setenv("CXX", f"{tmp_path / 'cxx'} -extra")
    (tmp_path / "cxx").write_text(FAKE.replace('"$1"', '"$2"'))
    (tmp_path / "cxx").chmod(0o700)
    path = tmp_path / "source" / "kernel.cpp"
    path.parent.mkdir()
    path.write_text("code")
    return path


def calls(source: Path) -> int:
    """How often the compiler has run."""
    path = source.parent.parent / "cxx.calls"
    return len(path.read_text().splitlines()) if path.exists() else 0


def test_an_object_is_made_once_and_is_the_users_alone(source: Path) -> None:
    path = build(source)
    assert build(source) == path
    assert path.read_text() == "object\n"
    assert calls(source) == 1
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert os.listdir(path.parent) == [path.name]


def test_another_source_header_or_compiler_makes_another_object(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {build(source)}
    source.write_text("other code")
    seen.add(build(source))
    (source.parent / "beside.h").write_text("header")
    seen.add(build(source))
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "something else")
    monkeypatch.setattr(compiler, "_FLAGS", compiler._FLAGS + " -g")
    seen.add(build(source))
    (source.parent.parent / "cxx").write_text(FAKE.replace('"$1"', '"$2"').replace("made up", "another"))
    compiler._version.cache_clear()  # a process asks each compiler once
    seen.add(build(source))
    monkeypatch.setenv("CXX", os.environ["CXX"].replace("-extra", "-other"))
    seen.add(build(source))
    assert len(seen) == calls(source) == 6


def test_an_older_compiler_leaves_out_what_it_does_not_know(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "_instructions", lambda: ["-mavx2", compiler._NEWEST])
    script = source.parent.parent / "cxx"
    script.write_text(
        script.read_text().replace("for last", f'case "$*" in *{compiler._NEWEST}*) exit 1;; esac\nfor last')
    )
    assert build(source).read_text() == "object\n"
    assert "-mavx2" in script.with_name("cxx.calls").read_text()


def test_what_was_made_serves_without_a_compiler(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = build(source)
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert build(source) == path
    source.write_text("other code")
    with pytest.raises(NotBuilt, match="no C\\+\\+ compiler"):
        build(source)


def test_a_compiler_that_fails(source: Path) -> None:
    (source.parent.parent / "cxx").write_text("#!/bin/sh\nexit 1\n")
    with pytest.raises(NotBuilt, match="CalledProcessError while compiling"):
        build(source)


def test_a_folder_that_others_can_write_to_is_refused(source: Path) -> None:
    path = build(source)
    path.parent.chmod(0o770)
    with pytest.raises(NotBuilt, match="open to other users"):
        build(source)


def test_a_link_in_place_of_the_object_is_refused(source: Path) -> None:
    path = build(source)
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))
    with pytest.raises(NotBuilt, match="not a regular file"):
        build(source)


@pytest.mark.usefixtures("source")
@pytest.mark.parametrize(
    ("command", "reason"),
    [(None, "the compiled file cannot be loaded"), ("no-such-compiler", "there is no C++ compiler")],
)
def test_without_a_kernel_torch_computes_and_the_log_says_why(
    command: str | None, reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if command is not None:
        monkeypatch.setenv("CXX", command)
    cpu.cpu_backend.cache_clear()
    try:
        with caplog.at_level(logging.INFO, "warmturn.engine"):
            layered = Layered()
            got = layered.run(monkeypatch)
            layered.run(monkeypatch)
    finally:
        cpu.cpu_backend.cache_clear()
    assert layered.rows == []
    assert error(got, layered.scene.wanted(FULL, ScoreOptions(0.5, None, None))) < 1e-5
    assert [record.getMessage() for record in caplog.records] == [
        f"attention uses torch only, which is slower over long histories: {reason}"
    ]
