"""Export of spans with OpenTelemetry's SDK, which is imported only when tracing is on."""

from __future__ import annotations

from urllib.parse import parse_qsl, urlencode

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import Span, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from server import __version__

NAME = "warmturn"


class NoQueryValues(SpanProcessor):
    """Removes the values of query parameters from spans; only the names are exported."""

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        query = (span.attributes or {}).get("url.query")
        if isinstance(query, str):
            names = [name for name, _ in parse_qsl(query, keep_blank_values=True)]
            span.set_attribute("url.query", urlencode([(name, "REDACTED") for name in names]))


def provider(*processors: SpanProcessor) -> TracerProvider:
    """A tracer provider with ``processors``. ``OTEL_SERVICE_NAME`` or ``OTEL_RESOURCE_ATTRIBUTES`` set the service name
    (default: warmturn), ``OTEL_TRACES_SAMPLER`` the sampling.
    """
    named = {"service.name": NAME, "service.version": __version__} | dict(OTELResourceDetector().detect().attributes)
    made = TracerProvider(resource=Resource.create(named), shutdown_on_exit=False)
    for processor in (NoQueryValues(), *processors):
        made.add_span_processor(processor)
    return made


def otlp() -> TracerProvider:
    """A provider that exports spans in batches on a thread of its own, as set by ``OTEL_EXPORTER_OTLP_*`` and
    ``OTEL_BSP_*``.
    """
    return provider(BatchSpanProcessor(OTLPSpanExporter()))
