"""Logging to standard error, as text or JSON lines. All processes of a server use it."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Mapping
from types import TracebackType

TEXT, JSON = "text", "json"
ACCESS = "warmturn.access"  # one record per request
OURS = "warmturn"  # above all our loggers
NO_PROGRESS_BARS = "HF_HUB_DISABLE_PROGRESS_BARS"  # read when huggingface_hub is imported; transformers obeys it too
LIBRARIES = ("transformers", "huggingface_hub")  # they have handlers of their own


def fields_of(record: logging.LogRecord) -> Mapping[str, object]:
    """What a record tells beside its message: set as ``extra={"fields": ...}`` or by a filter."""
    fields: Mapping[str, object] = getattr(record, "fields", {})
    return fields


class TextLines(logging.Formatter):
    """A line for a person; the fields follow the message as ``name=value``."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        told = " ".join(f"{name}={value}" for name, value in fields_of(record).items() if value is not None)
        return f"{super().formatMessage(record)} {told}".rstrip()


class JsonLines(logging.Formatter):
    """One JSON object a line: time (UTC), level, logger, message, the fields, and the traceback of an exception."""

    def format(self, record: logging.LogRecord) -> str:
        when = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        entry: dict[str, object] = {
            "time": f"{when}.{int(record.msecs):03}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        entry |= {name: value for name, value in fields_of(record).items() if value is not None}
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


def configure(form: str, level: str, text: str, about: logging.Filter | None = None) -> None:
    """Write this process's records from ``level`` on (of libraries only warnings and errors) as ``form``: text, where
    the format ``text`` says how a line looks, or json. ``about`` may add fields.

    A person at a terminal is not told of every request unless the level is debug. With json, what would be printed as
    text by others (uncaught exceptions, Python's warnings, libraries' records) becomes records too.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if form == JSON else TextLines(text))
    if about is not None:
        handler.addFilter(about)
    threshold = logging.getLevelNamesMapping()[level.upper()]
    logging.basicConfig(handlers=[handler], level=max(threshold, logging.WARNING))
    logging.getLogger(OURS).setLevel(threshold)
    if form == TEXT and threshold > logging.DEBUG:
        logging.getLogger(ACCESS).setLevel(max(threshold, logging.WARNING))
    if form == JSON:
        os.environ.setdefault(NO_PROGRESS_BARS, "1")
        logging.captureWarnings(True)
        sys.excepthook = _uncaught
        adopt()


def adopt() -> None:
    """Let libraries' records go where ours go; again after an import that has given them handlers."""
    for name in LIBRARIES:
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True


def _uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    logging.getLogger(OURS).critical("the process ends by an exception", exc_info=(kind, error, trace))
