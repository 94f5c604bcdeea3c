"""What Codex CLI has sent, recorded from version 0.169.0 against this server: every request is answered."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from http_context import Site, served
from msgspec.structs import replace
from openai_document import stream_faults

FOLDER = Path(__file__).resolve().parents[3] / "agents" / "recordings" / "codex"
SESSIONS = {
    "hi": [("tool_left_out", "web_search")],
    "tools": [
        ("grammar_described", "custom"),
        ("image_replaced", "output"),
        ("tool_left_out", "web_search"),
        ("tools_in_place", "tools"),
        ("verbosity_left_out", "text.verbosity"),
    ],
    "lite": [("grammar_described", "custom"), ("verbosity_left_out", "text.verbosity")],
}


def recordings(session: str) -> list[Any]:
    """The requests of a session, in order."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(FOLDER.glob(f"{session}_*.json"))]


def with_room(site: Site) -> None:
    """Give the engine the context that such prompts need."""
    assert site.engine.facts is not None
    site.engine.facts = replace(site.engine.facts, max_context=200_000, pages=20_000)


@pytest.mark.parametrize("session", SESSIONS)
@served()
async def test_every_request_is_answered_and_goes_on_from_the_one_before(site: Site, session: str) -> None:
    with_room(site)
    rules = set()
    for number, sent in enumerate(recordings(session)):
        body = {**sent["body"], "model": "demo"}
        answer = await site.http.request(sent["method"], sent["path"], json=body)
        assert answer.status_code == 200, answer.text
        assert not stream_faults("ResponseStreamEvent", answer.text, done=False)
        last = json.loads(answer.text.strip().rpartition("\ndata: ")[2])
        assert last["type"] == "response.completed"
        rules |= {(one["rule"], one["param"]) for one in last["response"]["cache"]["adapted"]}
        if number:
            assert site.prompt().startswith(site.prompt(-2))
        count = await site.http.post("/v1/responses/input_tokens", json=counted(body))
        assert count.json()["input_tokens"] == last["response"]["usage"]["input_tokens"]
    assert sorted(rules) == SESSIONS[session]


def counted(body: dict[str, Any]) -> dict[str, Any]:
    """The body without the fields that input_tokens does not have."""
    return {name: value for name, value in body.items() if name not in ("stream", "store", "include")}


@served()
async def test_its_thread_is_a_line_of_the_log(site: Site) -> None:
    with_room(site)
    (sent,) = recordings("hi")
    for _ in range(2):
        answer = await site.http.post(sent["path"], json={**sent["body"], "model": "demo"}, headers=sent["headers"])
        assert answer.status_code == 200
    last = json.loads(answer.text.strip().rpartition("\ndata: ")[2])
    assert last["response"]["cache"]["line"]["via"] == "client_metadata.thread_id"
    assert last["response"]["usage"]["input_tokens_details"]["cached_tokens"] > 0
