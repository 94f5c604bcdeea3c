"""Log records with the context of their request, the access line of each request, and lines for the terminal."""

from __future__ import annotations

import logging
import sys
import time
from contextvars import ContextVar

from opentelemetry import trace
from starlette.types import Scope

from scheduler.logs import ACCESS, JSON, TEXT, fields_of
from scheduler.logs import adopt as adopt_libraries
from scheduler.logs import configure as configure_lines
from server.log.identity import SESSION_ID

PROBES = frozenset({"/health", "/health/live", "/metrics"})  # asked every few seconds: told only to who debugs
TEXT_LINE = "%(asctime)s %(levelname)s %(message)s"

access = logging.getLogger(ACCESS)
server = logging.getLogger("warmturn.server")
_about: ContextVar[dict[str, object] | None] = ContextVar("about", default=None)
_form = TEXT


def configure(form: str, level: str) -> None:
    """Configure logging in this process: see ``scheduler.logs.configure``."""
    global _form
    _form = form
    configure_lines(form, level, TEXT_LINE, ContextFilter())


def adopt() -> None:
    """In JSON format, send the records of libraries that install handlers of their own to ours."""
    if _form == JSON:
        adopt_libraries()


def say(text: str, level: int = logging.INFO, *, result: bool = False) -> None:
    """Print a line for the person at the terminal, on standard output if it is a ``result``; in JSON format, log a
    record of ``level``.
    """
    if _form == JSON:
        server.log(level, "%s", text)
    else:
        print(f"warmturn: {text}", file=sys.stdout if result else sys.stderr, flush=True)


def begin(request_id: str) -> None:
    """Set the request id of this task and of tasks that it starts, for their log records."""
    _about.set({"request_id": request_id})


def note(**fields: object) -> None:
    """Add fields to later log records of this request and to its access line. Must not contain the client's text, but
    for session ids.
    """
    about = _about.get()
    if about is not None:
        about.update(fields)


def log_access(scope: Scope, route: str, status: int) -> None:
    """Log the access line of a request; status 0: the client disconnected before an answer."""
    level = logging.DEBUG if route in PROBES and status < 400 else logging.INFO
    if not access.isEnabledFor(level):
        return
    state = scope.get("state", {})
    named = scope.get("path_params", {}).get("session_id", "")
    if SESSION_ID.match(named):
        note(session=named)
    fields = {
        "method": scope["method"],
        "route": route,
        "status": status,
        "ms": round(1000 * (time.perf_counter() - state["started"]), 1),
        "tenant": state.get("tenant"),
    }
    access.log(level, "%s %s %d", scope["method"], route, status, extra={"fields": fields})


class ContextFilter(logging.Filter):
    """Adds the current request's fields and trace to every log record."""

    def filter(self, record: logging.LogRecord) -> bool:
        about = _about.get()
        if about is not None:
            context = trace.get_current_span().get_span_context()
            traced = {"trace_id": trace.format_trace_id(context.trace_id)} if context.is_valid else {}
            record.fields = {**fields_of(record), **about, **traced}
        return True
