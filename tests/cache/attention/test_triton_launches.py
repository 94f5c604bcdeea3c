"""How the Triton kernels are launched, seen by kernels that note it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cache.attention import triton
from cache.attention.backend import Signature
from cache.attention.self_test import LAYERS, StepSpec, random_step
from cache.attention.triton import TritonBackend, latent_shape, launch_shape, launch_shapes
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


LLAMA = PageShape(8, 128, 8, 128, torch.bfloat16)  # Llama-3.1-8B's
LATENTS = PageShape(1, 576, 1, 512, torch.bfloat16, joined=True)  # DeepSeek-V3's


def launches(
    backend: TritonBackend, *work: tuple[int, int], shape: PageShape = LLAMA, heads: int = 32
) -> list[tuple[Any, dict[str, Any]]]:
    """The launches of ``attend`` in one layer."""
    step = random_step(StepSpec(work, False), CPU, shape, torch.Generator().manual_seed(1))
    query = torch.zeros(heads, step.tokens, shape.key_dim, dtype=torch.bfloat16)
    out = torch.zeros(step.tokens, heads, shape.value_dim, dtype=torch.bfloat16)
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


@pytest.mark.parametrize(
    ("heads", "work", "programs", "group", "rows"),
    [
        (16, (300, 1), 5, 16, 16),
        (16, (20, 3), 2, 16, 32),  # two tokens to a tile
        (20, (300, 1), 5, 20, 32),
        (40, (300, 1), 2 * 5, 20, 32),
        (128, (300, 1), 4 * 4, 32, 32),
    ],
)
def test_heads_share_rows_of_latents_in_tiles(
    heads: int, work: tuple[int, int], programs: int, group: int, rows: int, backend: TritonBackend
) -> None:
    ((grid, options),) = launches(backend, work, shape=LATENTS, heads=heads)
    assert (grid, options["GROUP"], options["ROWS"]) == ((programs,), group, rows)
    assert (options["DIM"], options["REST"], options["VALUE"]) == (512, 64, 512)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("heads", [1, 5, 16, 20, 40, 71, 128])
def test_tiles_hold_all_heads_over_rows_of_latents(dtype: torch.dtype, heads: int) -> None:
    shapes, count = launch_shapes(dtype, heads, 1, 512, True)
    group = -(-heads // count)
    assert group * count >= heads
    assert all(group <= rows == shape.rows for rows, shape in shapes.items())
    assert all(latent_shape(dtype, group, rows) == shape for rows, shape in shapes.items())


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


@pytest.mark.parametrize(
    ("latent", "shared", "fits"), [(512, 64, True), (28, 12, True), (1024, 64, False), (512, 65, False)]
)
def test_rows_of_latents_are_the_kernels(
    latent: int, shared: int, fits: bool, backend: TritonBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend._self_test, "passes", lambda signature: True)
    shape = PageShape(1, latent + shared, 1, latent, torch.bfloat16, joined=True)
    assert backend.fits(Signature(shape, 128, latent + shared, torch.bfloat16, False, False, False)) is fits
