"""How the Triton kernels are launched, seen by kernels that note it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cache.attention import triton
from cache.attention.backend import Signature
from cache.attention.self_test import LAYERS, StepSpec, random_step
from cache.attention.triton import TritonBackend, launch_shape
from cache.memory.memory_tier import PageShape
from cache.pages.layers import ScoreOptions

CPU = torch.device("cpu")


class Noting:
    """A kernel that notes its launches."""

    def __init__(self) -> None:
        self.launches: list[tuple[Any, dict[str, Any]]] = []

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **options: self.launches.append((grid, options))


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> TritonBackend:
    kernels = SimpleNamespace(attend=Noting(), merge=Noting())
    monkeypatch.setattr(triton, "import_module", lambda name: kernels)
    return TritonBackend(CPU)


def launches(backend: TritonBackend, *work: tuple[int, int]) -> list[tuple[Any, dict[str, Any]]]:
    """The launches of ``attend`` in one layer of Llama-3.1-8B's shape."""
    shape = PageShape(8, 128, 8, 128, torch.bfloat16)
    step = random_step(StepSpec(work, False), CPU, shape, torch.Generator().manual_seed(1))
    query = torch.zeros(32, step.tokens, 128, dtype=torch.bfloat16)
    out = torch.zeros(step.tokens, 32, 128, dtype=torch.bfloat16)
    plan = backend.plan(step, LAYERS[0], step.numbers, True)
    assert plan is not None
    backend.attend(plan, step, LAYERS[0], 0, query, ScoreOptions(0.1, None, None), out)
    return [(grid, options) for grid, options in backend._functions.attend.launches]


def test_spans_that_decode_keep_their_small_tiles_beside_a_prompt(backend: TritonBackend) -> None:
    alone = launches(backend, (300, 1), (77, 1))
    assert [options["ROWS"] for _, options in alone] == [16]
    backend._functions.attend.launches.clear()
    beside = launches(backend, (300, 1), (77, 1), (0, 90))
    assert [options["ROWS"] for _, options in beside] == [16, 64]
    assert beside[0] == alone[0]


def test_keys_of_the_next_block_are_read_ahead(backend: TritonBackend) -> None:
    assert [options["num_stages"] for _, options in launches(backend, (300, 1))] == [5]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("widest", [16, 24, 64, 128, 192, 256, 512])
@pytest.mark.parametrize("group", [1, 4, 8, 16, 71])
def test_a_tile_holds_a_token_and_fits_small_gpus(dtype: torch.dtype, widest: int, group: int) -> None:
    for rows in (16, 64):
        shape = launch_shape(dtype, group, rows, widest)
        assert shape.rows >= max(16, group)
        assert shape.rows & (shape.rows - 1) == 0
        if shape.stages == 5:
            assert (shape.rows + 4 * shape.keys) * widest * dtype.itemsize <= 90 << 10


def test_wide_heads_are_the_kernels(backend: TritonBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend._self_test, "passes", lambda signature: True)
    for dim, fits in ((256, True), (512, True), (1024, False)):
        shape = PageShape(2, dim, 2, dim, torch.bfloat16)
        assert backend.fits(Signature(shape, 8, dim, torch.bfloat16, False, False, False)) is fits
