"""A server whose model is divided between two processes: it answers, and outlives either of them."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from server_process import START, ServerProcess, alive, until

pytestmark = [
    pytest.mark.wide,
    pytest.mark.skipif(torch.cuda.is_available(), reason="ranks on a CPU are for machines without a GPU"),
]


def follower_of(engine: int) -> int:
    """The pid of the other rank."""
    children = Path(f"/proc/{engine}/task/{engine}/children").read_text().split()
    [found] = [c for c in children if b"scheduler.follower" in Path(f"/proc/{c}/cmdline").read_bytes()]
    return int(found)


def say(server: ServerProcess, text: str) -> Any:
    body = {"session_id": "ada", "temperature": 0, "messages": [{"role": "user", "content": text}]}
    return server.answer("/v1/chat/completions", body)


@pytest.mark.slow
def test_two_ranks_behind_a_server(tmp_path: Path) -> None:
    with ServerProcess(None, tmp_path, "--tensor-parallel", "2", "--device", "cpu") as server:
        told = httpx.get(f"{server.url}/v1/models/m").json()["warmturn"]
        assert (told["tensor_parallel"], told["mode"]) == (2, "packed")
        say(server, "My name is Emma.")
        answer = say(server, "What is my name?")
        assert answer["choices"][0]["message"]["content"] == "Your name is Emma."
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0

        engine = server.engine_pid()
        os.kill(follower_of(engine), signal.SIGKILL)
        until(lambda: not alive(engine), START)
        until(lambda: server.metric("warmturn_engine_restarts_total") == 1.0, START)  # it may not have been noticed yet
        server.wait_healthy()
        again = say(server, "What is my name?")
        assert again["choices"][0]["message"]["content"] == "Your name is Emma."
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0  # of what both ranks had written

        engine = server.engine_pid()
        follower = follower_of(engine)
        os.kill(engine, signal.SIGKILL)
        until(lambda: not alive(follower), START)
        assert server.stop() == 0
    log = server.log_path.read_text()
    assert "rank 1 ended (-9)" in log or "another rank is gone" in log
    assert "exit status 1" in log
