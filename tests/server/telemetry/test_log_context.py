"""The log: records as lines, one line per request, and what never stands in it."""

import asyncio
import io
import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from fake_engine import died
from http_context import HELLO, Call, Site, demo_tokens, served, until

from scheduler.logs import JsonLines, TextLines
from server.telemetry.log_context import ContextFilter, access

SECRET = "Zanzibar"


class Lines:
    """What our loggers have written as JSON."""

    def __init__(self) -> None:
        self.out = io.StringIO()

    def all(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.getvalue().splitlines()]

    def requests(self) -> list[dict[str, Any]]:
        """Those that are one request's each, without what differs from run to run."""
        found = [line for line in self.all() if line["logger"] == access.name]
        return [{name: value for name, value in line.items() if name not in ("time", "logger")} for line in found]


@contextmanager
def listening(level: int = logging.INFO) -> Iterator[Lines]:
    lines = Lines()
    handler = logging.StreamHandler(lines.out)
    handler.setFormatter(JsonLines())
    handler.addFilter(ContextFilter())
    ours = logging.getLogger("warmturn")
    before = [(logger, logger.level) for logger in (ours, access)]
    ours.addHandler(handler)
    for logger, _ in before:
        logger.setLevel(level)
    try:
        yield lines
    finally:
        ours.removeHandler(handler)
        for logger, was in before:
            logger.setLevel(was)


@served()
async def test_a_chat_is_one_line_with_what_it_cost(site: Site) -> None:
    with listening() as lines:
        reply = await site.chat("/v1/sessions/my-chat/chat/completions", headers={"x-request-id": "r-1"}, stream=True)
    (line,) = lines.requests()
    assert reply.status_code == 200
    assert line.pop("ms") >= line.pop("first_token_ms") > 0
    assert line.pop("turn") == site.engine.submitted[0].turn
    assert line == {
        "level": "info",
        "message": "POST /v1/sessions/{session_id}/chat/completions 200",
        "method": "POST",
        "route": "/v1/sessions/{session_id}/chat/completions",
        "status": 200,
        "tenant": "default",
        "request_id": "r-1",
        "session": "my-chat",
        "prompt_tokens": len(site.engine.submitted[0].prompt) // 4,
        "cached_tokens": 0,
        "completion_tokens": len(demo_tokens().encode(site.engine.reply, special=False)) + 1,
    }


@served({"ann": "secret-key-of-ann"})
async def test_every_request_is_one_line_and_nothing_of_what_it_said(site: Site) -> None:
    ours = {"authorization": "Bearer secret-key-of-ann"}
    with listening() as lines:
        await site.chat(headers=ours, messages=[{"role": "user", "content": SECRET}], user=SECRET)
        await site.chat(headers=ours, foo=SECRET)
        await site.chat(headers={"authorization": f"Bearer {SECRET}"})
        await site.http.get(f"/v1/models?{SECRET}={SECRET}", headers=ours)
        await site.http.get(f"/{SECRET}", headers=ours)
        await site.http.get("/v1/sessions/s-1", headers=ours)
        await site.http.get(f"/v1/sessions/{SECRET}%0Aevil", headers=ours)
    assert [(line["route"], line["status"], line.get("tenant")) for line in lines.requests()] == [
        ("/v1/chat/completions", 200, "ann"),
        ("/v1/chat/completions", 400, "ann"),
        ("unmatched", 401, None),
        ("/v1/models", 400, "ann"),
        ("unmatched", 404, "ann"),
        ("/v1/sessions/{session_id}", 404, "ann"),
        ("/v1/sessions/{session_id}", 400, "ann"),
    ]
    assert [line.get("session") for line in lines.requests()[-2:]] == ["s-1", None]
    assert len({line["request_id"] for line in lines.requests()}) == 7
    assert SECRET not in lines.out.getvalue()
    assert "secret-key" not in lines.out.getvalue()


@served()
async def test_probes_are_told_only_to_who_debugs_unless_they_fail(site: Site) -> None:
    with listening() as lines:
        await site.http.get("/health")
        await site.http.get("/metrics")
        site.engine.healthy = False
        await site.http.get("/health")
    assert [(line["route"], line["status"]) for line in lines.requests()] == [("/health", 503)]
    with listening(logging.DEBUG) as lines:
        await site.http.get("/metrics")
    assert [(line["route"], line["level"]) for line in lines.requests()] == [("/metrics", "debug")]


@served()
async def test_a_turn_that_fails_says_how(site: Site) -> None:
    site.engine.ends_badly = died()
    with listening() as lines:
        await site.chat(stream=True)
    assert [(line["status"], line["error"], line["completion_tokens"]) for line in lines.requests()] == [
        (200, "engine_died", 2)
    ]


@served()
async def test_a_client_that_left_is_a_line_too(site: Site) -> None:
    site.engine.pause_after = 1
    with listening() as lines:
        call = Call.post(site.app, "/v1/chat/completions", {"messages": HELLO})
        await until(lambda: site.engine.submitted)
        await call.leave()
    assert [(line["status"], line["error"]) for line in lines.requests()] == [(499, "cancelled")]


@served()
async def test_a_record_tells_whose_request_it_is_about(site: Site) -> None:
    site.engine.ends_badly = ValueError("a bug")
    with listening() as lines:
        first = site.chat("/v1/sessions/one/chat/completions", headers={"x-request-id": "r-1"}, stream=True)
        second = site.chat("/v1/sessions/two/chat/completions", headers={"x-request-id": "r-2"}, stream=True)
        await asyncio.gather(first, second)
        logging.getLogger("warmturn.x").warning("about no request")
    failed = [line for line in lines.all() if line["message"] == "a stream failed"]
    assert {(line["request_id"], line["session"]) for line in failed} == {("r-1", "one"), ("r-2", "two")}
    assert all("ValueError: a bug" in line["traceback"] for line in failed)
    assert lines.all()[-1].keys() == {"time", "level", "logger", "message"}


def record(message: str, fields: dict[str, object] | None = None) -> logging.LogRecord:
    made = logging.LogRecord("warmturn.x", logging.WARNING, "", 0, message, (), None)
    made.created, made.msecs = 1764547200.25, 250.0
    made.fields = fields or {}
    return made


def test_a_record_is_one_line_of_json_whatever_it_says() -> None:
    told = "two\nlines, \ud800 and \u2028"
    line = JsonLines().format(record(told, {"request_id": "r", "n": 3, "absent": None, "odd": {1}}))
    assert len(line.splitlines()) == 1
    assert json.loads(line.encode("ascii")) == {
        "time": "2025-12-01T00:00:00.250Z",
        "level": "warning",
        "logger": "warmturn.x",
        "message": told,
        "request_id": "r",
        "n": 3,
        "odd": "{1}",
    }


def test_a_line_for_people_ends_with_what_is_known() -> None:
    lines = TextLines("%(levelname)s %(message)s")
    assert lines.format(record("said", {"request_id": "r", "absent": None, "n": 3})) == "WARNING said request_id=r n=3"
    assert lines.format(record("said")) == "WARNING said"


TALK = """
import logging, sys, warnings
from server.telemetry import log_context
log_context.configure(*sys.argv[1:])
for name in ("warmturn.access", "warmturn.engine", "httpx"):
    logger = logging.getLogger(name)
    logger.debug("d"), logger.info("i"), logger.warning("w"), logger.error("e")
log_context.say("for people")
log_context.say("a result", result=True)
log_context.say("a fault", logging.ERROR)
warnings.warn("old")
library = logging.getLogger("transformers")
library.addHandler(logging.StreamHandler())
library.propagate = False
log_context.adopt()
library.error("of a library")
raise ValueError("unexpected")
"""


def talk(form: str, level: str) -> tuple[str, list[str]]:
    """Standard output, and the lines of standard error, of a process that logs so."""
    command = [sys.executable, "-c", TALK, form, level]
    said = subprocess.run(command, capture_output=True, text=True, check=False)
    return said.stdout, said.stderr.splitlines()


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("debug", {"warmturn.access": "diwe", "warmturn.engine": "diwe", "httpx": "we"}),
        ("info", {"warmturn.access": "iwe", "warmturn.engine": "iwe", "httpx": "we"}),
        ("error", {"warmturn.access": "e", "warmturn.engine": "e", "httpx": "e"}),
    ],
)
def test_with_json_all_that_is_written_is_json_and_the_level_is_ours(level: str, expected: dict[str, str]) -> None:
    out, lines = talk("json", level)
    records = [json.loads(line) for line in lines]
    assert out == ""
    for name, messages in expected.items():
        assert "".join(each["message"] for each in records if each["logger"] == name) == messages
    assert [each["message"] for each in records if each["logger"] == "warmturn.server"] == (
        ["a fault"] if level == "error" else ["for people", "a result", "a fault"]
    )
    assert [each["level"] for each in records if "UserWarning: old" in each["message"]] == (
        [] if level == "error" else ["warning"]
    )
    assert [each["logger"] for each in records if each["message"] == "of a library"] == ["transformers"]
    assert "ValueError: unexpected" in records[-1]["traceback"]


def test_with_text_people_are_told_as_before_and_not_of_requests() -> None:
    out, lines = talk("text", "info")
    assert out == "warmturn: a result\n"
    assert "warmturn: for people" in lines
    assert lines.count("of a library") == 1  # as the library writes it
    assert [line.split()[-2:] for line in lines if line[:2] == "20"] == [
        *(["WARNING", "w"], ["ERROR", "e"]),  # of requests
        *(["INFO", "i"], ["WARNING", "w"], ["ERROR", "e"]),
        *(["WARNING", "w"], ["ERROR", "e"]),  # of libraries
    ]
    assert lines[-1] == "ValueError: unexpected"
    _, lines = talk("text", "debug")
    assert [line.split()[-2] for line in lines if line[:2] == "20"][:4] == ["DEBUG", "INFO", "WARNING", "ERROR"]
