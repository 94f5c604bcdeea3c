"""/metrics, /health and /v1/models: what probes and dashboards see."""

import asyncio

import msgspec
from fake_engine import FACTS
from http_face import HELLO, Call, Site, served

from scheduler.messages import Delta, Receipt, Stats
from server.metrics import Metrics


def value(text: str, series: str) -> float:
    """The value of one series, labels included in its name."""
    (line,) = [line for line in text.splitlines() if line.rpartition(" ")[0] == series]
    return float(line.rpartition(" ")[2])


def test_counters_survive_an_engine_restart() -> None:
    metrics = Metrics()
    life = [
        Stats(prompt_tokens=10, cached_tokens=4, generated_tokens=5, steps=7, disk_written=100, misses={"evicted": 2}),
        Stats(prompt_tokens=15, cached_tokens=4, generated_tokens=9, steps=9, disk_written=150, misses={"evicted": 3}),
        Stats(prompt_tokens=3, cached_tokens=1, generated_tokens=2, steps=2, disk_written=7, misses={"evicted": 1}),
        Stats(prompt_tokens=3, cached_tokens=1, generated_tokens=2, steps=2, disk_written=7, misses={"evicted": 1}),
    ]  # the third is a fresh engine's
    for stats in life:
        metrics.engine(stats, ready=True)
    text = metrics.text().decode()
    assert value(text, "warmturn_prompt_tokens_total") == 18
    assert value(text, "warmturn_cached_tokens_total") == 5
    assert value(text, "warmturn_generated_tokens_total") == 11
    assert value(text, "warmturn_steps_total") == 11
    assert value(text, "warmturn_disk_written_bytes_total") == 157
    assert value(text, 'warmturn_cache_misses_total{reason="evicted"}') == 4


def test_nothing_is_taken_back() -> None:
    metrics = Metrics()
    life = [
        Stats(steps=5, disk_read=10, misses={"damaged": 2}),
        Stats(),  # no engine
        Stats(),
        Stats(steps=9, disk_read=8, misses={"damaged": 1}),
        Stats(steps=10, disk_read=3),  # a fresh one that had as many steps between two looks
        Stats(steps=11, disk_read=4, misses={"damaged": 1}),
    ]
    for stats in life:
        metrics.engine(stats, ready=True)
    text = metrics.text().decode()
    assert value(text, "warmturn_disk_read_bytes_total") == 10 + 8 + 1
    assert value(text, 'warmturn_cache_misses_total{reason="damaged"}') == 2 + 1 + 1


def test_tiers_are_told_by_bytes_and_what_was_loaded_by_tier() -> None:
    metrics = Metrics()
    stats = Stats(disk_bytes=7, disk_bytes_total=9, disk_sessions=2, disk_pending=1, remote_bytes=5)
    stats = msgspec.structs.replace(stats, disk_errors=3, disk_damaged=4)
    metrics.engine(stats, ready=True)
    metrics.admitted(Receipt(100, 90, restored=10, loaded=20))
    metrics.admitted(Receipt(100, 90, loaded=5, fetched=6))
    text = metrics.text().decode()
    for series, expected in (
        ("disk_bytes", 7),
        ("disk_bytes_capacity", 9),
        ("disk_sessions", 2),
        ("disk_pending_sessions", 1),
        ("disk_errors_total", 3),
        ("disk_damaged_files_total", 4),
        ("remote_bytes", 5),
        ("remote_bytes_capacity", 0),
        ('loaded_tokens_total{tier="host"}', 10),
        ('loaded_tokens_total{tier="disk"}', 25),
        ('loaded_tokens_total{tier="remote"}', 6),
    ):
        assert value(text, f"warmturn_{series}") == expected


def test_gauges_are_the_engines_latest() -> None:
    metrics = Metrics()
    metrics.engine(Stats(running=3, waiting=2, pages_device=5, pages_device_total=9, pages_host=1), ready=False)
    text = metrics.text().decode()
    assert value(text, "warmturn_running") == 3
    assert value(text, "warmturn_waiting") == 2
    assert value(text, 'warmturn_pages{tier="device"}') == 5
    assert value(text, 'warmturn_pages_capacity{tier="device"}') == 9
    assert value(text, 'warmturn_pages{tier="host"}') == 1
    assert value(text, "warmturn_engine_ready") == 0


def test_a_turn_has_one_first_token_and_its_deltas_share_their_time() -> None:
    metrics = Metrics()
    watch = metrics.stopwatch(0.0)
    for tokens in ((), (1,), (), (2, 3), (4,)):
        watch.saw(Delta("t", tokens))
    text = metrics.text().decode()
    assert value(text, "warmturn_time_to_first_token_seconds_count") == 1
    assert value(text, "warmturn_inter_token_latency_seconds_count") == 2


@served()
async def test_answers_are_counted_by_route_and_status_and_labels_stay_few(site: Site) -> None:
    await site.chat()
    await site.chat("/v1/sessions/abc/chat/completions", stream=True)
    await site.chat(foo=1)
    for path in ("/nothing", "/other/%2e%2e/x", "/v1/models/unknown-model"):
        await site.http.get(path)
    text = (await site.http.get("/metrics")).text
    for route, status, count in (
        ("/v1/chat/completions", 200, 1),
        ("/v1/chat/completions", 400, 1),
        ("/v1/sessions/{session_id}/chat/completions", 200, 1),
        ("unmatched", 404, 2),
        ("/v1/models/{model}", 404, 1),
    ):
        route = route.replace("{model}", "{model:path}")
        assert value(text, f'warmturn_requests_total{{route="{route}",status="{status}"}}') == count
    assert "abc" not in text
    assert "unknown-model" not in text
    assert value(text, "warmturn_time_to_first_token_seconds_count") == 2
    assert value(text, "warmturn_inter_token_latency_seconds_count") > 2


@served()
async def test_a_client_that_left_is_counted_as_such(site: Site) -> None:
    site.engine.admit.clear()
    call = Call.post(site.app, "/v1/chat/completions", {"messages": HELLO})
    while not site.engine.submitted:
        await asyncio.sleep(0)
    await call.leave()
    text = (await site.http.get("/metrics")).text
    assert value(text, 'warmturn_requests_total{route="/v1/chat/completions",status="499"}') == 1


@served()
async def test_health_is_green_only_while_the_loop_ticks(site: Site) -> None:
    assert (await site.http.get("/health")).json() == {"status": "ok"}
    site.engine.healthy = False
    response = await site.http.get("/health")
    assert (response.status_code, response.json()) == (503, {"status": "stalled"})
    site.engine.facts = None
    response = await site.http.get("/health")
    assert (response.status_code, response.json()) == (503, {"status": "loading"})
    assert int(response.headers["retry-after"]) >= 1


@served()
async def test_the_model_is_listed_with_what_was_measured(site: Site) -> None:
    listed = (await site.http.get("/v1/models")).json()
    single = (await site.http.get("/v1/models/demo")).json()
    assert listed == {"object": "list", "data": [single]}
    assert (single["id"], single["object"]) == ("demo", "model")
    assert isinstance(single["created"], int)
    assert isinstance(single["owned_by"], str)
    assert set(single["warmturn"].pop("chat_template")) == {"prefix_stable", "diverges"}
    assert single["warmturn"] == msgspec.json.decode(msgspec.json.encode(FACTS))


@served()
async def test_the_model_is_listed_while_it_loads(site: Site) -> None:
    site.engine.facts = None
    assert (await site.http.get("/v1/models")).json()["data"][0]["warmturn"] is None


@served()
async def test_the_openapi_document_tells_of_every_route_and_no_422(site: Site) -> None:
    document = (await site.http.get("/openapi.json")).json()
    assert {"/v1/chat/completions", "/v1/completions", "/v1/models", "/health"} <= set(document["paths"])
    assert "422" not in str([operation for path in document["paths"].values() for operation in path.values()])
    assert "stop" in document["components"]["schemas"]["ChatRequest"]["properties"]
