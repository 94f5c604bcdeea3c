"""Engines without sessions leave no request of the server without an answer."""

from __future__ import annotations

import pytest

from scheduler.adapter_messages import AdapterLoaded, LoadAdapter
from scheduler.pooling_messages import Pool, Pooled
from scheduler.protocol import (
    Cancel,
    Expand,
    Expanded,
    Export,
    Exported,
    Forget,
    Forgotten,
    Import,
    Imported,
    Inspect,
    Inspected,
    MediaItem,
    Refused,
    Submit,
    ToEngine,
)
from scheduler.sessionless import answer_without_sessions
from scheduler.speech_messages import Transcribe, Transcribed

REASON = "This model does something else."


@pytest.mark.parametrize(
    ("asked", "answer"),
    [
        (Submit("t", "a", b""), Refused("t", "invalid_prompt", REASON)),
        (Forget("a", "s", 1), Forgotten("a", "s", 1)),
        (Inspect("i", "a", "s"), Inspected("i", {})),
        (Export("e", "a", "s", "/x"), Exported("e", 0, 0)),
        (Import("m", "a", "s", "/x"), Imported("m", 0, "this model keeps no KV")),
        (LoadAdapter("l", "sql", "/x"), AdapterLoaded("l", error="this model takes no adapters")),
        (Transcribe("h", b""), Transcribed("h", error=REASON)),
        (Pool("p", "a", ()), Pooled("p", code="invalid_prompt", error=REASON)),
    ],
)
def test_each_request_has_its_answer(asked: ToEngine, answer: object) -> None:
    assert answer_without_sessions(asked, REASON) == answer


def test_what_is_refused_says_why() -> None:
    expanded = answer_without_sessions(Expand("x", "a", (MediaItem("0" * 64),)), REASON)
    assert isinstance(expanded, Expanded)
    assert [medium.error for medium in expanded.media] == [REASON]


def test_what_only_announces_has_none() -> None:
    assert answer_without_sessions(Cancel("t"), REASON) is None
