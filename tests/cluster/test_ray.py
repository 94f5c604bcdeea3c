"""Real replicas on Ray Serve, on CPU, with the demo model."""

from __future__ import annotations

import importlib.util
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import httpx
import pytest
from cluster.ray_kit import KEY, RayCluster
from cluster.routed import ANSWER, ASKED, PATIENCE, TOLD, Ended, ask, stream, text_of, wait_for

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed: the extra ray"),
    pytest.mark.slow,
]

SESSIONS = [f"session-{number}" for number in range(12)]
LONG = 1500  # tokens
BEARER = {"authorization": f"Bearer {KEY}"}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    with RayCluster(tmp_path_factory.mktemp("cluster"), 2) as running:
        wait_until_routed(running)
        yield running


def wait_until_routed(cluster: RayCluster) -> None:
    """Until requests come to both replicas, of which one has had no turn yet: Ray's proxy hears of each a moment after
    the controller says that it runs, and until then its sessions go to the other one."""
    text_of(ask(cluster.url, "first", TOLD, None, x_session_id="first", **BEARER))
    wait_for(lambda: "warmturn_steps_total 0.0" in httpx.get(f"{cluster.url}/metrics", headers=BEARER).text)


def cached(answer: httpx.Response) -> int:
    assert answer.status_code == 200, answer.text
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def turn(cluster: RayCluster, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """A short turn at the cluster, and its answer."""
    small = {"temperature": 0, "max_output_tokens" if path == "responses" else "max_tokens": 16}
    answer = httpx.post(f"{cluster.url}/v1/{path}", json={**small, **body}, headers=BEARER, timeout=PATIENCE)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def where_found(answer: dict[str, Any]) -> list[str]:
    """The tiers that had tokens of its prompt: those of a replica of its own, and the one that all share."""
    return [tier for tier, tokens in answer["cache"]["reused"].items() if tokens]


def test_what_only_a_body_names_stays_at_one_replica(cluster: RayCluster) -> None:
    """A session, a conversation, a chain of responses from its second turn on, and a client's own id: each turn finds
    the KV of the turn before it in the memory of the replica that it comes to."""
    more = {"messages": [*TOLD, {"role": "assistant", "content": "Yes."}, *ASKED]}
    found = {}
    for number in range(6):
        turn(cluster, "chat/completions", {"session_id": f"body-{number}", "messages": [*TOLD]})
        found[number, "session_id"] = turn(
            cluster, "chat/completions", {"session_id": f"body-{number}", "messages": [*ASKED]}
        )
        chain = httpx.post(f"{cluster.url}/v1/conversations", json={}, headers=BEARER, timeout=PATIENCE).json()["id"]
        turn(cluster, "responses", {"conversation": chain, "input": [*TOLD]})
        found[number, "conversation"] = turn(cluster, "responses", {"conversation": {"id": chain}, "input": [*ASKED]})
        last = turn(cluster, "responses", {"input": [*TOLD]})
        last = turn(cluster, "responses", {"previous_response_id": last["id"], "input": [*ASKED]})
        found[number, "previous_response_id"] = turn(
            cluster, "responses", {"previous_response_id": last["id"], "input": [*TOLD]}
        )
        for field, value in (
            ("prompt_cache_key", f"key-{number}"),
            ("metadata", {"session_id": f"told-{number}"}),
        ):
            turn(cluster, "chat/completions", {field: value, "messages": [*TOLD]})
            found[number, field] = turn(cluster, "chat/completions", {field: value, **more})
    assert [key for key, answer in found.items() if where_found(answer) != ["device"]] == []


def test_the_owner_of_sessions_is_killed(cluster: RayCluster) -> None:
    """Sessions stay at one replica, by header or path. When one is killed in the middle of streams, only those that it
    wrote end, and what was told before is known by the other one, at once or as soon as the dead one is missed."""
    for name in SESSIONS:
        text_of(ask(cluster.url, name, TOLD, None, x_session_id=name, **BEARER))
    for name in SESSIONS:  # the path names the same replica as the header, whose memory has the cache
        summary = httpx.get(f"{cluster.url}/v1/sessions/{name}", headers=BEARER, timeout=PATIENCE).json()
        assert "device" in summary["kv"], summary
    running = {f"live-{number}": Ended() for number in range(6)}
    with ThreadPoolExecutor(6) as pool:
        futures = [pool.submit(stream, cluster.url, name, LONG, ended, **BEARER) for name, ended in running.items()]
        wait_for(lambda: all(ended.text or ended.error for ended in running.values()))
        owners = {name: cluster.holder(name) for name in running}
        replicas = cluster.replicas()
        dead = owners["live-0"]
        assert dead is not None
        os.kill(replicas[dead], signal.SIGKILL)
        for future in futures:
            future.result(PATIENCE)
    for name, ended in running.items():
        assert ended.finished is (owners[name] != dead), (name, owners, ended.error)
    for name in SESSIONS:
        answer = ask(cluster.url, name, ASKED, None, x_session_id=name, **BEARER)
        assert text_of(answer) == ANSWER, name
        assert cached(answer) > 0, name


def test_replicas_come_and_go_under_streams(cluster: RayCluster) -> None:
    cluster.wait_for_replicas(2)
    stopped = Event()
    with ThreadPoolExecutor(4) as pool:
        clients = [pool.submit(chat_on, cluster.url, f"client-{number}", stopped) for number in range(4)]
        try:
            cluster.scale(3)
            assert len(cluster.replicas()) == 3
            cluster.scale(2)
            cluster.wait_for_replicas(2)
        finally:
            stopped.set()
        turns = [client.result(PATIENCE) for client in clients]
    assert min(turns) > 0


def chat_on(url: str, name: str, stopped: Event) -> int:
    """Streams one after the other, each in a session of its own, until told to stop; how many there were."""
    count = 0
    while not stopped.is_set():
        session = f"{name}-{count}"
        ended = stream(url, session, 300, Ended(), **{"x-session-id": session, "x-session-create": "true"}, **BEARER)
        assert ended.finished, ended
        text_of(ask(url, session, ASKED, None, x_session_id=session, **BEARER))
        count += 1
    return count


def test_keys_are_nowhere_in_what_ray_writes(cluster: RayCluster) -> None:
    """Its folder and logs are for everybody on the machine to read."""
    assert ask(cluster.url, "keyless", TOLD).status_code == 401
    written = cluster.written()
    assert any(b"WARMTURN_API_KEY" in content for content in written.values())  # its name is
    for secret in (KEY, str(cluster.database)):
        assert not [path for path, content in written.items() if secret.encode() in content], secret


def test_nothing_is_left_of_it(cluster: RayCluster) -> None:
    assert cluster.stop() == 0, cluster.output
    wait_for(lambda: not cluster.processes())
