"""Several models behind one port: choosing, loading, unloading, what waits and what is refused."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from http_context import Call, P, Scenario, Test, events, until, within
from models_kit import ModelSite, model_site

from scheduler.model_facts import PoolingFacts
from server.middleware.key_file import KeyFile, new_key, write_keys
from server.models import loading_stream, registry


def with_models(*names: str, **parts: Any) -> Callable[[Scenario[ModelSite, P]], Test[P]]:
    """Make a test of a coroutine function whose first parameter is a ModelSite."""
    return within(lambda: model_site(*names, **parts))


@with_models("a", "b", "c")
async def test_a_request_gets_the_model_that_it_names(site: ModelSite) -> None:
    assert await site.status() == {
        "a": "loaded", "a-alias": "loaded", "b": "unloaded", "b-alias": "unloaded", "c": "unloaded",
        "c-alias": "unloaded",
    }  # fmt: skip
    for name, model in (("b", "b"), ("a-alias", "a"), ("", "a")):
        reply = (await site.chat(name)).json()
        assert (reply["model"], reply["choices"][0]["message"]["content"]) == (model, f"I am {model}.")
    assert site.events == ["load a", "load b"]
    refused = await site.chat("d")
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")


@with_models("a", "b", any_model=True)
async def test_an_unknown_name_is_the_first_model_and_the_receipt_says_so(site: ModelSite) -> None:
    reply = (await site.chat("gpt-x")).json()
    assert reply["model"] == "a"
    assert reply["cache"]["adapted"] == [{"rule": "model_aliased", "param": "model", "count": 1}]


@with_models("a", "b", "c")
async def test_the_least_recently_used_model_makes_room_and_writes_its_kv(site: ModelSite) -> None:
    await site.chat("b")
    await site.chat("a")
    await site.chat("c")
    assert site.events == ["load a", "load b", "stop b 30", "load c"]
    await site.chat("a")
    assert site.events[4:] == []
    await site.chat("b")
    assert site.events[4:] == ["stop c 30", "load b"]


@with_models("a", "b", "c")
async def test_requests_for_a_model_that_loads_wait_and_load_it_once(site: ModelSite) -> None:
    site.gates["b"].clear()
    waiting = [asyncio.create_task(site.chat("b")) for _ in range(5)]
    await until(lambda: "load b" in site.events)
    assert (await site.status())["b"] == "loading"
    health = (await site.http.get("/health")).json()
    assert health == {"status": "ok", "models": {"loaded": 1, "loading": 1, "unloaded": 1}, "loading": ["starting"]}
    assert (await site.chat("a")).status_code == 200  # the others go on
    site.gates["b"].set()
    assert [(await task).json()["model"] for task in waiting] == ["b"] * 5
    assert site.events.count("load b") == 1


@with_models("a", "b", most=1)
async def test_a_model_in_use_is_unloaded_when_its_turns_are_over(site: ModelSite) -> None:
    engine = site.engine("a")
    engine.pause_after = 1
    running = asyncio.create_task(site.chat("a"))
    await until(lambda: bool(engine.running))
    other = asyncio.create_task(site.chat("b"))
    await until(lambda: site.models.get("a").status == "unloading")
    late = asyncio.create_task(site.chat("a"))  # waits until it is back
    await asyncio.sleep(0.1)
    assert not other.done()
    engine.go.set()
    assert (await running).json()["model"] == "a"
    assert (await other).json()["model"] == "b"
    assert (await late).json()["model"] == "a"
    assert site.events == ["load a", "stop a 30", "load b", "stop b 30", "load a"]


@with_models("a", "b", most=1)
async def test_a_model_that_stays_busy_is_left_alone(site: ModelSite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "BUSY_SECONDS", 0.1)
    engine = site.engine("a")
    engine.pause_after = 1
    running = asyncio.create_task(site.chat("a"))
    await until(lambda: bool(engine.running))
    refused = await site.chat("b")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_room")
    assert int(refused.headers["retry-after"]) >= 1
    engine.go.set()
    assert (await running).status_code == 200
    assert (await site.chat("a")).status_code == 200
    assert (await site.chat("b")).status_code == 200


@with_models("a", "b", most=1, pinned=("a",))
async def test_nothing_makes_room_for_a_model_when_all_are_pinned(site: ModelSite) -> None:
    refused = await site.chat("b")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_room")
    assert "retry-after" in refused.headers
    kept = await site.http.post("/v1/models/a/unload")
    assert (kept.status_code, kept.json()["error"]["code"]) == (409, "model_pinned")


@with_models(
    "a", "b", "c", "d", most=4, memory=300_000,
    facts={"b": {"weight_bytes": 200_000}, "d": {"weight_bytes": 400_000}},
)  # fmt: skip
async def test_memory_is_shared_by_measured_need(site: ModelSite) -> None:
    """Each has 131,072 bytes of KV; what b needs is measured when it is loaded for the first time."""
    await site.chat("b")
    assert site.events == ["load a", "load b"]
    await site.chat("c")  # beside b nothing has room any more, nor beside a and c
    assert site.events[2:] == ["stop a 30", "stop b 30", "load c"]
    await site.chat("a")
    assert site.events[5:] == ["load a"]
    await site.chat("d")
    site.models.keep("d", None, (), 0.0)
    await site.models.unload(site.models.get("d"))
    refused = await site.chat("d")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "model_too_large")


@with_models("a", "b")
async def test_a_load_that_fails_takes_nobody_along_and_tells_no_path(
    site: ModelSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "FAILED_SECONDS", 2.0)
    site.failing.add("b")
    refused = await site.chat("b")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "model_load_failed")
    assert "secret" not in refused.text
    assert (await site.http.get("/v1/models/b")).json()["status"]["failed"] is True
    assert (await site.chat("b")).status_code == 503
    assert site.events.count("load b") == 1  # it is not tried at once again
    assert (await site.chat("a")).status_code == 200
    site.failing.clear()
    await asyncio.sleep(2.0)
    assert (await site.chat("b")).status_code == 200


@with_models("a", "b")
async def test_models_are_loaded_and_unloaded_over_rest(site: ModelSite) -> None:
    loaded = await site.http.post("/v1/models/b/load")
    assert (loaded.status_code, loaded.json()["id"], loaded.json()["status"]["value"]) == (200, "b", "loaded")
    assert (await site.http.post("/v1/models/b-alias/load")).json()["status"]["value"] == "loaded"
    unloaded = await site.http.post("/v1/models/b/unload")
    assert unloaded.json()["status"]["value"] == "unloaded"
    assert unloaded.json()["warmturn"] is None
    assert (await site.http.post("/v1/models/b/unload")).status_code == 200  # it is
    assert site.events == ["load a", "load b", "stop b 30"]
    for path in ("/v1/models/x/load", "/v1/models/x/unload", "/v1/models/x"):
        refused = await site.http.request("GET" if path.endswith("x") else "POST", path)
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found"), path
    assert (await site.http.post("/v1/models/b/load?x=1")).status_code == 400
    assert (await site.http.get("/v1/models/b/load")).status_code in (404, 405)


@with_models("a", "b", pinned=("a",), idle_seconds=0.1)
async def test_idle_models_are_unloaded_and_come_back(site: ModelSite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "IDLE_LOOK_SECONDS", 0.02)
    watching = asyncio.create_task(site.models.unload_idle())
    await site.chat("b", "s")
    await until(lambda: "stop b 30" in site.events)
    assert site.models.get("a").is_loaded
    assert (await site.chat("b", "s")).status_code == 200
    assert site.events.count("load b") == 2
    watching.cancel()
    with suppress(asyncio.CancelledError):
        await watching


@with_models("a", "b")
async def test_a_client_of_ollama_unloads_a_model(site: ModelSite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "IDLE_LOOK_SECONDS", 0.02)
    watching = asyncio.create_task(site.models.unload_idle())
    tags = (await site.http.get("/api/tags")).json()["models"]
    assert [model["name"] for model in tags] == ["a", "a-alias", "b", "b-alias"]
    assert (await site.http.post("/api/generate", json={"model": "b:latest"})).json()["done_reason"] == "load"
    assert [m["name"] for m in (await site.http.get("/api/ps")).json()["models"]] == ["a", "b"]
    await site.http.post("/api/generate", json={"model": "b", "keep_alive": 0})
    await until(lambda: "stop b 30" in site.events)
    chat = {"model": "b", "messages": [{"role": "user", "content": "Hello"}], "stream": False}
    for keep_alive in (0, "1s"):  # behind a reply, too
        assert (await site.http.post("/api/chat", json={**chat, "keep_alive": keep_alive})).status_code == 200
        await until(lambda: not site.models.get("b").is_loaded)
    watching.cancel()


@with_models("a", "b")
async def test_a_client_of_ollama_is_told_how_long_its_model_was_loaded(site: ModelSite) -> None:
    chat = {"model": "b", "messages": [{"role": "user", "content": "Hello"}], "stream": False}
    site.gates["b"].clear()
    waiting = asyncio.create_task(site.http.post("/api/chat", json=chat))
    await until(lambda: "load b" in site.events)
    closed = time.perf_counter_ns()
    await asyncio.sleep(0.05)
    closed = time.perf_counter_ns() - closed
    site.gates["b"].set()
    loaded = (await waiting).json()
    assert closed < loaded["load_duration"] < loaded["total_duration"]


@with_models("a", "b", pinned=("a",), idle_seconds=60.0)
async def test_what_a_client_of_ollama_says_goes_before_the_servers_own_time(site: ModelSite) -> None:
    async def expires(name: str, **body: Any) -> float:
        await site.http.post("/api/generate", json={"model": name, **body})
        models = (await site.http.get("/api/ps")).json()["models"]
        told = next(model["expires_at"] for model in models if model["name"] == name)
        return (datetime.fromisoformat(told) - datetime.now(UTC)).total_seconds()

    assert 0 < await expires("b") <= 60
    assert 60 < await expires("b", keep_alive="10m") <= 600
    assert 60 < await expires("b") <= 600  # until another one is said
    assert await expires("b", keep_alive=-1) > 1e9
    assert await expires("a", keep_alive="10m") > 1e9  # it is pinned
    await site.http.post("/v1/models/b/unload")
    assert 0 < await expires("b") <= 60


@with_models("a", "b")
async def test_a_session_goes_on_with_another_model(site: ModelSite) -> None:
    first = (await site.chat("a", "s")).json()
    second = (await site.chat("b", "s")).json()
    assert (first["model"], second["model"]) == ("a", "b")
    assert second["cache"]["prompt_tokens"] > first["usage"]["total_tokens"]  # the same tokenizer: its ids are kept
    session = (await site.http.get("/v1/sessions/s")).json()
    assert (session["turns"], session["model_matches"]) == (2, True)


@with_models("a", "b")
async def test_a_deleted_session_is_forgotten_by_every_loaded_model(site: ModelSite) -> None:
    await site.chat("a", "s")
    await site.chat("b", "s")
    assert (await site.http.delete("/v1/sessions/s")).status_code == 200
    for name in ("a", "b"):
        assert site.engine(name).forgotten == [("default", "s")]


@with_models("a", "b")
async def test_a_turn_of_any_model_is_cancelled_by_its_session(site: ModelSite) -> None:
    await site.chat("b", "s")
    engine = site.engine("b")
    engine.pause_after = 1
    running = asyncio.create_task(site.chat("b", "s"))
    await until(lambda: any(turn.spoke for _, turn in engine._turns.values() if turn.name in engine.running))
    cancelled = (await site.http.post("/v1/sessions/s/cancel")).json()
    assert cancelled["cancelled"] is True
    assert (await running).json()["choices"][0]["finish_reason"] == "cancelled"


@with_models("a", "b")
async def test_a_stream_is_told_how_far_its_model_is(site: ModelSite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading_stream, "SILENT_SECONDS", 0.02)
    monkeypatch.setattr(loading_stream, "PROGRESS_SECONDS", 0.02)
    site.gates["b"].clear()
    body = {"model": "b", "stream": True, "messages": [{"role": "user", "content": "Hello"}]}
    call = Call.post(site.app, "/v1/chat/completions", body)
    await call.until(lambda: call.body.count(b": loading: ") >= 2)
    assert (call.status, call.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    site.gates["b"].set()
    await call.finish()
    chunks = events(call.body.decode())
    assert chunks[-1] == "[DONE]"
    said = "".join(part["delta"].get("content") or "" for chunk in chunks[:-1] for part in chunk["choices"])
    assert said == "I am b."


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
@with_models("a", "b")
async def test_a_stream_whose_model_fails_ends_with_an_error(
    site: ModelSite, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading_stream, "SILENT_SECONDS", 0.02)
    monkeypatch.setattr(loading_stream, "PROGRESS_SECONDS", 0.02)
    site.gates["b"].clear()
    site.failing.add("b")
    prompt = {"input": "Hello"} if path == "/v1/responses" else {"messages": [{"role": "user", "content": "Hello"}]}
    body = {"model": "b", "stream": True, "max_tokens": 5, **prompt}
    if path == "/v1/responses":
        del body["max_tokens"]
    call = Call.post(site.app, path, body)
    await call.until(lambda: b": loading: " in call.body)
    site.gates["b"].set()
    await call.finish()
    last = call.body.decode().rsplit("\n\n", 2)[-2]
    assert "could not be loaded" in last
    assert "data: " in last
    assert last.startswith("event: error\n") is (path != "/v1/chat/completions")


@with_models("a", "b")
async def test_a_client_that_leaves_does_not_wait_for_its_model(site: ModelSite) -> None:
    site.gates["b"].clear()
    body = {"model": "b", "messages": [{"role": "user", "content": "Hello"}]}
    call = Call.post(site.app, "/v1/chat/completions", body)
    await until(lambda: "load b" in site.events)
    await call.leave()
    await until(lambda: site.models.get("b").users == 0)
    site.gates["b"].set()
    assert (await site.chat("b")).status_code == 200
    assert site.engine("b").submitted[0].turn
    assert len(site.engine("b").submitted) == 1


@with_models("a", "b")
async def test_metrics_have_the_name_of_their_model(site: ModelSite) -> None:
    await site.chat("a")
    await site.chat("b")
    await site.chat("b")
    text = (await site.http.get("/metrics")).text
    assert 'warmturn_turns_total{finish_reason="stop",model="a"} 1.0' in text
    assert 'warmturn_turns_total{finish_reason="stop",model="b"} 2.0' in text
    assert 'warmturn_requests_total{route="/v1/chat/completions",status="200"} 3.0' in text
    assert text.count("# TYPE warmturn_turns counter") + text.count("# TYPE warmturn_turns_total counter") == 1


async def test_a_key_may_be_limited_to_models(tmp_path: Path) -> None:
    ann, entry = new_key("ann", None, None, ["b"])
    bob, other = new_key("bob", None, None)
    write_keys(tmp_path / "keys", [entry, other])
    async with model_site("a", "b", key_file=KeyFile(tmp_path / "keys"), any_model=True) as site:
        own, all_ = {"authorization": f"Bearer {ann}"}, {"authorization": f"Bearer {bob}"}
        listed = (await site.http.get("/v1/models", headers=own)).json()["data"]
        assert {model["id"] for model in listed} == {"b", "b-alias"}
        assert len((await site.http.get("/v1/models", headers=all_)).json()["data"]) == 4
        assert (await site.chat("a", headers=own)).json()["model"] == "b"  # it means the first that it may use
        assert (await site.chat("a", headers=all_)).json()["model"] == "a"
        for path in ("/v1/models/a/load", "/v1/models/a/unload"):
            assert (await site.http.post(path, headers=own)).status_code == 404
        assert (await site.http.get("/v1/models/a", headers=own)).status_code == 404
        assert (await site.http.get("/api/tags", headers=own)).json()["models"][0]["name"] == "b"


@with_models("a", "b")
async def test_a_server_that_stops_loads_nothing(site: ModelSite) -> None:
    site.gates["b"].clear()
    waiting = asyncio.create_task(site.chat("b"))
    await until(lambda: "load b" in site.events)
    site.models.drain()
    assert (await waiting).status_code == 503
    assert (await site.chat("b")).status_code == 503
    assert (await site.http.get("/health")).status_code == 503


EMBEDDER: Any = {"task": "embed", "pooling": PoolingFacts(4), "pages": 0}


@with_models("a", "b", "c", facts={"b": EMBEDDER, "c": EMBEDDER}, any_model=True)
async def test_a_name_that_no_model_has_means_one_for_what_is_asked(site: ModelSite) -> None:
    async def embed(model: str) -> Any:
        return (await site.http.post("/v1/embeddings", json={"model": model, "input": "x"})).json()

    site.models.get("b")._task = site.models.get("c")._task = "embed"  # as their files say
    assert (await embed("text-embedding-3-small"))["model"] == "b"
    assert (await embed("c"))["model"] == "c"
    assert (await site.chat("gpt-4o")).json()["model"] == "a"
    for answer in (await embed("a"), (await site.chat("b")).json()):
        assert (answer["error"]["param"], answer["error"]["code"]) == ("model", "wrong_model_task")
    listed = (await site.http.get("/v1/models")).json()["data"]
    assert {model["id"]: model["task"] for model in listed if "alias" not in model["id"]} == {
        "a": "generate",
        "b": "embed",
        "c": "embed",
    }


@with_models("a", "b", most=1, facts={"b": EMBEDDER})
async def test_a_model_of_another_kind_is_not_loaded_for_a_refusal(site: ModelSite) -> None:
    site.models.get("b")._task = "embed"
    assert (await site.chat("b")).status_code == 400
    assert site.events == ["load a"]
    site.models.get("b")._task = None  # of the hub, where nothing was downloaded yet
    assert (await site.chat("b")).status_code == 400
    assert site.events == ["load a", "stop a 30", "load b"]
    assert site.models.get("b").users == 0


async def test_a_key_for_other_models_does_not_reach_one_that_embeds(tmp_path: Path) -> None:
    text, entry = new_key("ann", None, None, ["a"])
    write_keys(tmp_path / "keys.json", [entry])
    keys = KeyFile(tmp_path / "keys.json")
    async with model_site("a", "b", facts={"b": EMBEDDER}, key_file=keys) as site:
        headers = {"authorization": f"Bearer {text}"}
        answer = await site.http.post("/v1/embeddings", json={"model": "b", "input": "x"}, headers=headers)
        assert answer.status_code == 404
        assert site.events == ["load a"]


@with_models("a", "b", facts={"b": EMBEDDER}, any_model=True)
async def test_what_nobody_waits_for_unloads_no_model_in_use_for_one_of_its_task(site: ModelSite) -> None:
    site.models.get("b")._task = "embed"
    site.models.get("a").users += 1
    waiting = asyncio.create_task(site.models.free_for("any", None, ("embed",)))
    await site.models.free_for("any", None, ("generate",))
    for _ in range(5):
        await asyncio.sleep(0)
    assert not waiting.done()
    waiting.cancel()
    site.models.get("a").users -= 1
    await site.models.free_for("any", None, ("embed",))
