"""Every request that real clients were seen to send is answered, whatever the chat template refuses."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
from agents.recording import FOLDER
from agents.tiny_llama import CONTEXT, TEMPLATES
from fake_engine import FACTS
from http_context import Site, served
from models_kit import model_site
from real_port import port
from template_styles import tokens_with
from websockets.asyncio.client import connect

from server.api.responses.socket_requests import CreateEvent
from server.chat.chat_tokenizer import ChatTokenizer

ALL = sorted(FOLDER.glob("*/*.json"))
OVER_SOCKETS = [path for path in ALL if path.parent.name.endswith("-websocket")]
RECORDINGS = [path for path in ALL if path not in OVER_SOCKETS]
IN_A_ROW = [path for path in RECORDINGS if path.parent.name in ("codex", "goose", "roo")]  # what some of them have
MOST = 550_000  # bytes of all recordings
PRIVATE = re.compile(r"/root/|/work/|/tmp/pytest|pytest-of|Bearer|sk-[A-Za-z0-9]{8}", re.IGNORECASE)


@cache
def tokens(template: str) -> ChatTokenizer:
    """The demo tokenizer with one of the templates of the sessions."""
    return tokens_with((TEMPLATES / f"{template}.jinja").read_text().removesuffix("\n"))


@cache
def alternating() -> ChatTokenizer:
    """The same, with a template that raises an error where roles do not alternate."""
    return tokens_with((FOLDER.parents[1] / "templates" / "alternating.jinja").read_text().removesuffix("\n"))


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


@pytest.mark.parametrize("path", IN_A_ROW, ids=lambda path: f"{path.parent.name}-{path.stem}")
@served(tokens=alternating, any_model=True)
async def test_messages_in_a_row_are_answered_where_roles_must_alternate(site: Site, path: Path) -> None:
    await answer(site, path)


@pytest.mark.parametrize("path", OVER_SOCKETS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_message_of_a_socket_is_understood(path: Path) -> None:
    body = json.loads(path.read_text(encoding="utf-8"))["body"]
    CreateEvent.model_validate(body)


async def test_a_warm_up_and_what_follows_it_are_answered() -> None:
    async with port(tokens=tokens("reasoning"), any_model=True) as opened:
        opened.site.engine.facts = msgspec.structs.replace(FACTS, max_context=CONTEXT)
        url = f"ws://127.0.0.1:{opened.number}/v1/responses"
        async with connect(url) as socket:
            last = None
            for path in OVER_SOCKETS[:2]:
                body = json.loads(path.read_text(encoding="utf-8"))["body"]
                await socket.send(json.dumps(body | ({"previous_response_id": last} if last else {})))
                event: dict[str, Any] = {}
                while event.get("type") not in ("response.completed", "error", "response.failed"):
                    event = json.loads(await socket.recv())
                assert event["type"] == "response.completed", event
                last = event["response"]["id"]


@pytest.mark.parametrize("client", ["claude", "codex", "opencode"])
async def test_requests_are_answered_beside_another_model_and_with_keys(client: str) -> None:
    """Also those that call the model by a name of the vendor's: they mean the first one."""
    facts = {name: {"max_context": CONTEXT} for name in ("one", "two")}
    async with model_site("one", "two", any_model=True, facts=facts, api_keys={"team": "key"}) as site:
        for path in (path for path in RECORDINGS if path.parent.name == client):
            sent = json.loads(path.read_text(encoding="utf-8"))
            for model in ("two", "vendors-small-model") if sent["body"] else ():
                headers = {**sent["headers"], "authorization": "Bearer key"}
                body = {**sent["body"], "model": model}
                answer = await site.http.request(sent["method"], sent["path"], headers=headers, json=body)
                assert answer.status_code == 200, (path, answer.text)
                assert '"error":{' not in answer.text
        assert site.events == ["load one", "load two"]


def test_the_recordings_are_small_and_tell_nothing_of_a_machine() -> None:
    assert {path.parent.name for path in RECORDINGS} >= {"claude", "codex", "opencode", "qwen", "aider"}
    assert sum(path.stat().st_size for path in ALL) < MOST
    for path in ALL:
        assert PRIVATE.search(path.read_text(encoding="utf-8")) is None, path
