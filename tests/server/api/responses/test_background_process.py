"""Responses in the background when their server ends: in order, or at once. The engine is a scripted one."""

import asyncio
import json
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest
from scripted_server import PATIENCE, Server, serving, wait

from server.http.event_recording import read_recording
from server.log.response_rows import StoredResponse
from server.log.session_log import SessionLog
from server.schemas.items import parse_id

KEYS = ("--api-key", "held=held-key", "--drain-seconds", "600")
HEADERS = {"authorization": "Bearer held-key"}

pytestmark = pytest.mark.skipif(not Path("/proc/self").exists(), reason="children are found in /proc")


def client(server: Server) -> httpx.Client:
    return httpx.Client(base_url=server.url(), headers=HEADERS, timeout=PATIENCE)


def begun(http: httpx.Client) -> str:
    """A response that runs until there is a file ``go``."""
    made = http.post("/v1/responses", json={"input": "hello", "background": True})
    assert made.status_code == 200, made.text
    id = str(made.json()["id"])
    wait(lambda: http.get(f"/v1/responses/{id}").json()["status"] == "in_progress")
    return id


def ending(told: str) -> Any:
    """The last event of a stream."""
    return json.loads([line for line in told.splitlines() if line.startswith("data: ")][-1].removeprefix("data: "))


def test_killed_it_has_failed_and_ended_in_order_it_is_waited_for(tmp_path: Path) -> None:
    with serving(tmp_path, *KEYS) as server, client(server) as http:
        lost = begun(http)
    with serving(tmp_path, *KEYS) as server, client(server) as http:
        failed = http.get(f"/v1/responses/{lost}").json()
        assert (failed["status"], failed["error"]["code"]) == ("failed", "server_error")
        told = http.get(f"/v1/responses/{lost}", params={"stream": True}).text
        assert ending(told)["type"] == "response.failed"
        late = http.get(f"/v1/responses/{lost}", params={"stream": True, "starting_after": 40}).text
        assert (ending(late)["type"], ending(late)["sequence_number"]) == ("response.failed", 41)

        waited_for = begun(http)
        server.process.send_signal(signal.SIGTERM)
        wait(lambda: httpx.get(f"{server.url()}/health").status_code == 503)
        refused = http.post("/v1/responses", json={"input": "hello", "background": True})
        assert refused.status_code == 503
        (server.data / "go").touch()
        assert server.process.wait(PATIENCE) == 0
    stored = asyncio.run(logged(server, waited_for))
    assert stored is not None
    assert stored.status == "incomplete"  # as the script ends it: by length
    assert stored.events is not None
    assert b"event: response.incomplete" in read_recording(stored.events, 0)[-1]


async def logged(server: Server, id: str) -> StoredResponse | None:
    """What the log of a server that has ended holds."""
    place = parse_id(id, "resp")
    assert place is not None
    log = SessionLog(server.data / "log.sqlite")
    try:
        return await log.responses.get("held", *place)
    finally:
        await log.close()
