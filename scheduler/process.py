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
from threading import Event, Thread
from typing import Any

import msgspec
import torch
import zmq

from cache.segments.chain import Owner
from scheduler.adapter_messages import LoadAdapter, UnloadAdapter
from scheduler.core.engine_core import EngineCore
from scheduler.core.launched_step import LaunchedStep
from scheduler.core.session_commands import SessionCommands
from scheduler.engine_assembly import build_engine
from scheduler.engine_config import EngineConfig
from scheduler.logs import configure
from scheduler.model.draft_model import load_draft_model
from scheduler.model.loader import LoadFailed, load
from scheduler.model.memory import TooSmall
from scheduler.pooling.pooler_loader import load_pooler
from scheduler.pooling.pooling_loop import PoolingLoop
from scheduler.pooling.recipe import BadRecipe, PoolingRecipe, read_recipe
from scheduler.pooling_messages import Pool, Pooled
from scheduler.protocol import (
    AwaitTools,
    Cancel,
    Expand,
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
from scheduler.speech.loading import load_recogniser, transcribes
from scheduler.speech.serving import serve
from scheduler.speech.speech_core import SpeechCore
from scheduler.speech_messages import Transcribe, Transcribed

log = logging.getLogger("warmturn.engine")

_HEARTBEAT_MS = 1000
_BUSY_MS = 5  # while files are being read or written and no turn runs
_CHECK_SECONDS = 60
_POOLING_TOKENS = {"cpu": 2048, "cuda": 16384}  # of a step that embeds


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
        self._commands.media.close()
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
        busy = any(archive.busy for archive in self._archives) or self._commands.media.busy
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


def _take(message: ToEngine, engine: EngineCore, commands: SessionCommands) -> Refused | Transcribed | Pooled | None:
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
            engine.scheduler.pinned.watch(Owner(message.tenant, message.session, True))
        case Inspect():
            commands.inspect(message)
        case Export():
            commands.export(message)
        case Import():
            commands.take_in(message)
        case Expand():
            commands.media.expand(message)
        case LoadAdapter():
            commands.adapters.load(message)
        case UnloadAdapter():
            commands.adapters.unload(message)
        case Transcribe():
            return Transcribed(message.request, error="This model does not turn speech into text.")
        case Pool():
            return Pooled(message.request, code="invalid_prompt", error="This model generates text.")
    return None


def _leave_with_the_server(loaded: Event) -> None:
    """Loading takes minutes: end it when nobody waits for it any more."""
    poller = select.poll()
    poller.register(sys.stdin.fileno(), select.POLLIN)
    while not loaded.wait(0.5):
        if poller.poll(0):  # nothing is ever sent: the server is gone
            os._exit(0)


def _recipe(config: EngineConfig) -> PoolingRecipe | None:
    """How the model embeds or scores; None if it generates. Raises ``LoadFailed``."""
    try:
        return read_recipe(config.model)
    except BadRecipe as error:
        raise LoadFailed(f"cannot load {config.model!r}: {error}") from error


def _serve_pooling(config: EngineConfig, recipe: PoolingRecipe, channel: Channel, loading: Event) -> int:
    """Load and serve a model that embeds or scores; the exit status. Raises ``LoadFailed``."""
    pooler, facts = load_pooler(config, recipe, channel.send)
    loading.set()
    log.info("it can %s; batches: %s; inputs of up to %d tokens", facts.task, facts.mode, facts.max_context)
    gc.freeze()
    channel.send(Ready(facts))
    step_tokens = config.max_step_tokens or _POOLING_TOKENS[facts.device.partition(":")[0]]
    PoolingLoop(pooler, channel, config.max_queued, step_tokens).run()
    channel.close()
    return 0


def _serve_speech(config: EngineConfig, channel: Channel, loading: Event) -> int:
    """The same for a model that turns speech into text."""
    recogniser, facts = load_recogniser(config, channel.send)
    loading.set()
    gc.freeze()
    channel.send(Ready(facts))
    serve(SpeechCore(recogniser), channel)
    channel.close()
    return 0


def main(config: EngineConfig) -> int:
    """Load, tell, serve; the exit status."""
    configure(config.log_format, config.log_level, "%(name)s: %(message)s")
    channel = Channel(config.address)
    loading = Event()
    Thread(target=_leave_with_the_server, args=(loading,), daemon=True).start()
    try:
        if transcribes(config):
            return _serve_speech(config, channel, loading)
        recipe = _recipe(config)
        if recipe is not None:
            return _serve_pooling(config, recipe, channel, loading)
        loaded = load(config, channel.send)
        channel.send(Loading("reserving memory"))
        draft = None
        if config.draft_model is not None and config.speculate != "off":
            draft = load_draft_model(config, loaded, channel.send)
        engine, facts = build_engine(config, loaded, draft, channel.send)
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
    for each in (loaded, draft):
        if each is not None:
            each.keep_packed()
    torch.set_grad_enabled(False)
    commands = SessionCommands(
        engine.scheduler.store, facts.fingerprint, engine.drafter, engine.media_store, engine.adapters
    )
    ServingLoop(engine, commands, channel).run()
    channel.close()
    if loaded.followers is not None:
        loaded.followers.close()
    return 0
