"""Every request that real clients were seen to send is answered, whatever the chat template refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from agents.recording import FOLDER
from agents.tiny_llama import CONTEXT, TEMPLATES
from fake_engine import FACTS
from http_context import Site, served
from template_styles import tokens_with

from server.chat.tokenizer import ChatTokenizer

RECORDINGS = sorted(FOLDER.glob("*/*.json"))
MOST = 400_000  # bytes of all recordings
PRIVATE = re.compile(r"/root/|/work/|/tmp/pytest|pytest-of|Bearer|sk-[A-Za-z0-9]{8}", re.IGNORECASE)


def tokens(template: str) -> ChatTokenizer:
    """The demo tokenizer with one of the templates of the sessions."""
    return tokens_with((TEMPLATES / f"{template}.jinja").read_text().removesuffix("\n"))


async def answer(site: Site, path: Path) -> None:
    """One request, and its whole answer."""
    site.engine.facts = msgspec.structs.replace(FACTS, max_context=CONTEXT)
    recording: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    response = await site.http.request(
        recording["method"], recording["path"], headers=recording["headers"], json=recording["body"]
    )
    assert response.status_code == 200, response.text
    for line in response.text.splitlines():
        if line.startswith("data: {"):
            event = json.loads(line.removeprefix("data: "))
            assert not event.get("error"), line
            assert event.get("type") not in ("error", "response.failed"), line


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: f"{path.parent.name}-{path.stem}")
@served(tokens=lambda: tokens("chatml"), any_model=True)
async def test_a_request_is_answered(site: Site, path: Path) -> None:
    await answer(site, path)


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: f"{path.parent.name}-{path.stem}")
@served(tokens=lambda: tokens("reasoning"), any_model=True)
async def test_a_request_is_answered_where_the_template_refuses_system_messages_in_the_middle(
    site: Site, path: Path
) -> None:
    await answer(site, path)


def test_the_recordings_are_small_and_tell_nothing_of_a_machine() -> None:
    assert {path.parent.name for path in RECORDINGS} >= {"claude", "codex", "opencode", "qwen", "aider"}
    assert sum(path.stat().st_size for path in RECORDINGS) < MOST
    for path in RECORDINGS:
        assert PRIVATE.search(path.read_text(encoding="utf-8")) is None, path
