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
    """How this process logs from now on: see ``scheduler.logs.configure``."""
    global _form
    _form = form
    configure_lines(form, level, TEXT_LINE, ContextFilter())


def adopt() -> None:
    """Libraries were imported that log by themselves: where a program reads, their records are to go where ours go."""
    if _form == JSON:
        adopt_libraries()


def say(text: str, level: int = logging.INFO, *, result: bool = False) -> None:
    """A line for the person at the terminal, on standard output where it is a ``result``; where a program reads, a
    record of this ``level``."""
    if _form == JSON:
        server.log(level, "%s", text)
    else:
        print(f"warmturn: {text}", file=sys.stdout if result else sys.stderr, flush=True)


def begin(request_id: str) -> None:
    """From here on this task, and those it starts, answer this request: their records tell its id."""
    _about.set({"request_id": request_id})


def note(**fields: object) -> None:
    """More about the request that is being answered, for its later records and its line: no text of the client's but a
    session's id."""
    about = _about.get()
    if about is not None:
        about.update(fields)


def answered(scope: Scope, route: str, status: int) -> None:
    """The one line of a request, as its answer is over; status 0: the client left before there was one."""
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
    """Adds to every record what is known of the request in whose task it was made, and of its trace."""

    def filter(self, record: logging.LogRecord) -> bool:
        about = _about.get()
        if about is not None:
            context = trace.get_current_span().get_span_context()
            traced = {"trace_id": trace.format_trace_id(context.trace_id)} if context.is_valid else {}
            record.fields = {**fields_of(record), **about, **traced}
        return True
