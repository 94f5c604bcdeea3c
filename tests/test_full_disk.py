"""A server whose disk is full refuses what it could not keep, goes on with the rest, and recovers by itself."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_process import ServerProcess, free_port, until

pytestmark = pytest.mark.wide

QUESTION = [{"role": "user", "content": "My name is Alice and I like tea. " * 6}]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MB."""
    folder = tmp_path / "small"
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4M,mode=0700", "tmpfs", folder], capture_output=True)
    if made.returncode:
        pytest.skip("this user cannot mount a small file system")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


FULL = {"status": "ok", "degraded": ["session_log_full", "disk_failing"]}


@pytest.mark.slow
def test_a_full_disk_refuses_turns_that_cannot_be_kept_and_that_is_told(small_disk: Path, tmp_path: Path) -> None:
    data = small_disk / "data"
    data.mkdir()
    log, port = tmp_path / "server.log", free_port()
    (data / f"server-{port}.log").symlink_to(log)  # there is room for what it says
    with ServerProcess(None, data, "--disk-space", "1M", "--disk-floor", "0", port=port) as server:

        def ask(session: str | None, **options: Any) -> httpx.Response:
            body = {"messages": QUESTION, "temperature": 0, "max_tokens": 8, **options}
            return server.post("/v1/chat/completions", body | ({} if session is None else {"session_id": session}))

        assert ask("before").status_code == 200
        filler = (small_disk / "filler").open("wb", buffering=0)
        for size in (65536, 4096, 1):
            with suppress(OSError):
                while True:
                    filler.write(b"x" * size)
        answers = [ask(f"s{number}") for number in range(4)]  # a page of the database may have had room
        refused = [answer for answer in answers if answer.status_code != 200]
        assert refused
        deadline = time.monotonic() + 30.0  # KV is written behind the turns
        while (health := httpx.get(f"{server.url}/health")).json() != FULL:
            assert health.status_code == 200
            assert time.monotonic() < deadline, health.json()
            time.sleep(0.1)
        assert server.metric("warmturn_disk_errors_total") > 0
        assert server.metric("warmturn_disk_failing") == 1
        for answer in refused:
            assert answer.status_code == 507
            assert answer.json()["error"]["code"] == "insufficient_storage"
            assert "retry-after" in answer.headers
        assert ask(None).status_code == 200  # nothing is to be kept of this one
        filler.close()
        (small_disk / "filler").unlink()
        assert ask("after").status_code == 200
        until(lambda: httpx.get(f"{server.url}/health").json() == {"status": "ok"}, 30.0)
        told = log.read_text()
        for line in ("the session log cannot be written", "the session log can be written again"):
            assert told.count(line) == 1, told
        assert 1 <= told.count("KV is not written to disk") == told.count("KV is written to disk again")
        kept = {session["id"]: session["turns"] for session in httpx.get(f"{server.url}/v1/sessions").json()["data"]}
    expected = {f"s{number}" for number, answer in enumerate(answers) if answer.status_code == 200}
    assert kept == dict.fromkeys(expected | {"before", "after"}, 1)
    with ServerProcess(None, data, "--disk-space", "1M", "--disk-floor", "0") as server:
        again = httpx.get(f"{server.url}/v1/sessions").json()["data"]
        assert {session["id"]: session["turns"] for session in again} == kept
