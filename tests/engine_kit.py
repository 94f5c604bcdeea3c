"""An engine in this process, for tests: no socket, steps run when the test says so."""

from __future__ import annotations

import hashlib
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import CONTEXT, MODES, greedy, make_tokenizer, model_of

from cache.memory.codec import Codec
from cache.memory.frames import UNDIVIDED
from cache.memory.memory_tier import MemoryTier
from cache.memory.memory_tier import divide as divided_as
from cache.pages.layers import read_layers
from cache.pages.pool import PagePool
from cache.pages.session import SessionCache
from cache.store import SessionStore
from cache.tiers.archive import Archive
from cache.tiers.disk import DiskTier
from cache.tiers.remote import RemoteTier
from cache.tiers.restore_rates import RestoreRates
from cache.tiers.segment_store import SegmentStore
from scheduler.accel.cpu.linear import pack
from scheduler.accel.cpu.packing import Packing
from scheduler.adapters.adapter_set import AdapterSet
from scheduler.core.constraint import Grammars, grammar_tokenizer
from scheduler.core.engine_core import EngineCore
from scheduler.core.launched_step import LaunchedStep
from scheduler.core.scheduler import Scheduler
from scheduler.core.session_commands import SessionCommands
from scheduler.core.sessions_index import SessionsIndex
from scheduler.core.speculator import Speculator
from scheduler.core.text import Vocabulary
from scheduler.core.turn_limits import Limits
from scheduler.forward.modes import language_model
from scheduler.forward.rope import LongRope
from scheduler.forward.seq2seq import first_tokens
from scheduler.model.kv_rounding import rounded_shapes
from scheduler.model.measurement import describe
from scheduler.model.probe import probe
from scheduler.model.runner import ModelRunner
from scheduler.model.verdict import Verdict
from scheduler.protocol import Cancel, Delta, FinishReason, FromEngine, Refused, StepOutputs, Submit, pack_ids
from scheduler.sampling_params import Sampling, Stopping, ThinkingBudget
from scheduler.turn_receipt import Receipt

PAGE = 4  # small, so that short tests cross many pages
END = 258


@dataclass
class Outcome:
    """All that the engine told about one turn."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None
    deltas: list[Delta] = field(default_factory=list)
    _receipt: Receipt | None = None

    @property
    def admitted(self) -> bool:
        return self._receipt is not None

    @property
    def receipt(self) -> Receipt:
        """What the engine said when it admitted the turn, which it must have done."""
        assert self._receipt is not None, "not admitted"
        return self._receipt

    def add(self, delta: Delta) -> None:
        """Take in one delta; a turn ends once."""
        assert self.finish_reason is None, "news after the end"
        self.deltas.append(delta)
        self.tokens.extend(delta.tokens)
        self.text += delta.text
        self._receipt = delta.receipt or self._receipt
        self.finish_reason = delta.finish_reason


@cache
def verdict_on(name: str) -> Verdict:
    """What the probe says of a tiny model; its mode is removed again: a kit installs it for each of its steps."""
    verdict = probed(model_of(name), rope=rope_of(name), packing=packing_of(name))
    assert describe(verdict.mode) == MODES[name], verdict.report
    return verdict


def probed(model: Any, page: int = PAGE, **options: Any) -> Verdict:
    """What the probe says of a model; its mode is removed again. ``options``: of the probe."""
    verdict = probe(model, read_layers(model.config.get_text_config(decoder=True)), page, **options)
    verdict.mode.remove()
    return verdict


@cache
def packing_of(name: str) -> Packing:
    """The model's packed weights."""
    return pack(model_of(name))


@cache
def rope_of(name: str) -> LongRope:
    """The model's RoPE threshold, if it has one."""
    return LongRope(model_of(name))


@cache
def in_place_of(name: str) -> frozenset[int]:
    """The layers that the probe has found to be readable in place."""
    return verdict_on(name).mode.in_place


def ours(said: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in said.records if record.name == "warmturn.engine"]


def byte_grammars() -> Grammars:
    return Grammars(partial(grammar_tokenizer, make_tokenizer(), (END,), 259))


class Eager(RestoreRates):
    """Models this small are sooner computed than loaded: tests load whatever there is."""

    def prefers_loading(self, nbytes: int, tokens: int) -> bool:
        return True


class OverlappingRunner(ModelRunner):
    """A runner whose device is taken to work on its own, as a GPU does."""

    overlaps = True


class Kit:
    """``send`` turns, ``run`` steps; every step is followed by the integrity checks."""

    def __init__(
        self,
        name: str = "llama",
        *,
        pages: int = 512,
        host_pages: int = 0,
        in_place: bool = True,
        step_tokens: int = 32,
        max_running: int = 64,
        max_queued: int = 256,
        context: int = CONTEXT,
        state_budget: int = 1 << 30,
        folder: Path | None = None,
        disk_space: int = 1 << 30,
        codec: Codec = Codec.EXACT,
        remote: str | None = None,
        remote_space: int | None = None,
        nearer: Callable[[str], SegmentStore] | None = None,
        share: float = 1.0,
        kept: tuple[str, ...] = (),
        overlaps: bool = False,
        speculates: bool = False,
        divided: bool = False,
        kv: Codec = Codec.EXACT,
    ) -> None:
        """``divided``: windowed layers have parts of pages of their own, if the model has such layers. ``folder``: of a
        disk tier; without it there is none. ``nearer`` makes a tier between the disk and the remote one, for a
        fingerprint. ``kv``: how KV is kept in memory. ``overlaps``: steps run as on a GPU; what is in ``meanwhile`` is
        called once while one is under way.
        """
        self.meanwhile: list[Callable[[], Any]] = []
        self.name, self.folder, self.remote = name, folder, remote
        self.model: Any = model_of(name)
        self.mode = verdict_on(name).mode
        self.mode.in_place = in_place_of(name) if in_place else frozenset()
        cpu = torch.device("cpu")
        shapes = verdict_on(name).shapes
        if kv is not Codec.EXACT:
            shapes = rounded_shapes(self.mode, shapes, kv)
        windows = self.mode.windows if divided else None
        split = divided_as(shapes, windows.layers, PAGE) if windows is not None else UNDIVIDED
        below = shapes if split.near else None
        if split.near:  # as many frames as those pages would take
            page = PAGE * sum(shape.nbytes for shape in shapes.values())
            pages, host_pages = pages * page // split.nbytes, host_pages * page // split.nbytes
        self.pool = PagePool(
            MemoryTier(pages, PAGE, cpu, shapes, division=split),
            MemoryTier(host_pages, PAGE, cpu, below, division=split),
            windows,
        )
        self.rope = rope_of(name)
        budget = state_budget if self.mode.stateful else None
        self.store = SessionStore(self.pool, budget, self.rope.threshold, share)
        self.store.skeleton = verdict_on(name).skeleton
        served = name if kv is Codec.EXACT else f"{name} {kv}"
        self.fingerprint = hashlib.blake2b(served.encode(), digest_size=16).hexdigest()
        if folder is not None:
            disk = DiskTier(folder, self.fingerprint, disk_space, share=share, kept=kept)
            lower = [] if nearer is None else [nearer(self.fingerprint)]
            if remote is not None:
                lower.append(RemoteTier(remote, self.fingerprint, remote_space))
            archive = Archive(self.store, disk, codec, lower)
            archive.restore_rates = Eager()
            self.store.attach(archive)
        self.scheduler = Scheduler(
            self.store,
            max_running=max_running,
            max_step_tokens=step_tokens,
            max_queued=max_queued,
            reuse=self.mode.caches,
        )
        vocabulary = Vocabulary(make_tokenizer())
        start = first_tokens(self.model) if self.model.config.is_encoder_decoder else ()
        limits = Limits(min(context, self.pool.room), 259, start)
        runner = OverlappingRunner if overlaps else ModelRunner
        self.adapters = AdapterSet(self.model, language_model(self.model), packing_of(name), late=self.mode.trace.late)
        self.runner = runner(self.mode, self.pool.device, self.rope, adapters=self.adapters)
        self.grammars = byte_grammars()
        self.speculator = Speculator(SessionsIndex(self.store), limits.context, self.store.stateful)
        drafts = self.speculator if speculates else None
        self.engine = EngineCore(self.runner, self.scheduler, vocabulary, (END,), limits, self.grammars, drafts)
        self.refused: dict[str, Refused] = {}
        self.outcomes: defaultdict[str, Outcome] = defaultdict(Outcome)
        self._sent = 0

    def send(
        self,
        prompt: list[int],
        count: int = 8,
        *,
        tenant: str = "a",
        session: str | None = None,
        ignore_eos: bool = True,
        sampling: Sampling | None = None,
        stop: tuple[str, ...] = (),
        stopping: Stopping | None = None,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        grammar: str | None = None,
        special: bool = False,
        salt: str = "",
        keep_until: float = 0.0,
        thinking: ThinkingBudget | None = None,
        side: bool = False,
        parent: str | None = None,
        prediction: list[int] | None = None,
        speculate: bool = True,
        spare: bool = False,
        adapter: str = "",
    ) -> str:
        """Submit a turn, greedy unless told otherwise; returns its id."""
        self._sent += 1
        turn = f"t{self._sent}"
        request = Submit(
            turn,
            tenant,
            pack_ids(prompt),
            session,
            sampling or Sampling(temperature=0.0),
            stopping or Stopping(max_tokens=count, stop=stop, ignore_eos=ignore_eos),
            logprobs,
            prompt_logprobs,
            grammar,
            special,
            salt,
            keep_until,
            thinking=thinking,
            side=side,
            parent=parent,
            speculate=speculate,
            prediction=pack_ids(prediction or []),
            spare=spare,
            adapter=adapter,
        )
        refused = self.engine.submit(request)
        if refused is not None:
            raise ValueError(refused.code)
        return turn

    def step(self, times: int = 1) -> None:
        """Steps, their outputs taken in, their invariants checked."""
        for _ in range(times):
            with self._installed():
                self._step()

    @contextmanager
    def _installed(self) -> Iterator[None]:
        self.mode.install()
        try:
            yield
        finally:
            self.mode.remove()

    def _step(self) -> None:
        outputs = self.engine.step(self._deliver)
        for delta in outputs.deltas:
            self.outcomes[delta.turn].add(delta)
        self.refused |= {refused.turn: refused for refused in self.engine.take_refusals()}
        self.engine.check_integrity()

    def _deliver(self, step: LaunchedStep | None, outputs: StepOutputs) -> None:
        meanwhile, self.meanwhile = self.meanwhile, []
        for call in meanwhile:
            call()

    def run(self, limit: int = 10_000) -> None:
        """Step until nothing is left."""
        with self._installed():
            while not self.engine.idle:
                self._step()
                if self.engine.stalled:
                    time.sleep(0.001)  # as the engine process does: something is being read
                limit -= 1
                assert limit, "the engine does not come to an end"

    def ask(self, prompt: list[int], count: int = 8, **options: Any) -> Outcome:
        """One turn from beginning to end."""
        turn = self.send(prompt, count, **options)
        self.run()
        return self.outcomes[turn]

    def ask_and_settle(self, prompt: list[int], count: int = 8, **options: Any) -> Outcome:
        """One turn, and wait until it is written."""
        outcome = self.ask(prompt, count, **options)
        self.settle()
        return outcome

    def ask_checked(self, prompt: list[int], count: int = 8, **options: Any) -> Outcome:
        """One turn, whose tokens must be those of a from-scratch forward."""
        outcome = self.ask(prompt, count, **options)
        assert outcome.tokens == greedy(self.model, prompt, count, outcome.tokens)
        return outcome

    def check(self, model: Any, prompts: list[list[int]], count: int, **options: Any) -> None:
        """Turns all at once, each of which must say what ``model`` says to it alone and without a cache."""
        turns = [self.send(prompt, count, **options) for prompt in prompts]
        self.run()
        for turn, prompt in zip(turns, prompts, strict=True):
            assert self.outcomes[turn].tokens == greedy(model, prompt, count, self.outcomes[turn].tokens)

    def leave(self) -> None:
        """End as the engine process does: everything is written, the threads are gone."""
        archive = self.archive
        archive.flush(60.0)
        assert not archive.write_behind.pending
        archive.close()

    def restarted(self) -> Kit:
        """Leave; another engine of the same model, with the same tiers below memory."""
        self.leave()
        return Kit(self.name, folder=self.folder, remote=self.remote)

    def settle(self) -> None:
        """Wait until nothing is being read or written any more."""
        while self.archive.busy:
            self.archive.poll()
            time.sleep(0.001)
        self.engine.check_integrity()

    @property
    def archive(self) -> Archive:
        """The tiers below memory."""
        assert self.store.archive is not None
        return self.store.archive

    @cached_property
    def commands(self) -> SessionCommands:
        return SessionCommands(self.store, self.fingerprint, adapters=self.adapters)

    def answers(self) -> list[FromEngine]:
        """What the commands so far have come to, once nothing is being read or written any more."""
        self.settle()
        return self.commands.take()

    def find(self, session: str) -> SessionCache:
        """The session of that name of tenant "a", which is in memory."""
        found = self.store.find("a", session)
        assert found is not None
        return found

    def cancel(self, turn: str) -> None:
        self.engine.cancel(Cancel(turn))


def failing(error: Exception) -> Callable[..., Any]:
    """A function that raises the error whatever it is given."""

    def fail(*args: Any, **options: Any) -> Any:
        raise error

    return fail


def ids(count: int, seed: int = 0) -> list[int]:
    drawn = random.Random(seed)
    return [drawn.randrange(250) for _ in range(count)]


def await_announced(kit: Kit) -> None:
    """Step until no announcement waits."""
    for _ in range(2000):
        kit.step()
        kit.scheduler.prefetcher._next = 0.0
        if kit.store.archive is not None:
            kit.settle()
        if not len(kit.scheduler.prefetcher):
            return
    raise AssertionError("it still waits")


def crowded_rounds(
    kit: Kit, count: int, rounds: int, want: Callable[[list[int], list[int]], list[int]]
) -> Iterator[None]:
    """``count`` chats that share memory, each asked once a round for three tokens: ``want(prompt, said)``;
    earlier messages are edited now and then. Yields after each round.
    """
    drawn = random.Random(7)
    chats = {chat: ids(drawn.randint(20, 40), chat) for chat in range(count)}
    for _ in range(rounds):
        sent = {}
        for chat, history in chats.items():
            if drawn.random() < 0.3:  # an earlier message is edited
                del history[drawn.randrange(len(history) // 2, len(history)) :]
            history += ids(drawn.randint(1, 5), drawn.randrange(1 << 20))
            sent[chat] = kit.send(history, 3, session=f"s{chat}" if chat % 2 else None)
        kit.run()
        for chat, turn in sent.items():
            said = kit.outcomes[turn].tokens
            assert said == want(chats[chat], said)
            chats[chat] += said
        yield
