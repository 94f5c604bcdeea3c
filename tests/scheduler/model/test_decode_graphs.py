"""Decode steps as graphs, all but the capture itself: whom they serve, that they say the same, when there are none."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import engine_kit
import pytest
import torch
from engine_kit import Kit, failing, ours
from gpu_kit import Capture, use_double
from tiny_models import greedy, make_model
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from wide import widely

from cache.memory.memory_tier import MemoryTier, PageShape
from cache.pages.session import SessionCache
from scheduler.forward.mode import installed
from scheduler.forward.modes import PackedMode, SplitMode
from scheduler.forward.trace import UNTRACED
from scheduler.model import decode_graphs, mixed_steps
from scheduler.model.cuda_capture import Step
from scheduler.model.decode_graphs import CaptureBudget, DecodeGraphs, DeviceRead, DeviceReadWatch, buckets
from scheduler.model.verdict import Verdict

EMPTY = SessionCache("", None)


def again(step: Step) -> Callable[[], Any]:
    """A capture that runs the step anew."""
    return step


@cache
def probed(name: str, absorb: Any) -> tuple[Any, Verdict]:
    """A model and what the probe says of it; no test leaves anything changed. ``absorb``: the mode's, which some tests
    replace.
    """
    model = make_model(name)
    return model, engine_kit.probed(model)


class Scene:
    """An engine whose decode steps run as graphs, on the CPU."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, name: str = "llama", capture: Any = again, **options: Any
    ) -> None:
        """``options``: of the ``Kit``."""
        self.model, verdict = probed(name, PackedMode.absorb)
        in_place = verdict.mode.in_place
        monkeypatch.setattr(engine_kit, "verdict_on", lambda name: verdict)
        monkeypatch.setattr(engine_kit, "in_place_of", lambda name: in_place)
        monkeypatch.setattr(engine_kit, "MemoryTier", partial(MemoryTier, scratch=True))
        use_double(monkeypatch, verdict.mode)
        self.kit = Kit(name, **options)
        self.graphs = DecodeGraphs(self.kit.mode, self.kit.pool.device, 6, 200, Capture(capture), 1 << 30)
        self.kit.runner._graphs = self.graphs
        self.served = 0
        run = self.graphs.run

        def counted(work: Any) -> torch.Tensor | None:
            logits = run(work)
            self.served += logits is not None
            return logits

        monkeypatch.setattr(self.graphs, "run", counted)

    def capture_all(self) -> None:
        with installed(self.kit.mode):
            self.graphs.capture_all()
        self.kit.mode.remove()

    def check(self, prompts: list[list[int]], count: int, **options: Any) -> None:
        """See ``Kit.check``."""
        self.kit.check(self.model, prompts, count, **options)


def test_buckets_are_few_and_reach_the_most() -> None:
    for most in (1, 2, 3, 5, 8, 64, 100, 256, 1000):
        sizes = buckets(most)
        assert sizes == sorted(set(sizes))
        assert sizes[-1] == most
        assert len(sizes) <= 40
        for rows in range(1, most + 1):
            bucket = next(size for size in sizes if size >= rows)
            assert bucket <= max(2 * rows - 1, 1) or bucket - rows < 8


@pytest.mark.parametrize("name", widely(["llama", "gemma2", "gemma3", "qwen3", "deepseek_v3"], "gemma3 deepseek_v3"))
def test_what_graphs_say_is_what_the_model_says(
    name: str, monkeypatch: pytest.MonkeyPatch, said: pytest.LogCaptureFixture
) -> None:
    scene = Scene(monkeypatch, name)
    scene.check([[1, 2, 3], [4] * 9, [5, 6, 7, 8, 9, 10, 11]], 14)
    assert len(scene.graphs) == 1  # of four rows
    assert scene.served > 5
    scene.check([[1, 2, 3], [4] * 9], 9)  # on what is cached
    scene.check([[7, 7]], 9)
    assert len(scene.graphs) == 3
    served = scene.served
    scene.check([[n, n + 1] for n in range(7)], 6)  # more than any graph has rows
    assert scene.served - served < 6
    assert not ours(said)


@pytest.mark.parametrize("name", widely(["gemma3", "gpt_oss", "mistral"], "gpt_oss"))
def test_graphs_over_pages_in_two_parts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions that have released what windowed layers do not see, at lengths of their own."""
    scene = Scene(monkeypatch, name, divided=True, pages=64)
    assert scene.kit.pool.windows is not None
    tier = scene.kit.pool.device
    free = tier.free
    scene.capture_all()
    assert [*scene.graphs.captured] == [1, 2, 4, 6]
    assert tier.free == free
    prompts = [[1, 2, 3] * 5, [4] * 19, [5, 6, 7, 8, 9, 10, 11] * 7]
    turns = [scene.kit.send(prompt, 30) for prompt in prompts]
    released = 0
    while not scene.kit.engine.idle:
        scene.kit.step()
        assert not scene.kit.store.residency.make_room(1 << 20)
        released = max(released, *(session.released for session in (*scene.kit.store.residency, EMPTY)))
    assert released > 4
    assert scene.served > 20
    for prompt, turn in zip(prompts, turns, strict=True):
        tokens = scene.kit.outcomes[turn].tokens
        assert tokens == greedy(scene.model, prompt, 30, tokens)


class Reads(TorchDispatchMode):
    """Storages that operations read and that no operation before them has made, held weakly."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.read: dict[int, Any] = {}
        self._made: dict[int, torch.UntypedStorage] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in _tensors((args, kwargs or {})):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._made and storage._cdata not in self.read:
                self.read[storage._cdata] = storage._weak_ref()
        out = func(*args, **(kwargs or {}))
        for tensor in _tensors(out):
            if tensor.untyped_storage()._cdata not in self.read:
                self._made[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return out


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, torch.Tensor)]


@pytest.mark.parametrize("name", widely(["llama", "gemma3", "gpt_oss", "deepseek_v3"], "gpt_oss deepseek_v3"))
def test_all_that_a_graph_reads_lives_as_long_as_the_graph(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[Reads] = []

    def capture(step: Step) -> Callable[[], Any]:
        """As on a GPU: a graph does not hold what it reads, and nothing of Python runs again."""
        first = step().clone()
        with Reads() as seen:
            step()
        reads.append(seen)
        done = iter([step().copy_])
        return lambda: next(done)(first)

    scene = Scene(monkeypatch, name, capture=capture)
    scene.kit.send([1, 2, 3], 4)
    scene.kit.run()
    gc.collect()
    assert len(scene.graphs) == len(reads) == 1
    assert reads[0].read
    dead = [weak for weak in reads[0].read.values() if torch.UntypedStorage._expired(weak)]
    assert not dead


def test_sessions_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch)
    prompts = [[n, 3, n] for n in range(5)]
    turns = [scene.kit.send(prompts[n], 4 + 5 * n) for n in range(4)]
    scene.kit.step(6)
    turns.append(scene.kit.send(prompts[4], 12))
    scene.kit.run()
    for n, turn in enumerate(turns):
        tokens = scene.kit.outcomes[turn].tokens
        assert tokens == greedy(scene.model, prompts[n], len(tokens), tokens)
    assert scene.served > 8


def test_prompts_and_long_sessions_run_without(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch)
    scene.check([[1, 2, 3]], 8)
    served = scene.served
    assert served > 0
    scene.check([[9] * 30], 1)  # a prompt and its first token
    scene.check([[8] * 230], 6)
    assert scene.served == served


def test_a_session_with_hidden_tokens_runs_without(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch)
    scene.check([[1, 2, 3]], 8, session="s")
    session = scene.kit.find("s")
    session.hide(1, 3)
    served = scene.served
    scene.kit.ask([*session.token_ids], 6, session="s")
    assert scene.served == served


def test_a_graph_that_says_something_else_is_not_used(
    monkeypatch: pytest.MonkeyPatch, said: pytest.LogCaptureFixture
) -> None:
    def stale(step: Step) -> Callable[[], Any]:
        first = step().clone()
        return lambda: step().copy_(first.roll(1, -1))

    scene = Scene(monkeypatch, capture=stale)
    scene.check([[1, 2, 3], [4] * 9], 10)
    assert (scene.served, len(scene.graphs)) == (0, 0)
    assert len(ours(said)) == 1
    assert "differ" in ours(said)[0]


def test_a_graph_that_does_nothing_is_not_used(monkeypatch: pytest.MonkeyPatch, said: pytest.LogCaptureFixture) -> None:
    scene = Scene(monkeypatch, capture=lambda step: lambda: None)
    scene.check([[1, 2, 3]], 10)
    assert (scene.served, len(ours(said))) == (0, 1)


def test_a_capture_that_fails_ends_all_others(monkeypatch: pytest.MonkeyPatch, said: pytest.LogCaptureFixture) -> None:
    tried = []

    def failing(step: Step) -> Callable[[], Any]:
        tried.append(1)
        raise torch.AcceleratorError("operation not permitted when stream is capturing")

    scene = Scene(monkeypatch, capture=failing)
    scene.check([[1, 2, 3]], 12)
    scene.check([[1, 2, 3], [2, 3, 4]], 12)
    assert (len(tried), scene.served, len(ours(said))) == (1, 0, 1)


def test_a_model_that_looks_at_numbers_is_not_captured(
    monkeypatch: pytest.MonkeyPatch, said: pytest.LogCaptureFixture
) -> None:
    scene = Scene(monkeypatch, capture=failing(AssertionError()))
    layer = scene.model.model.layers[1].mlp
    forward = layer.forward
    monkeypatch.setattr(layer, "forward", lambda x: forward(x) * (1 if bool(x.isfinite().all()) else 0))
    scene.check([[1, 2, 3]], 8)
    assert len(ours(said)) == 1
    assert scene.served == 0


@pytest.mark.parametrize("name", widely(["qwen3_next", "mamba2", "jamba", "minimax"], "qwen3_next"))
def test_states_of_sessions_are_rows_of_graphs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions come and go, in steps of graphs and in steps with prompts; what they leave is resumed."""
    scene = Scene(monkeypatch, name, pages=200)
    scene.capture_all()
    assert (*scene.graphs.captured, scene.graphs.refused) == (1, 2, 4, 6, "")
    prompts = [[n, 3, n + 1] * (1 + 3 * n) for n in range(6)]
    turns = [scene.kit.send(prompts[n], 5 + 4 * n, session=f"s{n}") for n in range(4)]
    scene.kit.step(7)
    turns += [scene.kit.send(prompts[n], 14, session=f"s{n}") for n in (4, 5)]
    scene.kit.run()
    assert scene.served > 12
    for n in (5, 1, 3, 0):
        tokens = scene.kit.outcomes[turns[n]].tokens
        assert tokens == greedy(scene.model, prompts[n], len(tokens), tokens)
        prompts[n] = [*prompts[n], *tokens, 9]
    served = scene.served
    later = [scene.kit.send(prompts[n], 6, session=f"s{n}") for n in (5, 1, 3, 0)]
    scene.kit.run()
    assert scene.served - served > 3
    for n, turn in zip((5, 1, 3, 0), later, strict=True):
        outcome = scene.kit.outcomes[turn]
        assert outcome.tokens == greedy(scene.model, prompts[n], 6, outcome.tokens)


@pytest.mark.parametrize("name", ["deepseek_v3", "falcon"])
def test_keys_that_are_not_read_in_place_are_gathered_for_graphs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Latents that the model expands, and attention that cannot be replaced; what other pages hold is no number."""
    monkeypatch.setattr(PackedMode, "absorb", lambda mode, *given: 0)
    scene = Scene(monkeypatch, name)
    monkeypatch.setattr(decode_graphs, "_SHORTEST", 16)
    scene.graphs = scene.kit.runner._graphs = DecodeGraphs(scene.kit.mode, scene.kit.pool.device, 2, 64, Capture())
    for pool in scene.kit.pool.device.pools.values():
        pool[:-1].fill_(float("nan"))
    scene.check([[1, 2, 3], [4] * 9], 12)
    assert {bucket.pages * engine_kit.PAGE for bucket in scene.graphs._graphs} == {16, 32}
    assert (scene.graphs.captured, scene.graphs.refused) == ((2,), "")


def test_graphs_that_gather_more_than_memory_allows_are_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = PageShape(1, 16, 1, 8, torch.float32)
    tier = MemoryTier(4, 16, torch.device("cpu"), {0: shape}, scratch=True)
    monkeypatch.setattr(decode_graphs, "_GATHERED", 100 * 16 * shape.nbytes)
    mode: Any = SimpleNamespace(graphed=object(), stateful=False)  # another than itself
    made = DecodeGraphs(mode, tier, 6, 2000, Capture())
    assert made._buckets == [(1, 32), (1, 64), (2, 32)]
    here: Any = SimpleNamespace(stateful=False)
    here.graphed = here
    assert DecodeGraphs(here, tier, 6, 2000, Capture())._buckets == [(1, 126), (2, 126), (4, 126), (6, 126)]


def test_a_split_model_has_no_graphs() -> None:
    """What its sessions keep is in objects of their own."""
    assert SplitMode(make_model("llama"), [], UNTRACED).graphed is None


@pytest.mark.parametrize(
    "looking",
    [
        lambda x: x[0, 0].item(),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: torch.masked_select(x, x > 0),
        lambda x: x.unique(),
        lambda x: x.to("meta"),
        lambda x: torch.repeat_interleave(x, x[0].int().abs(), dim=1),
        lambda x: 1 if (x > 0).any() else 0,
    ],
)
def test_whatever_looks_is_seen(looking: Callable[[torch.Tensor], Any]) -> None:
    with torch.no_grad(), pytest.raises(DeviceRead), DeviceReadWatch():
        looking(torch.ones(3, 3))


def test_what_only_computes_is_not() -> None:
    x = torch.randn(3, 3)
    with torch.no_grad(), DeviceReadWatch():
        y = (x[torch.tensor([0, 2])] @ x).softmax(-1)
        y.copy_(x[:2])
        positive = torch.where(x > 0, x, 0.0).to(torch.float16).index_copy_(0, torch.tensor([1]), x[:1].half())
    assert torch.equal(y, x[:2])
    assert torch.equal(positive[1], x[0].half())


@pytest.mark.parametrize(
    "waiting",
    [
        lambda x: torch.equal(x, x + 0),
        lambda x: torch.unique_consecutive(x),
        lambda x: torch.nn.functional.grouped_mm(x, x.expand(2, 3, 3), offs=torch.tensor([1, 3], dtype=torch.int32)),
    ],
)
def test_what_waits_inside_of_a_function_is_seen(waiting: Callable[[torch.Tensor], Any]) -> None:
    with torch.no_grad(), pytest.raises(DeviceRead), DeviceReadWatch():
        waiting(torch.ones(3, 3))


class Watched(Capture):
    """A capture on a device on which the step waits inside of a function."""

    def __init__(self) -> None:
        super().__init__()
        self.captured = 0

    @contextmanager
    def watched(self) -> Iterator[None]:
        yield
        raise RuntimeError("called a synchronizing CUDA operation")

    def __call__(self, step: Step) -> Callable[[], Any]:
        self.captured += 1
        return step


def test_a_step_that_waits_is_found_before_its_capture(
    monkeypatch: pytest.MonkeyPatch, said: pytest.LogCaptureFixture
) -> None:
    scene = Scene(monkeypatch)
    scene.graphs._capture = watched = Watched()
    scene.check([[1, 2, 3]], 8)
    assert (watched.captured, scene.served) == (0, 0)
    assert "synchronizing" in ours(said)[0]


def test_experts_are_captured_though_grouped_products_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, "gpt_oss")
    scene.check([[1, 2, 3], [4] * 9, [5, 6], [7, 8]], 10)
    assert scene.served > 0
    assert scene.graphs.refused == ""


def test_a_bucket_without_memory_and_larger_ones_are_not_tried_again(
    monkeypatch: pytest.MonkeyPatch, said: pytest.LogCaptureFixture
) -> None:
    tried: list[int] = []

    def short(step: Step) -> Callable[[], Any]:
        rows = len(step())
        tried.append(rows)
        if rows >= 4:
            raise torch.OutOfMemoryError("out of memory")
        return step

    scene = Scene(monkeypatch, capture=short)
    scene.check([[1, 2, 3], [4] * 9, [5, 6, 7]], 9)
    scene.check([[1, 2, 3], [4] * 9, [5, 6, 7], [8], [9]], 12)
    scene.check([[1, 2, 3]], 9)
    assert tried == [4, 1]
    assert [*scene.graphs.captured] == [1]
    assert len(ours(said)) == 1


def test_all_buckets_are_captured_at_load(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch)
    tier, told = scene.kit.pool.device, list[tuple[int, int]]()
    free = tier.free
    with installed(scene.kit.mode):
        scene.graphs.capture_all(tell=lambda done, total: told.append((done, total)))
    scene.kit.mode.remove()
    assert [*scene.graphs.captured] == [1, 2, 4, 6]
    assert told == [(0, 4), (1, 4), (2, 4), (3, 4)]
    assert tier.free == free
    scene.check([[1, 2, 3], [4] * 9], 9)
    assert scene.served >= 8  # from the first step on


def test_captures_at_load_keep_to_their_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch)
    used = iter([0, 0, 50, 101])
    scene.kit.mode.install()
    scene.graphs.capture_all(CaptureBudget(60.0, 100), used=lambda: next(used))
    assert [*scene.graphs.captured] == [4, 6]
    assert "budget" in scene.graphs.refused
    scene.graphs.capture_all(CaptureBudget(-1.0, 100))
    scene.kit.mode.remove()
    assert [*scene.graphs.captured] == [4, 6]
    scene.check([[1, 2, 3]], 9)  # what is left is captured when it is met
    assert [*scene.graphs.captured] == [1, 4, 6]


@pytest.mark.parametrize("name", widely(["llama", "gemma3", "qwen3_next"], "gemma3"))
def test_beside_a_prompt_decode_steps_are_graphs_too(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts in chunks, whose logits are wanted at their ends only, among sessions that decode."""
    scene = Scene(monkeypatch, name, pages=200)
    scene.capture_all()
    scene.kit.scheduler._max_step_tokens = 16
    for beside in (0, 10, 1 << 20):
        scene.graphs.beside, scene.served = beside, 0
        turns = {scene.kit.send([n + 1, 2, beside % 7], 12): [n + 1, 2, beside % 7] for n in range(3)}
        scene.kit.step(6)
        before = scene.served
        longer = [beside % 11, 3, 5] * 20
        turns[scene.kit.send(longer, 4)] = longer
        scene.kit.step(4)
        assert scene.served - before == (4 if beside > 16 else 0)
        scene.kit.run()
        for turn, prompt in turns.items():
            tokens = scene.kit.outcomes[turn].tokens
            assert tokens == greedy(scene.model, prompt, len(tokens), tokens)


@pytest.mark.parametrize(("faster", "longest"), [((), 0), ((16,), 16), ((16, 64), 64), ((64,), 0)])
def test_how_long_prompts_may_be_is_timed(
    faster: tuple[int, ...], longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(monkeypatch, pages=40)
    tier, now = scene.kit.pool.device, [0.0]
    free, forward = tier.free, scene.kit.mode.forward

    def timed(step: Any, keep: torch.Tensor) -> torch.Tensor:
        now[0] += 1.0 if step.tokens in faster else 3.0
        return forward(step, keep)

    def run(work: Any) -> torch.Tensor:
        now[0] += 1.0
        return torch.zeros(len(work), 1)

    monkeypatch.setattr(scene.kit.mode, "forward", timed)
    monkeypatch.setattr(mixed_steps, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    with installed(scene.kit.mode), torch.inference_mode():
        pages, work = scene.graphs._make_sessions()
        measure = partial(mixed_steps.longest_beside, run, scene.kit.mode, tier, work[:2])
        assert measure(200) == longest
        assert measure(63) == min(longest, 16)  # a model need not know more positions
        assert measure(15) == 0
        assert mixed_steps.longest_beside(lambda work: None, scene.kit.mode, tier, work[:2], 200) == 0
    scene.kit.mode.remove()
    assert tier.free == free - len(pages)
