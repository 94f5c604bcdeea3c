"""``Served``: an engine with a random model in this process, for benchmarks that run it step by step."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from scheduler.core.launched_step import LaunchedStep
from scheduler.engine_assembly import build_engine
from scheduler.engine_config import EngineConfig
from scheduler.model.loader import prepare
from scheduler.protocol import StepOutputs, Submit, pack_ids
from scheduler.sampling_params import Sampling, Stopping
from tools.floors import synchronize
from tools.random_model import DEMO, TOKENS


@dataclass
class Step:
    """One step of the engine: its seconds, those of them until it was launched, tokens fed, keys that they saw."""

    seconds: float
    launching: float
    tokens: int
    seen: int


class Served:
    """A model of a configuration with random weights; turns are submitted and stepped here.

    ``weights``: bytes of all; ``read``: of those that every step reads. ``active``: numbers that a token is multiplied
    with; ``head``: those of them that only tokens are multiplied with whose successor is asked for. ``width``: numbers
    of the queries of all layers. ``kv``: bytes a token.
    """

    def __init__(self, config: Any, device: torch.device, running: int, tokens: int, hosted: int) -> None:
        """``running`` turns at the same time, memory for ``tokens`` on the device and ``hosted`` on the host."""
        torch.manual_seed(1)
        with torch.device(device):
            model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        with torch.no_grad():  # replies stay among the tokens that are text: the others' logits are 0
            model.get_output_embeddings().weight[TOKENS:] = 0
        looked_up = model.get_input_embeddings().weight.numel() * (not config.tie_word_embeddings)  # a row a token
        self.weights = sum(p.nbytes for p in model.parameters())
        self.read = self.weights - looked_up * model.dtype.itemsize
        self.active = sum(p.numel() for p in model.parameters()) - looked_up
        self.head = model.get_output_embeddings().weight.numel()
        loaded = prepare(model, AutoTokenizer.from_pretrained(str(DEMO)), weights="random")
        settings = EngineConfig(
            "", "", max_running=running, host_memory=hosted * loaded.verdict.token_bytes,
            kv_memory=tokens * loaded.verdict.token_bytes,
        )  # fmt: skip
        self.engine, facts = build_engine(settings, loaded)
        self.mode, self.context = loaded.verdict.mode, facts.max_context
        self.model, self.device = model, device
        self.kv = loaded.verdict.token_bytes
        self.width = config.num_hidden_layers * config.num_attention_heads * config.head_dim
        self._sent = 0
        self._random = random.Random(1)

    @property
    def graphs(self) -> int:
        graphs = self.engine._runner._graphs
        return len(graphs) if graphs is not None else 0

    @property
    def compiled(self) -> int:
        return len(self.mode.compiled) if self.mode.compiled is not None else 0

    def words(self, count: int) -> list[int]:
        return [self._random.randrange(10, TOKENS) for _ in range(count)]

    def send(self, prompt: list[int], reply: int, session: str | None = None) -> str:
        """Submit a turn; its id."""
        self._sent += 1
        request = Submit(
            f"t{self._sent}", "a", pack_ids(prompt), session, Sampling(temperature=0.0),
            Stopping(max_tokens=reply, ignore_eos=True),
        )  # fmt: skip
        refused = self.engine.submit(request)
        assert refused is None, refused
        return request.turn

    def run(self, replies: dict[str, list[int]]) -> float:
        """Step until nothing is left; seconds. What is said joins ``replies``."""
        started = time.perf_counter()
        while not self.engine.idle:
            self._step(replies)
        synchronize(self.device)
        return time.perf_counter() - started

    def steps(self, replies: dict[str, list[int]]) -> Iterator[Step]:
        """The same, step by step; one that draws has waited for the device."""
        while not self.engine.idle:
            yield self._step(replies)

    def _step(self, replies: dict[str, list[int]]) -> Step:
        """One step as the engine process runs it."""
        started = time.perf_counter()
        launched, tokens, seen = started, 0, 0

        def deliver(step: LaunchedStep | None, outputs: StepOutputs) -> None:
            nonlocal launched, tokens, seen
            if step is not None:
                plan = [(turn.session, count) for turn, count in step.plan if turn.session is not None]
                tokens, seen = sum(count for _, count in plan), sum(session.length for session, _ in plan)
                launched = step.launched
            for delta in outputs.deltas:
                replies.setdefault(delta.turn, []).extend(delta.tokens)
                assert delta.error is None, delta.error

        self.engine.step(deliver)
        return Step(time.perf_counter() - started, launched - started, tokens, seen)

    def ask(self, prompt: list[int], reply: int = 1, session: str | None = None) -> float:
        """One turn alone; seconds."""
        self.send(prompt, reply, session)
        return self.run({})

    def forget(self) -> None:
        store = self.engine.scheduler.store
        for session in [*store.residency.warm, *store.residency.hosted]:
            store.discard(session)

    def cool(self) -> None:
        """Send all idle sessions to the host, as a turn that needs all pages does."""
        store = self.engine.scheduler.store
        store.residency.make_room(store.pool.device.slots)
        synchronize(self.device)
