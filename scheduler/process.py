"""The engine process: loads the model, reports to the server, and runs steps until it is told to stop.

It exchanges messages of ``scheduler.protocol`` over the zmq PAIR socket that the server has bound. It ends with status
0 on ``Shutdown`` or when standard input closes (the server is gone), and with status 2 if the model cannot be served.
"""

from __future__ import annotations

import gc
import logging
import os
import select
import sys
import time
from collections.abc import Callable
from functools import partial
from threading import Event, Thread
from typing import Any

import msgspec
import torch
import zmq

from scheduler.accel.cpu import ways
from scheduler.core.constraint import Grammars, grammar_tokenizer
from scheduler.core.engine_core import EngineCore
from scheduler.core.launched_step import LaunchedStep
from scheduler.core.limits import Limits
from scheduler.core.model_drafter import ModelDrafter
from scheduler.core.scheduler import Scheduler
from scheduler.core.session_commands import SessionCommands
from scheduler.core.sessions_index import SessionsIndex
from scheduler.core.speculator import Speculator
from scheduler.core.text import Vocabulary
from scheduler.engine_config import EngineConfig
from scheduler.logs import configure
from scheduler.model.cuda_capture import CudaCapture
from scheduler.model.decode_graphs import DecodeGraphs
from scheduler.model.draft_model import divide_memory, load_draft_model
from scheduler.model.loader import PAGE_SIZE, LoadedModel, LoadFailed, fingerprint, load
from scheduler.model.measurement import describe
from scheduler.model.memory import TooSmall, build_archive, build_store, spare
from scheduler.model.runner import ModelRunner
from scheduler.model_facts import CapturedGraphs, ModelFacts
from scheduler.protocol import (
    AwaitTools,
    Cancel,
    Export,
    Forget,
    FromEngine,
    Import,
    Inspect,
    Loading,
    ModelFailed,
    Pin,
    Ready,
    Refused,
    Shutdown,
    StepOutputs,
    Submit,
    ToEngine,
    Warm,
)

log = logging.getLogger("warmturn.engine")

_HEARTBEAT_MS = 1000
_BUSY_MS = 5  # while files are being read or written and no turn runs
_CHECK_SECONDS = 60
_STEP_TOKENS = {"cpu": 512, "cuda": 2048}


class Channel:
    """The socket to the server, and the pipe that shows whether the server is alive."""

    def __init__(self, address: str) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
        self._socket.set_hwm(0)
        self._socket.connect(address)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(sys.stdin.fileno(), zmq.POLLIN)
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode: Any = msgspec.msgpack.Decoder(ToEngine).decode

    def send(self, message: FromEngine) -> None:
        """Queue a message for the server."""
        self._socket.send(self._encode(message))

    def receive(self, wait_ms: int) -> list[ToEngine]:
        """All messages that have come, waiting up to ``wait_ms`` for the first. ``Shutdown`` once the server
        is gone.
        """
        ready = dict(self._poller.poll(wait_ms))
        if sys.stdin.fileno() in ready:
            return [Shutdown()]
        messages: list[ToEngine] = []
        while self._socket in ready:
            try:
                messages.append(self._decode(self._socket.recv(zmq.NOBLOCK)))
            except zmq.Again:
                break
        return messages

    def close(self) -> None:
        """Send what is queued, then close."""
        self._socket.close(linger=1000)
        zmq.Context.instance().term()


def build(
    config: EngineConfig,
    loaded: LoadedModel,
    draft: LoadedModel | None = None,
    tell: Callable[[Loading], None] = lambda message: None,
) -> tuple[EngineCore, ModelFacts]:
    """The engine of a loaded model and its ``draft`` model, and what to tell the server about it. ``tell`` gets
    progress. Raises ``TooSmall``.
    """
    device = loaded.model.device
    drafter = None
    if draft is not None:
        total = config.kv_memory or spare(device, config.tensor_parallel)
        config, small = divide_memory(config, total, loaded, draft)
        drafter = build_drafter(small, draft, loaded)
    followers = loaded.followers
    store = build_store(config, loaded.verdict, PAGE_SIZE, device, loaded.rope.threshold, followers)
    store.skeleton = loaded.verdict.skeleton
    identity = fingerprint(loaded)
    if loaded.verdict.mode.caches:
        store.attach(build_archive(config, store, identity))
    pool = store.pool
    # One page is kept for copy-on-write, so that the longest turn can always run alone.
    room = (pool.device.slots - 1) * PAGE_SIZE
    context = min(config.max_context or loaded.context, loaded.context, room)
    if room < loaded.context and config.max_context is None:  # else the server tells that it is not what was asked for
        log.warning("--kv-memory: the context is %d tokens, as no more fit; the model has %d", room, loaded.context)
    embeddings = loaded.model.get_input_embeddings()
    step_tokens = config.max_step_tokens or _STEP_TOKENS[device.type]
    scheduler = Scheduler(
        store,
        max_running=config.max_running,
        max_step_tokens=step_tokens,
        max_queued=config.max_queued,
        reuse=loaded.verdict.mode.caches,
    )
    graphs = None  # Python decides in every step how a threshold turns positions, and what other ranks are told
    if device.type == "cuda" and loaded.rope.threshold is None and followers is None:
        graphs = DecodeGraphs(loaded.verdict.mode, pool.device, config.max_running, context, CudaCapture())
        graphs.capture_all(
            tell=lambda done, count: tell(Loading(f"capturing CUDA graphs, {done} of {count}")),
            used=partial(torch.cuda.memory_reserved, device),
        )
    runner = ModelRunner(loaded.verdict.mode, pool.device, loaded.rope, graphs, followers)
    vocabulary = Vocabulary(loaded.tokenizer)
    width = getattr(loaded.model.get_output_embeddings(), "out_features", None)
    limits = Limits(context, embeddings.num_embeddings, loaded.start, width)
    grammars = Grammars(partial(grammar_tokenizer, loaded.tokenizer, loaded.eos_token_ids, embeddings.num_embeddings))
    grammars.prepare()
    speculator = None
    if config.speculate != "off":
        speculator = Speculator(SessionsIndex(store.residency.__contains__), context, store.stateful, drafter)
    engine = EngineCore(runner, scheduler, vocabulary, loaded.eos_token_ids, limits, grammars, speculator)
    facts = ModelFacts(
        architecture=type(loaded.model).__name__,
        parameters=loaded.parameters,
        weight_bytes=loaded.weight_bytes,
        dtype=str(loaded.model.dtype).removeprefix("torch."),
        device=str(device),
        vocab_size=embeddings.num_embeddings,
        max_context=context,
        eos_token_ids=loaded.eos_token_ids,
        mode=describe(loaded.verdict.mode),
        probe=loaded.verdict.report,
        layer_kinds=loaded.layer_kinds,
        kv_bytes_per_token=loaded.verdict.token_bytes if followers is None else pool.device.token_bytes,
        page_size=PAGE_SIZE,
        pages=pool.device.slots,
        fingerprint=identity,
        encoder_decoder=bool(loaded.start),
        tensor_parallel=config.tensor_parallel,
        generation=loaded.generation,
        crossed=loaded.verdict.crossed,
        unproven=loaded.verdict.unproven,
        weight_rounding=loaded.rounding,
        weight_reading=ways.latest if device.type == "cpu" else None,
        decode_graphs=CapturedGraphs(graphs.captured, graphs.refused) if graphs is not None else None,
    )
    return engine, facts


def build_drafter(config: EngineConfig, draft: LoadedModel, served: LoadedModel) -> ModelDrafter:
    """What proposes the draft model's tokens, with a store and tiers within the budgets of ``config``. Raises
    ``TooSmall``.
    """
    store = build_store(config, draft.verdict, PAGE_SIZE, draft.model.device, draft.rope.threshold)
    store.skeleton = draft.verdict.skeleton
    store.attach(build_archive(config, store, fingerprint(draft)))
    pool = store.pool
    runner = ModelRunner(draft.verdict.mode, pool.device, draft.rope)
    width = served.model.get_input_embeddings().num_embeddings
    context = min(draft.context, (pool.device.slots - 1) * PAGE_SIZE)
    return ModelDrafter(runner, store, width, context)


class ServingLoop:
    """Steps, and between them the messages to and from the server: one a step, one a second while idle.

    A GPU runs a step while the outputs of the one before it are sent and new messages are read.
    """

    def __init__(self, engine: EngineCore, commands: SessionCommands, channel: Channel) -> None:
        self._engine, self._commands, self._channel = engine, commands, channel
        stores = [engine.scheduler.store, *([] if commands.drafter is None else [commands.drafter.store])]
        self._archives = [store.archive for store in stores if store.archive is not None]
        self._sent_at = 0.0  # time.monotonic() of the last outputs
        self._checked_at = time.monotonic()
        self._received = 0  # messages of this step
        self._shutdown: Shutdown | None = None

    def run(self) -> None:
        """Serve until the server ends it."""
        while self._shutdown is None:
            self._engine.step(self._exchange)
            self._check()
        self._send_answers()
        self._channel.send(self._engine.stop())
        for archive in self._archives:
            archive.flush(self._shutdown.flush_seconds)
            archive.close()

    def _exchange(self, step: LaunchedStep | None, outputs: StepOutputs) -> None:
        """Send what is there, take what has come."""
        engine = self._engine
        self._send_answers()
        if engine.stalled and not engine.idle:
            time.sleep(0.001)  # nothing could run: do not spin
        now = time.monotonic()
        if outputs.deltas or not engine.stalled or now - self._sent_at >= 0.9 * _HEARTBEAT_MS / 1000:
            self._channel.send(outputs)
            self._sent_at = now
        busy = any(archive.busy for archive in self._archives)
        waits = engine.idle and (step is None or not engine.overlaps)
        messages = self._channel.receive(0 if not waits else _BUSY_MS if busy else _HEARTBEAT_MS)
        self._received = len(messages)
        for message in messages:
            if isinstance(message, Shutdown):
                self._shutdown = message
                return
            refused = _take(message, engine, self._commands)
            if refused is not None:
                self._channel.send(refused)

    def _send_answers(self) -> None:
        """Refusals and the answers to session commands; they go before the outputs."""
        for answer in (*self._engine.take_refusals(), *self._commands.take()):
            self._channel.send(answer)

    def _check(self) -> None:
        """The invariants, once in a while when nobody waits."""
        if self._engine.idle and not self._received and time.monotonic() - self._checked_at > _CHECK_SECONDS:
            self._engine.check_integrity()
            self._checked_at = time.monotonic()


def _take(message: ToEngine, engine: EngineCore, commands: SessionCommands) -> Refused | None:
    """Do what the server has asked for; the answer, where there is one at once."""
    match message:
        case Submit():
            return engine.submit(message)
        case AwaitTools():
            engine.await_tools(message)
        case Warm():
            engine.warm(message)
        case Cancel():
            engine.cancel(message)
        case Forget():
            engine.end(message.tenant, message.session)
            commands.forget(message)
        case Pin():
            commands.pin(message)
        case Inspect():
            commands.inspect(message)
        case Export():
            commands.export(message)
        case Import():
            commands.take_in(message)
    return None


def _leave_with_the_server(loaded: Event) -> None:
    """Loading takes minutes: end it when nobody waits for it any more."""
    poller = select.poll()
    poller.register(sys.stdin.fileno(), select.POLLIN)
    while not loaded.wait(0.5):
        if poller.poll(0):  # nothing is ever sent: the server is gone
            os._exit(0)


def main(config: EngineConfig) -> int:
    """Load, tell, serve; the exit status."""
    configure(config.log_format, config.log_level, "%(name)s: %(message)s")
    channel = Channel(config.address)
    loading = Event()
    Thread(target=_leave_with_the_server, args=(loading,), daemon=True).start()
    try:
        loaded = load(config, channel.send)
        channel.send(Loading("reserving memory"))
        draft = None
        if config.draft_model is not None and config.speculate != "off":
            draft = load_draft_model(config, loaded, channel.send)
        engine, facts = build(config, loaded, draft, channel.send)
    except (LoadFailed, TooSmall) as error:
        channel.send(ModelFailed(str(error)))
        channel.close()
        return 2
    loading.set()  # from here on the channel notices
    if loaded.followers is not None:
        loaded.followers.serving()
    log.info("mode %s; measured: %s", facts.mode, facts.probe)
    gc.freeze()  # a collection that visits all of torch's objects blocks steps for a quarter of a second
    channel.send(Ready(facts))
    torch.set_grad_enabled(False)
    commands = SessionCommands(engine.scheduler.store, facts.fingerprint, engine.drafter)
    ServingLoop(engine, commands, channel).run()
    channel.close()
    if loaded.followers is not None:
        loaded.followers.close()
    return 0
