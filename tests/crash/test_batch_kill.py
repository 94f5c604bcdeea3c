"""Batches under kill -9: of the server and of the engine, while a chat goes on. Every line has one result."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import pytest
from server_process import ServerProcess

CHAT = "/v1/chat/completions"
LINES = 150
KEPT = 10  # of the lines are turns of sessions, which must be committed once
KILLS = 4  # half of them are the engine's


def lines() -> bytes:
    """The input: chats of a few tokens, some of which are kept."""
    made = []
    for number in range(LINES):
        body: dict[str, Any] = {"messages": [{"role": "user", "content": f"Number {number}"}], "max_tokens": 24}
        if number % (LINES // KEPT) == 0:
            body["session_id"] = f"kept-{number}"
        made.append(json.dumps({"custom_id": f"{number}", "method": "POST", "url": CHAT, "body": body}))
    return "\n".join(made).encode()


def batch_of(server: ServerProcess, id: str) -> Any:
    return httpx.get(f"{server.url}/v1/batches/{id}", timeout=60).json()


def until_done(server: ServerProcess, id: str, count: int) -> Any:
    """The batch, once so many requests have results or it is over."""
    while True:
        batch = batch_of(server, id)
        if batch["status"] in ("completed", "failed", "expired") or batch["request_counts"]["completed"] >= count:
            return batch
        time.sleep(0.2)


def chat_seconds(server: ServerProcess) -> float:
    """How long a short chat takes."""
    began = time.perf_counter()
    said = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 16, "temperature": 0}
    server.post(CHAT, said).raise_for_status()
    return time.perf_counter() - began


@pytest.mark.slow
def test_a_batch_survives_kills_and_every_line_has_one_result(tmp_path: Path) -> None:
    with ServerProcess(None, tmp_path) as server:
        chat_seconds(server)
        alone = median(chat_seconds(server) for _ in range(9))
        form: Any = {"data": {"purpose": "batch"}, "files": {"file": ("in.jsonl", lines())}}
        file = httpx.post(f"{server.url}/v1/files", timeout=60, **form).json()["id"]
        body = {"input_file_id": file, "endpoint": CHAT, "completion_window": "24h"}
        id = server.post("/v1/batches", body).json()["id"]
        until_done(server, id, 5)
        beside = median(chat_seconds(server) for _ in range(9))
        print(f"a chat alone: {alone:.3f} s, beside the batch: {beside:.3f} s", flush=True)
        before = until_done(server, id, LINES // 4)["request_counts"]["completed"]
        os.kill(server.engine_pid(), signal.SIGKILL)
        until_done(server, id, LINES // 3)
        server.process.send_signal(signal.SIGKILL)
        server.process.wait()
    for kill in range(2, KILLS):
        with ServerProcess(None, tmp_path) as server:
            now = until_done(server, id, LINES * kill // (KILLS + 1))["request_counts"]["completed"]
            assert now >= before
            before = now
            os.kill(server.engine_pid() if kill % 2 else server.process.pid, signal.SIGKILL)
            server.process.send_signal(signal.SIGKILL)
            server.process.wait()
    with ServerProcess(None, tmp_path) as server:
        batch = until_done(server, id, LINES + 1)
        assert (batch["status"], batch["error_file_id"]) == ("completed", None)
        assert batch["request_counts"] == {"total": LINES, "completed": LINES, "failed": 0}
        text = httpx.get(f"{server.url}/v1/files/{batch['output_file_id']}/content", timeout=60).text
        results = [json.loads(line) for line in text.splitlines()]
        assert sorted(int(result["custom_id"]) for result in results) == [*range(LINES)]
        assert {result["response"]["status_code"] for result in results} == {200}
        for number in range(0, LINES, LINES // KEPT):
            assert httpx.get(f"{server.url}/v1/sessions/kept-{number}", timeout=60).json()["turns"] == 1
