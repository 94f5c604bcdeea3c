"""Traces: what the span of a generation tells, what it never tells, and that there is none unless it was asked for."""

import asyncio
import functools
import json
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
from fake_engine import died
from http_context import HELLO, PATIENCE, Call, Site, site
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from otlp_collector import Collector

from cache.tier import Tier
from scheduler.protocol import FinishReason
from scheduler.turn_receipt import Receipt
from server.engine.engine import TurnRefused
from server.log.database import LogFull
from server.telemetry import traces
from server.telemetry.trace_export import provider

SECRET = "Zanzibar"  # what no span may hold


class Spans:
    """What has been traced, in the order in which it ended."""

    def __init__(self) -> None:
        self._memory = InMemorySpanExporter()
        self.provider = provider(SimpleSpanProcessor(self._memory))

    def all(self) -> list[ReadableSpan]:
        return [*self._memory.get_finished_spans()]

    def generations(self) -> list[dict[str, Any]]:
        """The attributes of those that are no HTTP span."""
        return [dict(span.attributes or {}) for span in self.all() if span.kind is not SpanKind.SERVER]


def traced(test: Callable[[Site, Spans], Awaitable[None]]) -> Callable[[], None]:
    """Make a test of a coroutine function that gets a Site whose spans are kept."""

    @functools.wraps(test)
    def run() -> None:
        async def within() -> None:
            spans = Spans()
            async with site(tracer_provider=spans.provider) as made:
                await asyncio.wait_for(test(made, spans), PATIENCE)

        asyncio.run(within())

    del run.__wrapped__  # its parameters are no fixtures
    return run


@traced
async def test_a_chat_is_one_span_below_its_requests(site: Site, spans: Spans) -> None:
    body = {"messages": [{"role": "user", "content": SECRET}], "temperature": 0.5, "max_tokens": 40, "seed": 7}
    reply = (await site.http.post("/v1/chat/completions", json=body)).json()
    generation, request = spans.all()
    assert (request.kind, request.name) == (SpanKind.SERVER, "POST /v1/chat/completions")
    assert generation.parent is not None
    assert generation.parent.span_id == request.context.span_id
    assert generation.name == "chat demo"
    (told,) = spans.generations()
    assert 0 < told.pop("gen_ai.response.time_to_first_chunk") < PATIENCE
    assert told.pop("warmturn.queue.duration") >= 0
    assert told == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "warmturn",
        "gen_ai.request.model": "demo",
        "gen_ai.request.max_tokens": 40,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.seed": 7,
        "gen_ai.response.id": reply["id"],
        "gen_ai.response.model": "demo",
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.usage.input_tokens": reply["usage"]["prompt_tokens"],
        "gen_ai.usage.output_tokens": reply["usage"]["completion_tokens"],
        "gen_ai.usage.cache_read.input_tokens": 0,
        "warmturn.tenant": "default",
    }
    assert generation.status.status_code is StatusCode.UNSET


@traced
async def test_a_session_is_a_conversation_and_what_it_reused_is_told(site: Site, spans: Spans) -> None:
    path = "/v1/sessions/my-chat/chat/completions"
    await site.chat(path, stream=True)
    loaded = {Tier.HOST: 20, Tier.DISK: 30, Tier.REMOTE: 5}
    site.engine.receipts = [Receipt(100, 90, loaded=loaded, load_seconds=0.25, media=3, encoded=2)]
    site.engine.encoding = 0.75
    await site.chat(path, stream=True)
    first, second = spans.generations()
    assert first["gen_ai.conversation.id"] == second["gen_ai.conversation.id"] == "my-chat"
    assert first["gen_ai.usage.cache_read.input_tokens"] == 0
    assert second["gen_ai.usage.cache_read.input_tokens"] == 90
    assert second["warmturn.cache.host_tokens"] == 20
    assert second["warmturn.cache.disk_tokens"] == 30
    assert second["warmturn.cache.remote_tokens"] == 5
    assert second["warmturn.cache.load.duration"] == 0.25
    assert second["warmturn.media.encoded"] == 2
    assert second["warmturn.media.encode.duration"] == 0.75
    assert not [name for name in first if name.startswith("warmturn.media")]
    assert second["gen_ai.response.finish_reasons"] == ("stop",)


@traced
async def test_choices_are_one_generation(site: Site, spans: Spans) -> None:
    site.engine.receipts = [Receipt(4, cached) for cached in (1, 3, 2, 3)]  # a prompt's second choice reuses its first
    reply = (await site.complete(n=2, max_tokens=2, prompt=["Once", "Twice"])).json()
    (told,) = spans.generations()
    assert told["gen_ai.operation.name"] == "text_completion"
    assert told["gen_ai.request.choice.count"] == 4
    assert told["gen_ai.response.finish_reasons"] == ("length",) * 4
    assert told["gen_ai.usage.input_tokens"] == reply["usage"]["prompt_tokens"]
    assert told["gen_ai.usage.output_tokens"] == 8
    assert told["gen_ai.usage.cache_read.input_tokens"] == 1 + 2
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == 1 + 2


@traced
async def test_no_span_holds_what_was_said(site: Site, spans: Spans) -> None:
    site.engine.reply = f"I like {SECRET}."
    messages = [{"role": "system", "content": SECRET}, {"role": "user", "content": SECRET}]
    extra: dict[str, Any] = {"stop": [SECRET + "!"], "user": SECRET, "metadata": {"about": SECRET}, "store": True}
    assert (await site.chat(messages=messages, **extra)).status_code == 200
    assert (await site.chat(messages=messages, foo=SECRET)).status_code == 400
    assert (await site.http.get(f"/v1/models?key={SECRET}&empty=")).status_code == 400
    assert (await site.http.post("/v1/responses", json={"input": SECRET})).status_code == 200
    assert len(spans.all()) == 6
    for span in spans.all():
        assert SECRET not in span.to_json()
    query = next(
        span.attributes["url.query"] for span in spans.all() if span.attributes and "url.query" in span.attributes
    )
    assert query == "key=REDACTED&empty=REDACTED"


@traced
async def test_probes_are_not_traced(site: Site, spans: Spans) -> None:
    for path in ("/health", "/health/live", "/metrics"):
        assert (await site.http.get(path)).status_code == 200
    assert spans.all() == []


@traced
async def test_the_callers_trace_goes_on(site: Site, spans: Spans) -> None:
    trace_id, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    await site.chat(headers={"traceparent": f"00-{trace_id}-{parent}-01"})
    generation, request = spans.all()
    assert f"{generation.context.trace_id:032x}" == f"{request.context.trace_id:032x}" == trace_id
    assert request.parent is not None
    assert f"{request.parent.span_id:016x}" == parent


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("ends", "error"),
    [(died(), "engine_died"), (FinishReason.ERROR, "engine_error"), (FinishReason.CANCELLED, "session_deleted")],
)
def test_a_turn_that_fails_is_an_error(stream: bool, ends: FinishReason | Exception, error: str) -> None:
    @traced
    async def run(site: Site, spans: Spans) -> None:
        site.engine.ends_badly = ends
        await site.chat(stream=stream)
        (told,) = spans.generations()
        assert told["error.type"] == error
        (span,) = (span for span in spans.all() if span.kind is not SpanKind.SERVER)
        assert span.status.status_code is StatusCode.ERROR
        assert told["gen_ai.usage.output_tokens"] == 2
        assert told["gen_ai.response.finish_reasons"] == ()

    run()


@traced
async def test_a_refused_turn_is_an_error(site: Site, spans: Spans) -> None:
    site.engine.refuse_from = 0
    site.engine.refusal = TurnRefused("queue_full", "Full.", 1)
    assert (await site.chat()).status_code == 429
    (told,) = spans.generations()
    assert told["error.type"] == "queue_full"


@traced
async def test_a_turn_that_cannot_be_kept_is_an_error(site: Site, spans: Spans) -> None:
    async def full(*_: object, **__: object) -> None:
        raise LogFull("no room")

    site.log.commit = full  # type: ignore[method-assign,assignment]
    assert (await site.chat("/v1/sessions/s/chat/completions")).status_code == 507
    (told,) = spans.generations()
    assert told["error.type"] == "insufficient_storage"
    assert told["gen_ai.response.finish_reasons"] == ("stop",)


@traced
async def test_a_client_that_left_has_cancelled(site: Site, spans: Spans) -> None:
    site.engine.pause_after = 1
    call = Call.post(site.app, "/v1/chat/completions", {"messages": HELLO, "stream": True})
    await call.until(lambda: b"data:" in call.body)
    await call.leave()
    (told,) = spans.generations()
    assert told["error.type"] == "cancelled"


@pytest.mark.wide
def test_without_a_provider_nothing_is_traced_and_no_exporter_is_imported() -> None:
    code = (
        "import sys, server.app, server.serve; from opentelemetry import trace\n"
        "from server.telemetry import traces; from scheduler.protocol import Submit\n"
        "assert traces.provider_of_environment() is None\n"
        "span = traces.generation(traces.tracer(), 'chat', 'm', 's', Submit('t', 'a', b''), 1)\n"
        "assert not span.is_recording()\n"
        "print([name for name in sys.modules if name.startswith(('opentelemetry.sdk', 'opentelemetry.exporter'))])\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(found.stdout.replace("'", '"')) == []


ON = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        ({}, None),
        ({**ON, "OTEL_SDK_DISABLED": "true"}, None),
        ({**ON, "OTEL_TRACES_EXPORTER": "none"}, None),
        ({**ON, "OTEL_TRACES_EXPORTER": "zipkin"}, "http/protobuf"),
        ({**ON, "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "http/protobuf"),
        (
            {**ON, "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "grpc"},
            "http/protobuf",
        ),
    ],
)
def test_where_the_environment_asks_for_nothing_nothing_is_sent(
    variables: dict[str, str],
    told: str | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert traces.provider_of_environment() is None
    assert len(caplog.messages) == (told is not None)
    assert told is None or told in caplog.text


def test_a_missing_exporter_is_told_and_the_server_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://127.0.0.1:9/v1/traces")
    monkeypatch.setitem(sys.modules, "server.telemetry.trace_export", None)
    assert traces.provider_of_environment() is None
    assert "[otel]" in caplog.text


# --- over the wire ----------------------------------------------------------------------------------------------


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    with Collector() as made:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", made.url)
        monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
        yield made


def chatted() -> None:
    """One chat with an app that lives as long."""

    async def run() -> None:
        async with site() as made, made.app.router.lifespan_context(made.app):
            assert (await made.chat("/v1/sessions/s/chat/completions")).status_code == 200

    asyncio.run(asyncio.wait_for(run(), PATIENCE))


def test_a_collector_is_sent_the_last_spans_when_the_server_ends(collector: Collector) -> None:
    chatted()
    assert {path for path, _ in collector.requests} == {"/v1/traces"}
    spans = {span.name: span for _, span in collector.spans()}
    generation = spans["chat demo"]
    assert generation.parent_span_id == spans["POST /v1/sessions/{session_id}/chat/completions"].span_id
    told = {item.key: item.value for item in generation.attributes}
    assert told["gen_ai.conversation.id"].string_value == "s"
    assert told["gen_ai.usage.input_tokens"].int_value > 0
    assert [item.string_value for item in told["gen_ai.response.finish_reasons"].array_value.values] == ["stop"]
    about = collector.spans()[0][0]
    assert about["service.name"] == "warmturn"
    assert about["deployment.environment.name"] == "test"


def test_the_service_has_the_name_that_it_was_given(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "replica-7")
    chatted()
    assert {about["service.name"] for about, _ in collector.spans()} == {"replica-7"}


def test_a_collector_that_hangs_does_not_hold_the_servers_end(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traces, "CLOSE_SECONDS", 0.05)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "60000")
    collector.open.clear()  # until the app has ended
    chatted()
    assert collector.requests == []
