"""A collector of OpenTelemetry's protocol over HTTP, for tests: it keeps the spans that it is sent."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class Collector(ThreadingHTTPServer):
    """Listens while it is a context; while ``open`` is not set it answers nobody."""

    daemon_threads = True

    def __init__(self) -> None:
        self.requests: list[tuple[str, ExportTraceServiceRequest]] = []  # with their paths
        self.open = threading.Event()
        self.open.set()
        super().__init__(("127.0.0.1", 0), _Received)

    def __enter__(self) -> Collector:
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.open.set()
        self.shutdown()
        self.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def spans(self) -> list[tuple[dict[str, str], Span]]:
        """Every span, with the attributes of who sent it."""
        found = []
        for _, request in self.requests:
            for sent in request.resource_spans:
                about = {item.key: item.value.string_value for item in sent.resource.attributes}
                found += [(about, span) for scope in sent.scope_spans for span in scope.spans]
        return found


class _Received(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.open.wait()
        self.server.requests.append((self.path, ExportTraceServiceRequest.FromString(body)))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing."""
