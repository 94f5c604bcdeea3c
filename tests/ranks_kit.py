"""An engine in this process whose model is divided between it and one more, and what is asked of engines in tests."""

from __future__ import annotations

import os
import random
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from engine_kit import Eager, Outcome
from tiny_models import greedy, model_of, save_model

from cache.tiers.archive import Archive
from scheduler.engine_assembly import build_engine
from scheduler.engine_config import EngineConfig
from scheduler.model.loader import LoadedModel, load
from scheduler.protocol import Submit, pack_ids
from scheduler.sampling_params import Sampling, Stopping

ROOT = Path(__file__).resolve().parent.parent
LAYERS = {"gemma3": 3}  # of tiny models that have not two


class Driver:
    """Turns through an engine of a loaded model, on one rank or several. One at a time for each ``loaded``."""

    def __init__(self, loaded: LoadedModel, config: EngineConfig) -> None:
        self.engine, self.facts = build_engine(config, loaded)
        self.store = self.engine.scheduler.store
        self.outcomes: defaultdict[str, Outcome] = defaultdict(Outcome)
        if self.store.archive is not None:
            self.store.archive.restore_rates = Eager()

    @property
    def archive(self) -> Archive:
        """The tiers below memory."""
        assert self.store.archive is not None
        return self.store.archive

    def send(self, prompt: list[int], count: int, session: str | None = None, **options: Any) -> str:
        """Submit a greedy turn; returns its id."""
        turn = f"t{len(self.outcomes)}"
        self.outcomes[turn] = Outcome()
        stopping = Stopping(max_tokens=count, ignore_eos=True)
        request = Submit(turn, "a", pack_ids(prompt), session, Sampling(temperature=0.0), stopping, **options)
        refused = self.engine.submit(request)
        assert refused is None, refused
        return turn

    def run(self) -> None:
        """Step until nothing is left; the invariants hold after each."""
        while not self.engine.idle:
            for delta in self.engine.step().deltas:
                assert delta.error is None, delta.error
                self.outcomes[delta.turn].add(delta)
            self.engine.check_integrity()
            if self.engine.stalled:
                time.sleep(0.001)

    def ask(self, prompt: list[int], count: int, session: str | None = None, **options: Any) -> Outcome:
        """One turn from beginning to end."""
        turn = self.send(prompt, count, session, **options)
        self.run()
        return self.outcomes[turn]

    def leave(self) -> None:
        """Everything is written, the files are free for others."""
        self.archive.flush(60.0)
        assert not self.archive.write_behind.pending
        assert not self.archive.write_behind.errors
        self.archive.close()


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(256), k=length)


def conversations(driver: Driver, name: str, *, sessions: int, turns: int) -> None:
    """Sessions that talk in turns, all at once; every reply is the one-rank oracle's."""
    talks = [prompt_of(20 + 3 * i, i) for i in range(sessions)]
    for turn in range(turns):
        sent = [driver.send(talk, 6, f"s{i}") for i, talk in enumerate(talks)]
        driver.run()
        for i, talk in enumerate(talks):
            assert driver.outcomes[sent[i]].tokens == greedy(model_of(name), talk, 6, driver.outcomes[sent[i]].tokens)
            talks[i] = talk + driver.outcomes[sent[i]].tokens + prompt_of(5, 100 * turn + i)


def config_of(model: Path, ranks: int, pages: int = 64, host_pages: int = 0, **options: Any) -> EngineConfig:
    """Of a float32 model of ``tiny_models``, room for so many pages."""
    page = 16 * LAYERS.get(model.name, 2) * 2 * 2 * 16 * 4  # tokens, layers, K and V, heads, dim, bytes
    memory = {"kv_memory": pages * page // ranks, "host_memory": host_pages * page}
    return EngineConfig("", str(model), **{"device": "cpu", "tensor_parallel": ranks, **memory, **options})


@contextmanager
def loaded(name: str, folder: Path, ranks: int) -> Iterator[tuple[LoadedModel, Path]]:
    """A tiny model on so many ranks, and its folder."""
    model = save_model(name, folder)
    environment, threads = os.environ.copy(), torch.get_num_threads()
    os.environ["PYTHONPATH"] = str(ROOT)
    found: LoadedModel | None = None
    try:
        found = load(config_of(model, ranks), lambda message: None)
        yield found, model
    finally:
        if found is not None and found.followers is not None:
            found.followers.close()
        if dist.is_initialized():
            dist.destroy_process_group()
        os.environ.clear()
        os.environ.update(environment)
        torch.set_num_threads(threads)
