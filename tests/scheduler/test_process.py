"""``python -m scheduler`` as the server starts it: a real process, a real socket, a tiny saved model."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import zmq
from tiny_models import CONTEXT, greedy, model_of, save_model

from scheduler.engine_config import EngineConfig
from scheduler.protocol import (
    Cancel,
    Delta,
    FinishReason,
    FromEngine,
    Loading,
    ModelFailed,
    Ready,
    Refused,
    Shutdown,
    StepOutputs,
    Submit,
    ToEngine,
    pack_ids,
)
from scheduler.sampling_params import Sampling, Stopping

PATIENCE_MS = 180_000
ROOT = Path(__file__).parents[2]
FAILING = Path(__file__).with_name("failing_rank.py")
RANKS_SECONDS = 10.0  # until all ranks are gone when one has failed


class Process:
    """The engine process and the server's end of its socket."""

    def __init__(self, model: str, folder: Path, *program: str, **options: Any) -> None:
        """``program``: Python's arguments, another than the engine itself."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        address = f"ipc://{folder}/engine"
        self._socket.bind(address)
        self._decode: Any = msgspec.msgpack.Decoder(FromEngine).decode
        self.process = subprocess.Popen(
            [sys.executable, *(program or ("-m", "scheduler"))],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=ROOT,
        )
        config = EngineConfig(address, model, **{"device": "cpu", "kv_memory": 1 << 20, **options})
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.json.encode(config) + b"\n\n")
        self.process.stdin.flush()

    def send(self, message: ToEngine) -> None:
        self._socket.send(msgspec.msgpack.encode(message))

    def receive(self) -> FromEngine:
        """The next message; fails where none comes."""
        assert self._socket.poll(PATIENCE_MS), "the engine says nothing"
        message: FromEngine = self._decode(self._socket.recv())
        return message

    def until(self, kind: type[Any]) -> Any:
        while True:
            message = self.receive()
            if isinstance(message, kind):
                return message

    def turn(self, turn: str) -> list[Delta]:
        """All news of one turn until its end."""
        news: list[Delta] = []
        while not news or news[-1].finish_reason is None:
            news += [delta for delta in self.until(StepOutputs).deltas if delta.turn == turn]
        return news

    def close_stdin(self) -> None:
        """As if the server had died."""
        assert self.process.stdin is not None
        self.process.stdin.close()

    def wait(self) -> int:
        return self.process.wait(PATIENCE_MS / 1000)

    def close(self) -> None:
        """Leave nothing behind."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stderr):
            if pipe is not None:
                pipe.close()
        self._context.destroy(linger=0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_model("llama", tmp_path_factory.mktemp("models")))


@pytest.fixture
def started() -> Iterator[list[Process]]:
    """Processes appended here are ended with the test."""
    processes: list[Process] = []
    yield processes
    for process in processes:
        process.close()


def submit(turn: str, prompt: list[int], count: int, session: str | None = None) -> Submit:
    return Submit(
        turn, "a", pack_ids(prompt), session, Sampling(temperature=0.0), Stopping(max_tokens=count, ignore_eos=True)
    )


def test_a_life(model: str, started: list[Process], tmp_path: Path) -> None:
    engine = Process(model, tmp_path)
    started.append(engine)
    assert isinstance(engine.receive(), Loading)
    facts = engine.until(Ready).facts
    assert (facts.architecture, facts.dtype, facts.device) == ("LlamaForCausalLM", "float32", "cpu")
    assert (facts.vocab_size, facts.max_context, facts.eos_token_ids) == (259, CONTEXT, (258,))
    assert facts.kv_bytes_per_token == 2 * 2 * 2 * 16 * 4
    assert facts.pages == (1 << 20) // (facts.page_size * facts.kv_bytes_per_token)

    prompt = list(range(40, 60))
    engine.send(submit("first", prompt, 8, session="s"))
    news = engine.turn("first")
    tokens = [token for delta in news for token in delta.tokens]
    assert tokens == greedy(model_of("llama"), prompt, 8, tokens)
    assert news[0].receipt is not None
    assert news[0].receipt.cached == 0
    assert news[-1].finish_reason is FinishReason.LENGTH

    longer = [*prompt, *tokens, 1, 2]
    engine.send(submit("second", longer, 4, session="s"))
    news = engine.turn("second")
    assert news[0].receipt is not None
    assert news[0].receipt.cached == len(prompt) + 7
    tokens = [token for delta in news for token in delta.tokens]
    assert tokens == greedy(model_of("llama"), longer, 4, tokens)

    engine.send(submit("empty", [], 4))
    assert engine.until(Refused) == Refused("empty", "invalid_prompt", "The prompt is empty.")

    engine.send(Submit("broken", "a", pack_ids([1]), grammar="start: <|no_such_token|>"))
    assert engine.until(Refused).code == "invalid_grammar"
    engine.send(Submit("obeying", "a", pack_ids([1]), grammar='start: "yes" | "no"'))
    assert "".join(delta.text for delta in engine.turn("obeying")) in ("yes", "no")

    engine.send(submit("long", [1], 500))
    engine.until(StepOutputs)
    engine.send(Cancel("long"))
    assert engine.turn("long")[-1].finish_reason is FinishReason.CANCELLED

    assert engine.until(StepOutputs).stats.running == 0  # an idle engine's heartbeat
    engine.send(submit("last", [2], 500))
    engine.send(Shutdown())
    assert engine.turn("last")[-1].finish_reason is FinishReason.CANCELLED
    assert engine.wait() == 0


def test_it_leaves_when_the_server_is_gone(model: str, started: list[Process], tmp_path: Path) -> None:
    engine = Process(model, tmp_path)
    started.append(engine)
    engine.until(Ready)
    engine.send(submit("running", [1], 500))
    engine.until(StepOutputs)
    engine.close_stdin()
    assert engine.wait() == 0


def test_a_model_that_is_not_there(started: list[Process], tmp_path: Path) -> None:
    engine = Process(str(tmp_path / "nowhere"), tmp_path)
    started.append(engine)
    message = engine.until(ModelFailed).message
    assert "nowhere" in message
    assert "\n" not in message
    assert engine.wait() == 2
    assert engine.process.stderr is not None
    assert b"Traceback" not in engine.process.stderr.read()


@pytest.mark.wide
def test_too_little_memory(model: str, started: list[Process], tmp_path: Path) -> None:
    engine = Process(model, tmp_path, kv_memory=1000)
    started.append(engine)
    assert "--kv-memory" in engine.until(ModelFailed).message
    assert engine.wait() == 2


@pytest.mark.slow
@pytest.mark.wide
@pytest.mark.skipif(torch.cuda.is_available(), reason="ranks on a CPU are for machines without a GPU")
def test_rank_0_fails_alone(model: str, started: list[Process], tmp_path: Path) -> None:
    """The other rank waits for it in the middle of a step, a thread of rank 0 waits for the other rank: all of them end
    at once, and not when somebody has waited too long."""
    switch = tmp_path / "fail"
    engine = Process(model, tmp_path, str(FAILING), str(switch), tensor_parallel=2)
    started.append(engine)
    while not isinstance(engine.receive(), Ready):
        pass
    engine.send(submit("long", list(range(40, 60)), 100))
    while not engine.until(StepOutputs).deltas:
        pass
    [follower] = Path(f"/proc/{engine.process.pid}/task/{engine.process.pid}/children").read_text().split()
    switch.touch()
    began = time.monotonic()
    assert engine.wait() == 1
    while Path(f"/proc/{follower}/cmdline").exists() and Path(f"/proc/{follower}/cmdline").read_bytes():
        assert time.monotonic() - began < RANKS_SECONDS
        time.sleep(0.05)
    assert time.monotonic() - began < RANKS_SECONDS
    assert engine.process.stderr is not None
    assert b"planted" in engine.process.stderr.read()


@pytest.mark.wide
def test_an_engine_without_a_configuration_leaves_with_the_server() -> None:
    command = [sys.executable, "-m", "scheduler"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, cwd=ROOT, timeout=PATIENCE_MS / 1000)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
