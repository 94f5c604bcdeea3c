"""A stand-in for the engine process: speaks its protocol, without a model. Run as a script.

``EngineConfig.model`` is the behaviour while loading: "ok", "fail", "die", "stubborn" (ignores Shutdown and SIGTERM)
or "once:PATH" (loads the first time, fails while PATH exists and holds more than one line).
``Submit.tenant`` is that of a turn: "count" streams max_tokens tokens, one per step; "endless" streams until
cancelled; "queued" waits until it is cancelled; "held" streams until a file ``go`` lies beside the KV folder; "mute" is
admitted and says nothing; "late" waits, and is refused when the engine is told to end; "crash" exits in mid-turn;
anything else is a code to refuse with.
``Inspect``, ``Export`` and ``Import`` of the session "mute" are never answered, those of "crash" end the process.
``Shutdown`` writes its seconds to a file ``flushed`` beside the KV folder, and takes them all if ``slow`` lies there.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import msgspec
import zmq

from cache.tier import Tier, TierHolding, TierStats
from scheduler.engine_config import EngineConfig
from scheduler.engine_stats import Stats
from scheduler.model_facts import ModelFacts
from scheduler.protocol import (
    Cancel,
    Delta,
    Export,
    Exported,
    FinishReason,
    Forget,
    Forgotten,
    FromEngine,
    Import,
    Imported,
    Inspect,
    Inspected,
    Loading,
    ModelFailed,
    Pin,
    Ready,
    Refused,
    Shutdown,
    StepOutputs,
    Submit,
    ToEngine,
    unpack_ids,
)
from scheduler.turn_receipt import Receipt

COMMAND = (sys.executable, "-P", __file__)

FACTS = ModelFacts(
    architecture="Scripted",
    parameters=1,
    weight_bytes=4,
    dtype="float32",
    device="cpu",
    vocab_size=1000,
    max_context=512,
    eos_token_ids=(2,),
    mode="packed",
    probe="equal",
    layer_kinds={"full": 1},
    kv_bytes_per_token=8,
    page_size=16,
    pages=64,
    fingerprint="scripted",
)


class ScriptedEngine:
    """Runs turns by their script; one token per turn and step."""

    def __init__(self, config: EngineConfig) -> None:
        self.model = config.model
        self.socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
        self.socket.connect(config.address)
        self.turns: dict[str, Submit] = {}
        self.given: dict[str, int] = {}
        self.forgotten = 0
        self.pinned: dict[str, float] = {}
        self.beside = Path(config.kv_folder).parent if config.kv_folder else None

    def say(self, message: FromEngine) -> None:
        self.socket.send(msgspec.msgpack.encode(message))

    def load(self) -> None:
        """Load, fail or die, as the model's name says."""
        self.say(Loading("reading weights"))
        kind, _, path = self.model.partition(":")
        if kind == "once":
            with open(path, "a") as loads:
                loads.write("load\n")
            if len(Path(path).read_text().splitlines()) > 1:
                kind = "fail"
        if kind == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "fail":
            self.say(ModelFailed("no such model: fail"))
            self.close()
            sys.exit(2)
        if kind == "stubborn":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self.say(Ready(FACTS))

    def run(self) -> None:
        """Take what came, then one step over every turn; a heartbeat when idle."""
        decoder = msgspec.msgpack.Decoder(ToEngine)
        while True:
            if self.socket.poll(10 if self.given else 1000):
                message = decoder.decode(self.socket.recv())
                if isinstance(message, Shutdown) and self.model != "stubborn":
                    return self.end(message.flush_seconds)
                self.take(message)
            waiting = sum(request.tenant == "queued" for request in self.turns.values())
            tiers = {Tier.DEVICE: TierStats(evictions=self.forgotten)}
            stats = Stats(running=len(self.turns) - waiting, waiting=waiting, tiers=tiers)
            self.say(StepOutputs(tuple(self.step()), stats))

    def take(self, message: ToEngine) -> None:
        match message:
            case Submit(turn, tenant, prompt):
                if tenant in ("count", "endless", "queued", "held", "mute", "crash", "late"):
                    self.turns[turn] = message
                    self.given[turn] = -1
                    return
                self.say(Refused(turn, tenant, f"{tenant} of {len(unpack_ids(prompt))} tokens"))
            case Cancel(turn):
                if turn in self.turns:
                    self.finish(turn)
                    self.say(StepOutputs((Delta(turn, finish_reason=FinishReason.CANCELLED),), Stats()))
            case Forget(tenant, session, life):
                self.forgotten += 1
                self.say(Forgotten(tenant, session, life))
            case Pin(_, session, until):
                self.pinned[session] = until
            case Inspect() | Export() | Import():
                self.answer(message)

    def answer(self, question: Inspect | Export | Import) -> None:
        """Every session has 16 tokens on disk, in two files, and is running while it is pinned."""
        if question.session == "mute":
            return
        if question.session == "crash":
            os._exit(7)
        match question:
            case Inspect(request, _, session):
                self.say(Inspected(request, {Tier.DISK: TierHolding(16, 128)}, session in self.pinned))
            case Export(request, _, _, folder):
                Path(folder).mkdir()
                for number in range(2):
                    (Path(folder) / f"{number:06}.kv").write_bytes(b"kv" * 32)
                self.say(Exported(request, 2, 16))
            case Import(request, _, _, folder):
                count = len(list(Path(folder).glob("*.kv")))
                self.say(Imported(request, 8 * count, None if count == 2 else "damaged"))

    def step(self) -> list[Delta]:
        deltas = []
        for turn, request in list(self.turns.items()):
            if request.tenant in ("queued", "late"):
                continue
            given = self.given[turn] = self.given[turn] + 1
            prompt = unpack_ids(request.prompt)
            if given == 0:
                deltas.append(Delta(turn, receipt=Receipt(len(prompt), len(prompt) - 1)))
                continue
            if request.tenant == "mute":
                continue
            if request.tenant == "crash" and given == 3:
                os._exit(7)
            last = request.tenant == "count" and given == request.stopping.max_tokens
            last |= request.tenant == "held" and self.beside is not None and (self.beside / "go").exists()
            deltas.append(Delta(turn, (given,), f"{given} ", FinishReason.LENGTH if last else None))
            if last:
                self.finish(turn)
        return deltas

    def finish(self, turn: str) -> None:
        del self.turns[turn], self.given[turn]

    def end(self, flush_seconds: float) -> None:
        """Every turn ends as cancelled, what is left is written, then the process ends."""
        for turn in [turn for turn, request in self.turns.items() if request.tenant == "late"]:
            self.finish(turn)
            self.say(Refused(turn, "invalid_grammar", "The grammar cannot be compiled."))
        self.say(StepOutputs(tuple(Delta(t, finish_reason=FinishReason.CANCELLED) for t in self.turns), Stats()))
        if self.beside is not None:
            (self.beside / "flushed").write_text(str(flush_seconds))
            if (self.beside / "slow").exists():
                time.sleep(flush_seconds)
        self.close()

    def close(self) -> None:
        """Close the socket; what was said is sent before the process goes."""
        self.socket.close(linger=1000)
        zmq.Context.instance().term()


def leave_with_the_server() -> None:
    """Exit when standard input ends: the server is gone."""
    os.read(0, 1)
    os._exit(0)


if __name__ == "__main__":
    config = msgspec.json.decode(sys.stdin.buffer.readline(), type=EngineConfig)
    sys.stdin.buffer.readline()  # the server lets it load
    threading.Thread(target=leave_with_the_server, daemon=True).start()
    engine = ScriptedEngine(config)
    engine.load()
    engine.run()
