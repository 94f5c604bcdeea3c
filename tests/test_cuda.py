"""What runs on a GPU only, on a GPU: kernels against the definition, copies, and an engine with all of it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from device_weights import KINDS, MOST_OF, packed_source
from engine_kit import byte_grammars
from gguf_kit import Q4_0
from gguf_models import written
from gpu_kit import CountingBackend
from tiny_models import greedy, make_model, make_tokenizer
from transformers import AutoModelForCausalLM

from cache.attention.backend import Backend, Signature
from cache.attention.cpu import cpu_backend
from cache.attention.packed_attention import PackedAttention
from cache.attention.self_test import LAYERS, StepSpec, random_step, reference
from cache.attention.triton import triton_backend
from cache.attention.varlen import varlen_backend
from cache.memory.codec import Codec
from cache.memory.memory_tier import MemoryTier, PageShape
from cache.memory.pair_kernel import pair_kernel
from cache.memory.record_kernel import record_kernel
from cache.memory.stream import HostCopy, put
from cache.pages.layers import AttentionLayer, ScoreOptions, read_layers
from cache.pages.pool import Page, PagePool
from cache.store import SessionStore
from cache.tiers import transfer
from scheduler.accel.gpu.compiled import CompileOptions
from scheduler.accel.gpu.device_form import MOST
from scheduler.accel.gpu.device_weight import DeviceWeight, device_weight_of
from scheduler.accel.gpu.packed_product import (
    multiply,
    multiply_routed,
    product_kernels,
    try_kernels,
    waitless_products,
)
from scheduler.core.engine_core import EngineCore
from scheduler.core.scheduler import Scheduler
from scheduler.core.text import Vocabulary
from scheduler.core.turn_limits import Limits
from scheduler.model import gguf
from scheduler.model.cuda_capture import CudaCapture
from scheduler.model.decode_graphs import DecodeGraphs
from scheduler.model.probe import probe
from scheduler.model.runner import ModelRunner
from scheduler.protocol import Submit, pack_ids
from scheduler.sampling_params import Sampling, Stopping
from scheduler.weights.quantised_weight import QuantisedWeight

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here"),
    pytest.mark.filterwarnings("default"),  # what others say of a device is not ours to mend
]
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
PAGE = 16


DTYPES = (torch.bfloat16, torch.float16, torch.float32)
HEADS = ((32, 8, 128), (16, 8, 128), (9, 3, 64), (8, 1, 256), (6, 2, 24))
EXTRAS = ((False, False), (True, False), (False, True))
# Every pair of a dtype, heads and an extra, a third of all triples: compiling a variant takes half a second.
PAIRS = [(d, *h, *EXTRAS[(i + j) % 3]) for i, d in enumerate(DTYPES) for j, h in enumerate(HEADS)]


@pytest.mark.parametrize(("dtype", "heads", "key_heads", "dim", "capped", "sinks"), PAIRS)
def test_the_kernel_over_pages_is_right(
    dtype: torch.dtype, heads: int, key_heads: int, dim: int, capped: bool, sinks: bool
) -> None:
    backend = triton_backend(CUDA)
    assert backend is not None
    shape = PageShape(key_heads, dim, key_heads, dim, dtype)
    for chunked in (False, True):
        assert backend.fits(Signature(shape, heads, dim, dtype, capped, sinks, chunked))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dims", [(128, 128), (192, 128), (24, 24)])
def test_keys_and_values_are_stored_in_one_launch(dtype: torch.dtype, dims: tuple[int, int]) -> None:
    assert pair_kernel(8, *dims, dtype, CUDA) is not None  # it stores what torch stores


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("codec", [Codec.INT8, Codec.FP8])
def test_records_are_stored_and_read(dtype: torch.dtype, codec: Codec) -> None:
    backend = triton_backend(CUDA)
    assert backend is not None
    shape = PageShape(8, 128, 8, 128, dtype, codec=codec)
    assert shape.key is not None
    assert record_kernel(shape.key, dtype, CUDA) is not None  # it stores what torch stores
    assert backend.fits(Signature(shape, 32, 128, dtype, False, False, False))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sinks", [False, True])
def test_torchs_flash_kernels_are_right(dtype: torch.dtype, sinks: bool) -> None:
    backend = varlen_backend(CUDA)
    assert backend is not None
    assert backend.fits(Signature(PageShape(8, 128, 8, 128, dtype), 32, 128, dtype, False, sinks, False))


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("hide", [False, True])
def test_both_together_are_right(layer: AttentionLayer, hide: bool) -> None:
    generator, shape = torch.Generator().manual_seed(4), PageShape(2, 64, 2, 64, torch.bfloat16)
    spec = StepSpec(((5000, 1), (40, 300), (700, 17), (0, 129)), hide)
    step = random_step(spec, CUDA, shape, generator)
    query = torch.randn(8, step.tokens, 64, generator=generator).to(CUDA, torch.bfloat16)
    out, scores = query.new_full((step.tokens, 8, 64), float("nan")), ScoreOptions(0.125, None, None)
    assert not PackedAttention([layer])._attend_in_place(step, layer, 0, query, scores, out)
    want = reference(step, layer, query.float(), scores)
    assert (out.float() - want).abs().max() <= 1e-2 * want.abs().max()


def test_pages_go_to_the_host_and_back() -> None:
    shapes = {0: PageShape(2, 8, 2, 8, torch.bfloat16), 3: PageShape(8, 128, 8, 128, torch.float16, 32)}
    pool = PagePool(MemoryTier(900, PAGE, CUDA, shapes), MemoryTier(900, PAGE, CPU, shapes, pinned=True))
    assert all(tensor.is_pinned() for tensor in pool.host.pools.values())
    pages = [pool.alloc() for _ in range(850)]
    for tensor in pool.device.pools.values():
        tensor.copy_(torch.randn(tensor.shape))
    rows = transfer.rows_of(pages, PAGE, 0, 850 * PAGE)
    before = pool.device.gather(rows)
    rng = random.Random(1)
    for _ in range(3):
        moved = rng.sample(pages, 600)
        pool.release_warm(moved)
        pool.demote()
        for tensor in pool.device.pools.values():  # the slots are others' now
            tensor[[slot for slot in range(900) if slot in pool.device.frames._free]] = float("nan")
        for page in rng.sample(moved, 20):
            there = pool.host.gather(transfer.rows_of([page], PAGE, 0, PAGE))
            at = pages.index(page) * PAGE
            assert all(torch.equal(there[name], before[name][at : at + PAGE]) for name in before)
        pool.hold_warm(moved)
        pool.promote(moved)
        after = pool.device.gather(transfer.rows_of(pages, PAGE, 0, 850 * PAGE))
        assert all(torch.equal(after[name], before[name]) for name in before)


def test_what_files_hold_is_put_into_pages() -> None:
    tier = MemoryTier(9, PAGE, CUDA, {1: PageShape(2, 8, 2, 8, torch.bfloat16)})
    pages = [Page(tier, slot) for slot in (7, 2, 4)]
    rows = transfer.rows_of(pages, PAGE, 5, 41)
    tokens = torch.randn(36, 2, 8).bfloat16()
    tier.scatter(rows, "1.key", tokens)
    assert torch.equal(tier.gather(rows)["1.key"], tokens)


def test_what_is_sent_is_there_when_it_is_read() -> None:
    numbers = np.arange(1 << 20)
    sent = [put(numbers + n, CUDA) for n in range(20)]
    assert [int(part[5]) for part in HostCopy(*sent).wait()] == [n + 5 for n in range(20)]


class Served:
    """An engine on the GPU, with graphs or without, with compiled layers or without."""

    def __init__(
        self,
        name: str,
        dtype: torch.dtype,
        graphs: bool,
        backend: CountingBackend | None = None,
        of: Any = None,
        plain: Any = None,
    ) -> None:
        """``of``: another model, which should say what ``plain`` says."""
        self.model = make_model(name).to(CUDA, dtype) if of is None else of
        self.plain = make_model(name).to(CUDA, dtype) if plain is None else plain
        compiling = CompileOptions(backend, most=1e9) if backend is not None else None
        verdict = probe(self.model, read_layers(self.model.config.get_text_config()), PAGE, compiling=compiling)
        self.mode = verdict.mode
        tier = MemoryTier(200, PAGE, CUDA, verdict.shapes, scratch=True)
        host = MemoryTier(200, PAGE, CPU, verdict.shapes, pinned=True)
        store = SessionStore(PagePool(tier, host), (1 << 28) if verdict.mode.stateful else None)
        store.skeleton = verdict.skeleton
        self.graphs = DecodeGraphs(verdict.mode, tier, 8, 512, CudaCapture()) if graphs else None
        runner = ModelRunner(verdict.mode, tier, graphs=self.graphs)
        scheduler = Scheduler(store, max_running=8, max_step_tokens=64, max_queued=64)
        self.engine = EngineCore(
            runner, scheduler, Vocabulary(make_tokenizer()), (258,), Limits(512, 259), byte_grammars()
        )
        self.sent = 0

    def ask(self, prompts: list[list[int]], count: int, sampling: Sampling) -> list[list[int]]:
        tokens: dict[str, list[int]] = {}
        for prompt in prompts:
            self.sent += 1
            stopping = Stopping(max_tokens=count, ignore_eos=True)
            self.engine.submit(Submit(f"t{self.sent}", "a", pack_ids(prompt), None, sampling, stopping))
            tokens[f"t{self.sent}"] = []
        while not self.engine.idle:
            for delta in self.engine.step().deltas:
                tokens[delta.turn].extend(delta.tokens)
            self.engine.check_integrity()
        return list(tokens.values())


@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3", "qwen3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_graphs_are_captured_and_say_what_steps_say(name: str, dtype: torch.dtype) -> None:
    with_graphs, without = Served(name, dtype, True), Served(name, dtype, False)
    rng = random.Random(2)
    prompts = [[rng.randrange(256) for _ in range(rng.randrange(3, 200))] for _ in range(8)]
    for company in (1, 3, 8):
        got = with_graphs.ask(prompts[:company], 40, Sampling(temperature=0.0))
        want = without.ask(prompts[:company], 40, Sampling(temperature=0.0))
        if dtype is torch.float32:
            assert got == want
        else:  # rounding may turn a close choice, and all that follows it
            assert sum(a[:8] == b[:8] for a, b in zip(got, want, strict=True)) >= company - 2
    assert with_graphs.graphs is not None
    # Turns end one after the other, so smaller steps than these may have been captured too.
    assert set(with_graphs.graphs.captured) >= {1, 4, 8}


@pytest.mark.parametrize(("heads", "latent", "shared"), [(16, 512, 64), (128, 512, 64), (40, 256, 32), (5, 28, 12)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_kernel_attends_to_rows_of_latents(dtype: torch.dtype, heads: int, latent: int, shared: int) -> None:
    backend = triton_backend(CUDA)
    assert backend is not None
    shape = PageShape(1, latent + shared, 1, latent, dtype, joined=True)
    assert backend.fits(Signature(shape, heads, latent + shared, dtype, False, False, False))


@pytest.mark.parametrize("name", ["gpt_oss", "deepseek_v3", "llama4", "qwen3_next"])
def test_other_models_run_with_or_without_graphs(name: str) -> None:
    with_graphs, without = Served(name, torch.float32, True), Served(name, torch.float32, False)
    prompts = [[7, 8, 9], [1] * 30]
    assert with_graphs.ask(prompts, 20, Sampling(temperature=0.0)) == without.ask(
        prompts, 20, Sampling(temperature=0.0)
    )


def test_a_seed_draws_the_same_with_and_without_graphs() -> None:
    sampling = Sampling(temperature=1.0, top_p=0.9, top_k=40, seed=5, frequency_penalty=0.5, logit_bias={3: 2.0})
    with_graphs, without = (Served("llama", torch.float32, graphs) for graphs in (True, False))
    prompts = [[7, 8, 9], [1] * 30]
    assert with_graphs.ask(prompts, 30, sampling) == without.ask(prompts, 30, sampling)


def test_the_cpu_kernel_and_the_gpu_kernel_agree() -> None:
    backends: dict[torch.device, Backend[Any] | None] = {CPU: cpu_backend(), CUDA: triton_backend(CUDA)}
    if backends[CPU] is None:
        pytest.skip("there is no C++ compiler")
    shape, scores = PageShape(2, 64, 2, 64, torch.float32), ScoreOptions(0.125, 20.0, torch.ones(8))
    outs: list[torch.Tensor] = []
    for device in (CPU, CUDA):
        step = random_step(StepSpec(((900, 1), (30, 5)), True), device, shape, torch.Generator().manual_seed(1))
        query = torch.randn(8, step.tokens, 64, generator=torch.Generator().manual_seed(2)).to(device)
        out = query.new_empty(step.tokens, 8, 64)
        backend = backends[device]
        assert backend is not None
        there = scores._replace(sinks=torch.ones(8, device=device))
        plan = backend.plan(step, LAYERS[1], step.numbers, True)
        backend.attend(plan, step, LAYERS[1], 0, query, there, out)
        outs.append(out.cpu())
    assert (outs[0] - outs[1]).abs().max() < 1e-5


@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3", "qwen3", "gpt_oss"])
def test_compiled_layers_and_graphs_of_them_say_what_the_model_says(name: str) -> None:
    from torch._inductor.compile_fx import compile_fx

    backend = CountingBackend(compile_fx)
    served = Served(name, torch.float32, True, backend)
    assert served.mode.compiled is not None
    assert len(served.mode.compiled) == served.plain.config.num_hidden_layers
    made, ran = backend.graphs, backend.ran
    prompts = [[7, 8, 9], [1] * 30, [n % 256 for n in range(70)]]
    for company in (1, 3):
        want = [greedy(served.plain, prompt, 20) for prompt in prompts[:company]]
        assert served.ask(prompts[:company], 20, Sampling(temperature=0.0)) == want
    assert backend.graphs == made  # none while it served
    assert backend.ran > ran
    assert served.graphs is not None
    assert len(served.graphs) == 2


def test_compiled_layers_are_no_slower() -> None:
    model = make_model("llama").to(CUDA, torch.bfloat16)
    verdict = probe(model, read_layers(model.config), PAGE, compiling=CompileOptions())
    assert verdict.mode.compiled is not None, verdict.report


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_products_with_packed_weights_are_those_of_their_values(kind: str, dtype: torch.dtype) -> None:
    """By the kernel, and of many rows by torch; both decode what the checkpoint says."""
    source = packed_source(kind, 264, 1024)
    weight = DeviceWeight(QuantisedWeight(source, dtype), CUDA)
    kernels = product_kernels(CUDA)
    assert kernels is not None
    try_kernels(weight.parts, weight.form, dtype, {torch.float32: 2e-4}.get(dtype, 2e-2))
    assert kernels.fits(weight.form, dtype)  # the kernels are right
    values = source.dequantise(0, 264)
    assert torch.equal(weight.dequantise(0, 264).cpu(), values)
    assert (
        sum(part.untyped_storage().nbytes() for part in weight.parts) <= MOST_OF.get(kind, MOST) * source.nbytes + 512
    )
    x = torch.randn(300, 1024, generator=torch.Generator().manual_seed(0)).to(CUDA, dtype)
    want = x.double().cpu() @ values.double().t()
    for count in (1, 16, 64, 65, 300):
        got = multiply(x[:count], weight.parts, weight.form).double().cpu()
        assert (got - want[:count]).norm() <= {torch.float32: 1e-5}.get(dtype, 1e-2) * want[:count].norm()
    one, more = (multiply(x[:count], weight.parts, weight.form)[0] for count in (1, 40))
    assert torch.equal(one, more)  # a row does not depend on those beside it


@pytest.mark.parametrize("tokens", [1, 20, 400])
def test_packed_experts_are_multiplied_without_waiting(tokens: int) -> None:
    source = packed_source("Q4_K", 8 * 128, 512)
    weight = DeviceWeight(QuantisedWeight(source, torch.bfloat16, 8), CUDA)
    x = torch.randn(tokens, 512, generator=torch.Generator().manual_seed(0)).to(CUDA, torch.bfloat16)
    chosen = torch.randint(0, 8, (tokens * 2,), generator=torch.Generator().manual_seed(1)).to(CUDA)
    want = multiply_routed(x, chosen, weight.parts, weight.form)
    with waitless_products(), CudaCapture().watched():
        got = multiply_routed(x, chosen, weight.parts, weight.form)
    values = source.dequantise(0, source.out).view(8, 128, 512).double()[chosen.cpu()]
    exact = torch.einsum("ni,noi->no", x.double().cpu().repeat_interleave(2, 0), values)
    for found in (got, want):
        assert (found.double().cpu() - exact).norm() <= 1e-2 * exact.norm()


@pytest.mark.parametrize("label", ["llama", "qwen2", "gpt-oss"])
@pytest.mark.parametrize("graphs", [False, True])
def test_a_gguf_file_is_served_packed_on_a_gpu(label: str, graphs: bool, tmp_path: Path) -> None:
    path, want = written(tmp_path / "x.gguf", label, Q4_0)
    before = torch.cuda.memory_allocated()
    settings = gguf.read_config(path)
    model, _ = gguf.read_model(path, settings, AutoModelForCausalLM, None, {}, CUDA)
    weights = [weight for p in model.parameters() if (weight := device_weight_of(p)) is not None]
    assert len(weights) > 8
    assert torch.cuda.memory_allocated() - before <= MOST * path.stat().st_size + 512 * 200  # rounded up each
    served = Served("llama", torch.float32, graphs, of=model, plain=want.to(CUDA))
    prompts = [[7, 8, 9], [1] * 30, [n % 250 for n in range(70)]]
    said = served.ask(prompts, 20, Sampling(temperature=0.0))
    assert said == [greedy(served.plain, prompt, 20) for prompt in prompts]
    if graphs:
        assert served.graphs is not None
        assert len(served.graphs) > 0, served.graphs.refused
