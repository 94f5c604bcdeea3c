"""Compiled layers: they say what the model says, few graphs serve all layers and steps, and when there are none."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import engine_kit
import pytest
import torch
import torch._dynamo.utils
from engine_kit import Kit, failing, ours, probed
from gpu_kit import Capture, CountingBackend, use_double
from tiny_models import CONTEXT, greedy, make_model, of_unit_gain
from transformers import AutoModelForCausalLM, Gemma3nTextConfig, GPTNeoXConfig, MixtralConfig

from cache.memory.memory_tier import MemoryTier
from cache.pages.layers import read_layers
from scheduler.accel.gpu import compiled
from scheduler.accel.gpu.compiled import CompiledLayers, CompileOptions
from scheduler.forward.rope import LongRope
from scheduler.model import decode_graphs, loader
from scheduler.model.cuda_capture import Step
from scheduler.model.decode_graphs import DecodeGraphs, DeviceReadWatch
from scheduler.model.probe import _Trial, probe
from scheduler.protocol import Loading

pytestmark = pytest.mark.wide

_ENDLESS = 1e9  # times as long: nobody asks for speed here


def family(name: str) -> Any:
    """A tiny model, also of families that other tests have no use for."""
    shape: dict[str, Any] = {
        "vocab_size": 259,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "max_position_embeddings": CONTEXT,
        "bos_token_id": None,
        "eos_token_id": 258,
        "pad_token_id": 256,
    }
    configs = {
        "mixtral": partial(MixtralConfig, **shape, num_key_value_heads=2, num_local_experts=4),
        "gpt_neox": partial(GPTNeoXConfig, **shape),
        "gemma3n": partial(
            Gemma3nTextConfig,
            **{**shape, "num_hidden_layers": 6},
            num_key_value_heads=2,
            head_dim=16,
            sliding_window=8,
            layer_types=["sliding_attention", "full_attention"] * 3,
            num_kv_shared_layers=2,
            vocab_size_per_layer_input=259,
            hidden_size_per_layer_input=8,
            laurel_rank=8,
        ),
    }
    if name not in configs:
        return make_model(name)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(configs[name](), dtype=torch.float32).eval()
    return of_unit_gain(model)


def norms_alone() -> Any:
    """A model of whose layers only the norms can be compiled, which takes a tenth of the time."""
    model = make_model("llama")
    for layer in model.model.layers:
        layer.self_attn.o_proj.register_forward_hook(lambda *about: None)
        layer.mlp.down_proj.register_forward_hook(lambda *about: None)
    return model


class Probed:
    """A model whose layers were compiled by ``backend``, if they could be."""

    def __init__(self, model: Any, backend: Any, most: float = _ENDLESS) -> None:
        self.model, self.backend = model, backend
        self.layers, self.rope = read_layers(model.config.get_text_config()), LongRope(model)
        self.trial = _Trial(model, self.layers, engine_kit.PAGE, self.rope, None)
        compiling = CompileOptions(backend, most=most)
        self.verdict = probed(model, rope=self.rope, compiling=compiling)


@cache
def counting(name: str) -> Probed:
    """A model whose backend counts, for all tests that change nothing of it."""
    return Probed(family(name), CountingBackend())


class Scene:
    """An engine whose layers run compiled, on the CPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str, probed: Probed) -> None:
        self.model = model = probed.model
        self.rope, self.trial, verdict = probed.rope, probed.trial, probed.verdict
        self.report, self.mode = verdict.report, verdict.mode
        in_place = verdict.mode.in_place
        monkeypatch.setattr(engine_kit, "model_of", lambda name: model)
        monkeypatch.setattr(engine_kit, "rope_of", lambda name: self.rope)
        monkeypatch.setattr(engine_kit, "verdict_on", lambda name: verdict)
        monkeypatch.setattr(engine_kit, "in_place_of", lambda name: in_place)
        monkeypatch.setattr(engine_kit, "MemoryTier", partial(MemoryTier, scratch=True))
        self.kit = Kit(name)
        self.steps = 0
        forward = self.mode.forward

        def counted(*args: Any) -> torch.Tensor:
            self.steps += 1
            return forward(*args)

        monkeypatch.setattr(self.mode, "forward", counted)

    def check(self, prompts: list[list[int]], count: int, **options: Any) -> None:
        """See ``Kit.check``."""
        self.kit.check(self.model, prompts, count, **options)

    def talk(self, most: int = 300) -> None:
        """Prompts whole and in chunks, decodes among them, turns on what is cached, steps of 1 to ``most`` tokens."""
        self.check([[1, 2, 3], [4] * 45, [5, 6, 7, 8]], 7)
        self.check([[9, 8]], 3)
        first = self.kit.ask([3, 1, 4, 1, 5], 6, session="s")
        timeline = [3, 1, 4, 1, 5, *first.tokens, 2, 7, 1, 8]
        assert self.kit.ask(timeline, 5, session="s").tokens == greedy(self.model, timeline, 5)
        self.kit.scheduler._max_step_tokens = most
        self.check([[n % 250 for n in range(7, 7 + most)], [1] * 16], 2)

    def error(self) -> float:
        """Of all logits of the load-time probe's steps, relative to their spread."""
        self.mode.install()
        try:
            return self.trial.measure(self.mode).error
        finally:
            self.mode.remove()


def kinds(found: CompiledLayers | None) -> dict[str, int]:
    """The compiled modules by their class."""
    assert found is not None
    names = [type(module).__name__ for module in found._modules]
    return {name: names.count(name) for name in names}


@pytest.mark.parametrize(
    ("name", "graphs", "modules"),
    [  # a single token is a kind of step of its own; so is each kind of layer
        ("llama", 2, {"LlamaDecoderLayer": 2}),
        pytest.param("qwen3", 2, {"Qwen3DecoderLayer": 2}, marks=pytest.mark.slow),
        pytest.param("gemma2", 4, {"Gemma2DecoderLayer": 2}, marks=pytest.mark.slow),
        pytest.param("gemma3", 4, {"Gemma3DecoderLayer": 3}, marks=pytest.mark.slow),
        pytest.param("gpt_oss", 4, {"GptOssDecoderLayer": 3}, marks=pytest.mark.slow),
        pytest.param("longrope", 4, {"Phi3DecoderLayer": 2}, marks=pytest.mark.slow),
        pytest.param("mixtral", 2, {"MixtralDecoderLayer": 4}, marks=pytest.mark.slow),
        pytest.param("gpt_neox", 2, {"GPTNeoXLayer": 4}, marks=pytest.mark.slow),
        # Later layers read what earlier ones have stored.
        pytest.param("gemma3n", 12, {"Gemma3nTextDecoderLayer": 6}, marks=pytest.mark.slow),
        pytest.param(
            "qwen3_next",
            6,
            {"Qwen3NextDecoderLayer": 1, "Qwen3NextSparseMoeBlock": 2, "Qwen3NextRMSNorm": 4},
            marks=pytest.mark.slow,
        ),
        ("deepseek_v3", 10, {"DeepseekV3MLP": 1, "DeepseekV3MoE": 1, "DeepseekV3RMSNorm": 8}),
    ],
)
def test_compiled_layers_say_what_the_model_says(
    name: str, graphs: int, modules: dict[str, int], monkeypatch: pytest.MonkeyPatch, said: pytest.LogCaptureFixture
) -> None:
    backend = counting(name).backend
    scene = Scene(monkeypatch, name, counting(name))
    assert kinds(scene.mode.compiled) == modules
    assert f"{sum(modules.values())} modules run compiled" in scene.report
    assert backend.graphs <= graphs
    before, backend.ran, stored = backend.graphs, 0, set(scene.kit.pool.device.keys)
    scene.talk(60 if scene.mode.stateful else 300)
    assert backend.ran == scene.steps * sum(modules.values())  # none of them ran as it is
    assert scene.error() < 1e-4
    assert backend.graphs == before
    assert set(scene.kit.pool.device.keys) == stored
    assert not ours(said)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where torch keeps what it compiles."""
    return tmp_path_factory.mktemp("kept")


@pytest.mark.filterwarnings("default")  # what torch says of its own parts is not ours to mend
@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gemma2", "mixtral"])
def test_what_torch_makes_of_them_says_so_too(
    name: str, monkeypatch: pytest.MonkeyPatch, kept: Path, said: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(kept))
    scene = Scene(monkeypatch, name, Probed(family(name), "inductor"))
    assert not ours(said)
    assert len(scene.mode.compiled or ()) == scene.model.config.num_hidden_layers
    assert list(kept.rglob("*.so"))
    made = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    scene.talk()
    assert scene.error() < 1e-4
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == made


class Graphed(Scene):
    """The same, and decode steps run as graphs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str, probed: Probed, capture: Any) -> None:
        super().__init__(monkeypatch, name, probed)
        use_double(monkeypatch, self.mode)
        self.graphs = DecodeGraphs(self.mode, self.kit.pool.device, 6, 200, Capture(capture))
        self.kit.runner._graphs = self.graphs


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_graph_is_of_compiled_layers(
    name: str, monkeypatch: pytest.MonkeyPatch, said: pytest.LogCaptureFixture
) -> None:
    backend, captured, seen = counting(name).backend, list[tuple[int, int]](), list[tuple[int, bool]]()

    def capture(step: Step) -> Callable[[], Any]:
        before = backend.ran, backend.graphs
        step()
        captured.append((backend.ran - before[0], backend.graphs - before[1]))
        return step

    @contextmanager
    def watching() -> Iterator[None]:
        before = backend.ran
        with DeviceReadWatch():
            yield
            aside = scene.mode.compiled is not None and scene.mode.compiled._aside
        seen.append((backend.ran - before, aside))

    monkeypatch.setattr(decode_graphs, "DeviceReadWatch", watching)
    scene = Graphed(monkeypatch, name, counting(name), capture)
    scene.check([[1, 2, 3], [4] * 9, [5, 6, 7, 8, 9, 10, 11]], 14)
    scene.check([[7, 7]], 9)
    assert captured == [(scene.model.config.num_hidden_layers, 0)] * 2  # all layers, and nothing was compiled
    assert seen == [(0, True)] * 2  # the watch sees each operation of the layers as they are
    assert len(scene.graphs) == 2
    assert not ours(said)


def test_code_between_compiled_layers_that_looks_at_numbers_is_still_seen(
    monkeypatch: pytest.MonkeyPatch, said: pytest.LogCaptureFixture
) -> None:
    model = norms_alone()
    mlp = model.model.layers[1].mlp
    forward = mlp.forward
    monkeypatch.setattr(mlp, "forward", lambda x: forward(x) * (1 if bool(x.isfinite().all()) else 0))
    scene = Graphed(monkeypatch, "llama", Probed(model, CountingBackend()), failing(AssertionError()))
    assert kinds(scene.mode.compiled) == {"LlamaRMSNorm": 4}
    scene.check([[1, 2, 3]], 8)
    assert len(ours(said)) == 1
    assert "without a CUDA graph" in ours(said)[0]


def test_what_cannot_be_compiled_runs_as_it_is(monkeypatch: pytest.MonkeyPatch, said: pytest.LogCaptureFixture) -> None:
    broken = failing(RuntimeError("no working compiler\nin many more words"))
    scene = Scene(monkeypatch, "llama", Probed(norms_alone(), broken))
    assert scene.mode.compiled is None
    assert len(ours(said)) == 1
    assert ours(said)[0].startswith("layers run uncompiled, which is slower on a GPU: ")
    assert not [one for one in scene.model.modules() if "forward" in vars(one)]
    scene.check([[1, 2, 3], [4] * 20], 5)


@pytest.mark.slow
def test_a_layer_that_cannot_be_compiled_in_one_piece_is_tried_in_parts(
    monkeypatch: pytest.MonkeyPatch, said: pytest.LogCaptureFixture
) -> None:
    model = make_model("llama")
    kind = type(model.model.layers[0].mlp)

    class Looking(kind):  # type: ignore[misc, valid-type]
        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(x) * (1 if bool(x.isfinite().all()) else 0)

    for layer in model.model.layers:
        layer.mlp.__class__ = Looking
    scene = Scene(monkeypatch, "llama", Probed(model, CountingBackend()))
    assert kinds(scene.mode.compiled) == {"LlamaRMSNorm": 4, "LlamaAttention": 2}
    scene.talk()
    assert not ours(said)


def test_what_says_something_else_is_removed(monkeypatch: pytest.MonkeyPatch, said: pytest.LogCaptureFixture) -> None:
    def wrong(graph: Any, inputs: Any) -> Any:
        return lambda *args: [out * 1.01 if out.is_floating_point() else out for out in graph(*args)]

    scene = Scene(monkeypatch, "llama", Probed(norms_alone(), wrong))
    assert scene.mode.compiled is None
    assert len(ours(said)) == 1
    assert "differ" in ours(said)[0]
    assert not [one for one in scene.model.modules() if "forward" in vars(one)]
    scene.check([[1, 2, 3]], 5)


def test_what_is_slower_is_removed(monkeypatch: pytest.MonkeyPatch, said: pytest.LogCaptureFixture) -> None:
    def slow(graph: Any, inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            time.sleep(0.003)
            return graph(*args)

        return run

    scene = Scene(monkeypatch, "llama", Probed(norms_alone(), slow, 1.05))
    assert scene.mode.compiled is None
    assert len(ours(said)) == 1
    assert "times as long" in ours(said)[0]


def test_what_was_not_met_at_load_runs_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = CountingBackend()
    scene = Scene(monkeypatch, "llama", Probed(norms_alone(), "eager"))
    scene.mode.uncompile()
    scene.mode.install()

    def prompts() -> None:
        next(scene.trial.steps(scene.mode))

    assert scene.mode.compile(backend, prompts) == 4
    scene.mode.remove()
    assert backend.graphs == 1  # of many tokens
    backend.ran = 0
    scene.check([[4] * 20], 5)
    assert backend.graphs == 1
    assert backend.ran == 4  # the prompt


@pytest.mark.slow
def test_who_listens_to_a_module_hears_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model, heard = make_model("llama"), []
    model.model.layers[1].mlp.register_forward_hook(lambda *about: heard.append(1))
    model.model.layers[1].self_attn.o_proj.register_forward_hook(lambda *about: heard.append(2))
    scene = Scene(monkeypatch, "llama", Probed(model, CountingBackend()))
    assert kinds(scene.mode.compiled)["LlamaDecoderLayer"] == 1
    heard.clear()
    scene.steps = 0
    scene.kit.ask([1, 2, 3], 5)
    assert heard == [2, 1] * scene.steps


def test_torch_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = [(config, name) for config, options in compiled._settings() for name in options]
    before = [getattr(config, name) for config, name in settings]
    scene = Scene(monkeypatch, "llama", Probed(norms_alone(), "eager"))
    scene.kit.ask([1, 2, 3], 3)
    assert [getattr(config, name) for config, name in settings] == before
    assert torch._dynamo.eval_frame._stance.stance == "default"


def test_layers_are_compiled_for_gpus_only() -> None:
    told: list[Any] = []
    cpu, cuda = (SimpleNamespace(device=torch.device(name)) for name in ("cpu", "cuda"))
    assert loader._compile_options(cpu, told.append) is None
    compiling = loader._compile_options(cuda, told.append)
    assert compiling is not None
    assert (compiling.backend, told) == ("inductor", [])
    compiling.tell()
    assert told == [Loading("compiling layers")]


def test_somebody_is_told_before_anything_is_compiled() -> None:
    order: list[str] = []

    def backend(graph: Any, inputs: Any) -> Any:
        order.append("compiled")
        return graph

    model = norms_alone()
    told = CompileOptions(backend, lambda: order.append("told"), _ENDLESS)
    probe(model, read_layers(model.config), engine_kit.PAGE, compiling=told)
    assert order == ["told", "compiled", "compiled"]


def test_what_is_compiled_is_kept_where_nobody_else_writes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    name = "TORCHINDUCTOR_CACHE_DIR"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(name, "of-the-user")
    compiled._keep()
    assert os.environ[name] == "of-the-user"
    monkeypatch.delenv(name)
    compiled._keep()
    where = Path(os.environ[name])
    assert where.is_relative_to(tmp_path)
    assert where.is_dir()
    monkeypatch.delenv(name)
    (tmp_path / "warmturn").chmod(0o777)
    compiled._keep()
    assert name not in os.environ
