"""/metrics, /health and /v1/models: what probes and dashboards see."""

import os
import time

import msgspec
import pytest
from fake_engine import FACTS
from http_context import HELLO, PATIENCE, Call, Site, served, until
from prometheus_client.parser import text_string_to_metric_families

from cache.tier import Tier, TierStats
from scheduler.engine_stats import Stats
from scheduler.protocol import Delta, FinishReason
from scheduler.turn_receipt import Receipt
from server.schemas.objects import MissReason
from server.telemetry.metric_types import Histogram
from server.telemetry.metrics import PREFIX, Metrics
from server.telemetry.vllm_names import MORE, SAME, VllmNames


def value(text: str, series: str) -> float:
    """The value of one series, labels included in its name."""
    (line,) = [line for line in text.splitlines() if line.rpartition(" ")[0] == series]
    return float(line.rpartition(" ")[2])


def after_evictions(sessions: int) -> dict[Tier, TierStats]:
    """Tiers of which the device has evicted so many."""
    return {Tier.DEVICE: TierStats(evictions=sessions)}


def test_counters_survive_an_engine_restart() -> None:
    metrics = Metrics()
    life = [
        Stats(
            1,
            prompt_tokens=10,
            cached_tokens=4,
            generated_tokens=5,
            steps=7,
            disk_written=100,
            tiers=after_evictions(1),
        ),
        Stats(
            1,
            prompt_tokens=15,
            cached_tokens=4,
            generated_tokens=9,
            steps=9,
            disk_written=150,
            tiers=after_evictions(2),
        ),
        Stats(
            2,
            prompt_tokens=3,
            cached_tokens=1,
            generated_tokens=2,
            steps=2,
            disk_written=7,
            tiers=after_evictions(1),
        ),
        Stats(
            2,
            prompt_tokens=3,
            cached_tokens=1,
            generated_tokens=2,
            steps=2,
            disk_written=7,
            tiers=after_evictions(1),
        ),
    ]
    for stats, evicted in zip(life, (2, 3, 1, 1), strict=True):
        stats = msgspec.structs.replace(stats, misses={"evicted": evicted})
        metrics.engine(stats, ready=True)
    text = metrics.text().decode()
    assert value(text, "warmturn_prompt_tokens_total") == 18
    assert value(text, "warmturn_cached_tokens_total") == 5
    assert value(text, "warmturn_generated_tokens_total") == 11
    assert value(text, "warmturn_steps_total") == 11
    assert value(text, "warmturn_disk_written_bytes_total") == 157
    assert value(text, 'warmturn_cache_misses_total{reason="evicted"}') == 4
    assert value(text, 'warmturn_evictions_total{tier="device"}') == 3
    assert value(text, "warmturn_engine_restarts_total") == 1


def test_nothing_is_taken_back() -> None:
    metrics = Metrics()
    life = [
        Stats(pid=5, steps=5, disk_read=10, misses={"damaged": 2}),
        Stats(),  # no engine
        Stats(),
        Stats(pid=6, steps=9, disk_read=8, misses={"damaged": 1}),
        Stats(pid=7, steps=10, disk_read=30),  # a fresh one that has counted more between two looks
        Stats(pid=7, steps=11, disk_read=40, misses={"damaged": 1}),
    ]
    for stats in life:
        text = metrics.text().decode()  # a look in between changes nothing
        metrics.engine(stats, ready=True)
    text = metrics.text().decode()
    assert value(text, "warmturn_disk_read_bytes_total") == 10 + 8 + 40
    assert value(text, 'warmturn_cache_misses_total{reason="damaged"}') == 2 + 1 + 1
    assert value(text, "warmturn_engine_restarts_total") == 2


def test_tiers_are_told_by_bytes_and_what_was_reused_by_tier() -> None:
    metrics = Metrics()
    tiers = {Tier.HOST: TierStats(evictions=1), Tier.DISK: TierStats(7, 28), Tier.REMOTE: TierStats(5)}
    stats = Stats(tiers=tiers, disk_sessions=2, disk_pending=1)
    stats = msgspec.structs.replace(stats, disk_errors=3, disk_failing=1, disk_damaged=4, disk_saves=6)
    metrics.engine(stats, ready=True)
    metrics.stopwatch(0.0).saw(
        Delta("t", receipt=Receipt(100, 90, loaded={Tier.HOST: 10, Tier.DISK: 20}, load_seconds=0.2))
    )
    metrics.stopwatch(0.0).saw(
        Delta("t", receipt=Receipt(100, 90, loaded={Tier.DISK: 5, Tier.REMOTE: 6}, load_seconds=0.3))
    )
    metrics.stopwatch(0.0).saw(Delta("t", receipt=Receipt(100, 3)))
    text = metrics.text().decode()
    for series, expected in (
        ("disk_bytes", 7),
        ("disk_bytes_capacity", 28),
        ('kv_cache_usage_ratio{tier="disk"}', 0.25),
        ("disk_sessions", 2),
        ("disk_pending_sessions", 1),
        ("disk_errors_total", 3),
        ("disk_failing", 1),
        ("disk_damaged_files_total", 4),
        ("remote_bytes", 5),
        ("remote_bytes_capacity", 0),
        ("session_saves_total", 6),
        ('evictions_total{tier="host"}', 1),
        ('prompt_tokens_cached_total{tier="device"}', 60 + 79 + 3),
        ('prompt_tokens_cached_total{tier="host"}', 10),
        ('prompt_tokens_cached_total{tier="disk"}', 25),
        ('prompt_tokens_cached_total{tier="remote"}', 6),
        ('session_restores_total{tier="host"}', 1),
        ('session_restores_total{tier="disk"}', 2),
        ('session_restores_total{tier="remote"}', 1),
        ("session_restore_seconds_count", 2),
        ("session_restore_seconds_sum", 0.5),
        ("request_prompt_tokens_sum", 300),
    ):
        assert value(text, f"warmturn_{series}") == expected
    assert 'kv_cache_usage_ratio{tier="remote"}' not in text  # it has no limit


def test_gauges_are_the_engines_latest() -> None:
    metrics = Metrics()
    metrics.engine(
        Stats(running=3, waiting=2, tiers={Tier.DEVICE: TierStats(5, 9), Tier.HOST: TierStats(1)}), ready=False
    )
    text = metrics.text().decode()
    assert value(text, "warmturn_running") == 3
    assert value(text, "warmturn_waiting") == 2
    assert value(text, 'warmturn_pages{tier="device"}') == 5
    assert value(text, 'warmturn_pages_capacity{tier="device"}') == 9
    assert value(text, 'warmturn_pages{tier="host"}') == 1
    assert value(text, 'warmturn_kv_cache_usage_ratio{tier="device"}') == 5 / 9
    assert value(text, "warmturn_engine_ready") == 0


def test_both_processes_are_looked_at_where_there_are_any() -> None:
    metrics = Metrics()
    assert "warmturn_engine_process_resident_memory_bytes" not in metrics.text().decode()
    metrics.engine(Stats(pid=os.getppid()), ready=True)
    text = metrics.text().decode()
    assert value(text, "process_resident_memory_bytes") > 0
    assert value(text, "warmturn_engine_process_resident_memory_bytes") > 0


def test_a_turn_has_one_first_token_and_its_deltas_share_their_time() -> None:
    metrics = Metrics()
    watch = metrics.stopwatch(0.0)
    for tokens in ((), (1,), (), (2, 3), (4,)):
        watch.saw(Delta("t", tokens))
    text = metrics.text().decode()
    assert value(text, "warmturn_time_to_first_token_seconds_count") == 1
    assert value(text, "warmturn_inter_token_latency_seconds_count") == 2


def test_how_long_a_reply_was_written_is_told_by_the_engines_clock() -> None:
    watch = Metrics().stopwatch(0.0)
    for number in range(3):  # heard of at once
        watch.saw(Delta("t", (number,)), 100.0 + number)
    assert watch.decode == 2.0


def test_the_times_of_a_turn_are_those_of_its_parts() -> None:
    metrics = Metrics()
    watch = metrics.stopwatch(time.perf_counter() - 7)
    watch.saw(
        Delta("t", receipt=Receipt(12, 3, admitted=time.monotonic() + 20))
    )  # its clock is ahead: no time is negative
    watch.saw(Delta("t", (1,)))
    watch.saw(Delta("t", (2, 3), finish_reason=FinishReason.STOP))
    watch.end(FinishReason.CANCELLED)  # who comes later tells nothing new
    text = metrics.text().decode()
    assert 7 <= value(text, "warmturn_time_to_first_token_seconds_sum") < 7 + PATIENCE
    assert 7 <= value(text, "warmturn_e2e_request_latency_seconds_sum") < 7 + PATIENCE
    assert 19 <= value(text, "warmturn_request_queue_time_seconds_sum") < 20 + PATIENCE
    assert value(text, "warmturn_request_prefill_time_seconds_sum") == 0
    assert 0 <= value(text, "warmturn_request_decode_time_seconds_sum") < PATIENCE
    assert value(text, "warmturn_request_generation_tokens_sum") == 3
    assert value(text, 'warmturn_turns_total{finish_reason="stop"}') == 1
    assert value(text, 'warmturn_turns_total{finish_reason="cancelled"}') == 0


def test_a_turn_that_was_never_admitted_is_none() -> None:
    metrics = Metrics()
    metrics.stopwatch(0.0).end(FinishReason.ERROR)
    text = metrics.text().decode()
    assert value(text, 'warmturn_turns_total{finish_reason="error"}') == 0
    assert value(text, "warmturn_request_generation_tokens_count") == 0


def test_a_turn_of_a_session_hits_its_past_or_misses_it_for_a_reason() -> None:
    metrics = Metrics()
    metrics.count_commit(0, None)
    metrics.count_commit(0, MissReason.EDITED_HISTORY)  # up to there nothing was computed again
    metrics.count_commit(9, MissReason.EVICTED)
    metrics.count_commit(9, None)
    text = metrics.text().decode()
    assert value(text, "warmturn_session_hits_total") == 2
    assert value(text, 'warmturn_session_misses_total{reason="evicted"}') == 1
    assert value(text, 'warmturn_session_misses_total{reason="recomputed"}') == 1
    assert value(text, 'warmturn_session_misses_total{reason="edited_history"}') == 0


@pytest.mark.parametrize(
    ("seen", "expected"),
    [(0.0, (1, 1, 1)), (0.5, (1, 1, 1)), (0.6, (0, 1, 1)), (2.0, (0, 1, 1)), (2.1, (0, 0, 1)), (1e9, (0, 0, 1))],
)
def test_a_bucket_holds_what_is_no_more_than_its_bound(seen: float, expected: tuple[int, ...]) -> None:
    distribution = Histogram("x", "of something", (0.5, 2))
    distribution.observe(seen)
    samples = {sample.labels.get("le", sample.name): sample.value for sample in distribution.family().samples}
    assert tuple(samples[bound] for bound in ("0.5", "2.0", "+Inf")) == expected
    assert (samples["x_count"], samples["x_sum"]) == (1, seen)


def test_the_page_is_what_prometheus_reads() -> None:
    metrics = Metrics()
    metrics.model('a \\ "name"\n', FACTS)
    families = {family.name: family for family in text_string_to_metric_families(metrics.text().decode())}
    assert families["warmturn_time_to_first_token_seconds"].type == "histogram"
    assert families["warmturn_requests"].type == "counter"
    (info,) = families["warmturn_model_info"].samples
    assert info.labels["model"] == 'a \\ "name"\n'
    assert info.labels["mode"] == FACTS.mode


def test_vllms_names_show_the_same_figures() -> None:
    metrics = Metrics()
    metrics.registry.register(VllmNames(metrics, "some/model"))
    metrics.model("some/model", FACTS)
    stats = Stats(running=3, waiting=2, tiers={Tier.DEVICE: TierStats(5, 20), Tier.HOST: TierStats(9, 10)})
    metrics.engine(msgspec.structs.replace(stats, prompt_tokens=30, cached_tokens=20, generated_tokens=7), ready=True)
    watch = metrics.stopwatch(0.0)
    watch.saw(Delta("t", receipt=Receipt(12, 3)))
    watch.saw(Delta("t", (1,), finish_reason=FinishReason.LENGTH))
    text = metrics.text().decode()
    labels = 'engine="0",model_name="some/model"'
    for name, expected in (
        ("num_requests_running", 3),
        ("num_requests_waiting", 2),
        ("kv_cache_usage_perc", 0.25),
        ("prompt_tokens_total", 30),
        ("prefix_cache_queries_total", 30),
        ("prefix_cache_hits_total", 20),
        ("generation_tokens_total", 7),
        ("time_to_first_token_seconds_count", 1),
        ("e2e_request_latency_seconds_count", 1),
        ("request_prompt_tokens_sum", 12),
    ):
        assert value(text, f"vllm:{name}{{{labels}}}") == expected
    assert value(text, 'vllm:request_success_total{engine="0",finished_reason="length",model_name="some/model"}') == 1
    assert (
        value(
            text,
            f'vllm:time_to_first_token_seconds_bucket{{{labels},le="+Inf"}}'.replace(
                f'{labels},le="+Inf"', 'engine="0",le="+Inf",model_name="some/model"'
            ),
        )
        == 1
    )
    assert 'vllm:cache_config_info{block_size="16",engine="0",model_name="some/model",num_gpu_blocks="128"} 1.0' in text
    missing = {*SAME, *MORE} - {family.name.removeprefix(PREFIX) for family in metrics.collect()}
    assert not missing


@served()
async def test_vllms_names_are_shown_only_where_that_was_asked_for(site: Site) -> None:
    assert "vllm:" not in (await site.http.get("/metrics")).text


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
    await until(lambda: site.engine.submitted)
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
async def test_a_server_is_dead_only_when_its_engine_hangs(site: Site) -> None:
    assert (await site.http.get("/health/live")).json() == {"status": "ok"}
    assert (await site.http.head("/health/live")).status_code == 200
    site.engine.healthy = False
    response = await site.http.get("/health/live")
    assert (response.status_code, response.json()) == (503, {"status": "stalled"})
    site.engine.facts = None  # a fresh engine loads
    assert (await site.http.get("/health")).status_code == 503
    assert (await site.http.get("/health/live")).status_code == 200


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
