"""`warmturn sessions`: the command line, each verb against the real HTTP server, and how it says no."""

import asyncio
import io
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_engine import FakeEngine
from fastapi import FastAPI
from fastapi.testclient import TestClient
from http_context import MAX_CAPSULE, demo_tokens, empty_log, only_model, share_routers

from server.api.sessions.transfers import Transfers
from server.app import create_app
from server.cli.sessions_terminal import sessions
from server.config.command_line import parse
from server.config.sessions_options import VERBS, SessionsCommand
from server.config.usage_error import UsageError
from server.log.session_log import SessionLog


@pytest.fixture
def app(tmp_path: Path) -> Iterator[FastAPI]:
    """A server without a port."""
    path = tmp_path / "log.sqlite"
    path.write_bytes(empty_log())
    log = SessionLog(path)
    engine = FakeEngine(demo_tokens())
    transfers = Transfers(tmp_path / "transfer", MAX_CAPSULE)
    made = create_app(only_model(engine, log, demo_tokens()), log, api_keys={}, transfers=transfers)
    share_routers(made)
    yield made
    asyncio.run(log.close())


@pytest.fixture
def run(app: FastAPI) -> Callable[..., str]:
    """Run a command line against the server; what it prints. The exit status must be ``status``."""

    def ran(*arguments: str, status: int = 0) -> str:
        command = parse(["sessions", *arguments])
        assert isinstance(command, SessionsCommand)
        out = io.StringIO()
        client: Any = TestClient(app, base_url="http://localhost")
        assert sessions(command, client, out) == status
        return out.getvalue()

    return ran


def chat(app: FastAPI, name: str, text: str) -> None:
    body = {"session_id": name, "messages": [{"role": "user", "content": text}]}
    assert TestClient(app, base_url="http://localhost").post("/v1/chat/completions", json=body).status_code == 200


def test_a_session_through_all_verbs(app: FastAPI, run: Callable[..., str], tmp_path: Path) -> None:
    made = run("create", "s1", "--message", "system=Be a=b.", "--metadata", "team=a", "--ttl", "600", "--pin", "60")
    assert "session      s1\n" in made
    assert "team=a" in made
    assert "expires" in made
    assert "pinned until" in made
    chat(app, "s1", "One?")
    chat(app, "s1", "Two?")
    assert "2 turns, 5 messages" in run("show", "s1")
    assert run("messages", "s1").splitlines()[:2] == ["[0] system: Be a=b.", "[1] user: One?"]
    turns = run("turns", "s1").splitlines()
    assert turns[0].split() == ["TURN", "AT", "PROMPT", "CACHED", "REPLY", "END"]
    assert [line.split()[0] for line in turns[1:]] == ["1", "2"]
    assert "fork of      s1, turn 1" in run("fork", "s1", "--id", "s2", "--turn", "1")
    assert [line.split()[0] for line in run("list").splitlines()[1:]] == ["s2", "s1"]
    assert "1 turns, 4 messages" in run("edit", "s1", "3", "Three?")
    assert run("regenerate", "s1", "--temperature", "0") == "Hello there, friend.\n"
    assert "1 turns, 3 messages" in run("rewind", "s1", "--turn", "1")
    assert "pinned until" not in run("pin", "s1", "0")
    assert "expires" not in run("ttl", "s1", "none")
    assert "expires" in run("ttl", "s1", "60")
    path = tmp_path / "s1.zip"
    assert run("export", "s1", str(path)) == f"{path}: {path.stat().st_size} bytes\n"
    assert path.stat().st_mode & 0o777 == 0o600
    assert run("delete", "s1") == "s1 is deleted\n"
    assert "0 of " in run("import", str(path))
    assert "(no_kv)" in run("import", str(path), "--id", "s3")
    assert "1 turns, 3 messages" in run("show", "s3")
    assert list(tmp_path.glob("*.part")) == []


def test_programs_get_json(app: FastAPI, run: Callable[..., str], tmp_path: Path) -> None:
    assert json.loads(run("create", "s1", "--json"))["object"] == "session"
    assert json.loads(run("list", "--json"))["data"][0]["id"] == "s1"
    assert json.loads(run("export", "s1", str(tmp_path / "x"), "--no-kv", "--json"))["object"] == "session.exported"
    assert json.loads(run("delete", "s1", "--json")) == {"object": "session.deleted", "id": "s1", "deleted": True}


def test_an_export_is_complete_or_not_there(
    app: FastAPI, run: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run("create", "s1")
    app.state.models.first.engine.kv["default", "s1"] = [b"12345"]
    path = tmp_path / "x"
    run("export", "s1", str(path), "--no-kv")
    assert b"kv/000000.kv" not in path.read_bytes()
    run("export", "s1", str(path))
    assert b"kv/000000.kv" in path.read_bytes()
    before = path.read_bytes()

    def cut() -> Iterator[bytes]:
        yield b"PK"
        assert (tmp_path / "x.part").exists()
        raise httpx.ReadError("gone")

    command = parse(["sessions", "export", "s1", str(path)])
    assert isinstance(command, SessionsCommand)
    assert sessions(command, answering(lambda _: httpx.Response(200, content=cut())), io.StringIO()) == 1
    assert "lost" in capsys.readouterr().err
    assert path.read_bytes() == before
    assert list(tmp_path.glob("*.part")) == []


def test_the_list_is_filtered_and_paged(run: Callable[..., str]) -> None:
    for name in ("a1", "a2", "b1"):
        run("create", name, "--metadata", f"team={name[0]}")
    assert [line.split()[0] for line in run("list", "--prefix", "a", "--order", "asc").splitlines()[1:]] == ["a1", "a2"]
    assert run("list", "--metadata", "team=b").splitlines()[1].split()[0] == "b1"
    assert run("list", "--limit", "1").splitlines()[-1] == "more: --after b1"
    assert run("list", "--limit", "1", "--after", "b1").splitlines()[1].split()[0] == "a2"
    assert run("list", "--used-before", str(int(time.time()) - 60)) == "nothing\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ("show", "nobody"),
        ("delete", "nobody"),
        ("export", "nobody", "FILE"),
        ("rewind", "nobody", "--turn", "0"),
        ("rewind", "nobody"),
        ("create", "import"),
        ("list", "--limit", "1000"),
        ("import", "EMPTY"),
    ],
)
def test_what_the_server_refuses_is_one_line_and_status_1(
    run: Callable[..., str],
    arguments: tuple[str, ...],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "EMPTY").touch()
    assert run(*(str(tmp_path / a) if a.isupper() else a for a in arguments), status=1) == ""
    told = capsys.readouterr().err
    assert told.startswith("warmturn: ")
    assert told.count("\n") == 1
    assert not (tmp_path / "FILE").exists()
    assert not (tmp_path / "FILE.part").exists()


def answering(answer: Any) -> httpx.Client:
    return httpx.Client(transport=httpx.MockTransport(answer), base_url="http://test")


def lost(_: httpx.Request) -> httpx.Response:
    raise httpx.ReadError("gone")


@pytest.mark.parametrize("answer", [lost, lambda _: httpx.Response(200, text="<html>")])
def test_what_is_no_answer_is_one_line_and_status_1(answer: Any, capsys: pytest.CaptureFixture[str]) -> None:
    command = parse(["sessions", "list"])
    assert isinstance(command, SessionsCommand)
    assert sessions(command, answering(answer), io.StringIO()) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_without_a_server_it_says_so() -> None:
    def refuse(_: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    command = parse(["sessions", "list"])
    assert isinstance(command, SessionsCommand)
    with pytest.raises(UsageError, match="no server answers"):
        sessions(command, answering(refuse), io.StringIO())


def test_a_server_that_wants_a_key_has_its_flag_named() -> None:
    client = answering(lambda _: httpx.Response(401, json={"error": {"message": "No key."}}))
    command = parse(["sessions", "list"])
    assert isinstance(command, SessionsCommand)
    with pytest.raises(UsageError, match=r"^--api-key: the server refused this key, or needs one$"):
        sessions(command, client, io.StringIO())


def test_key_and_path_are_sent_as_they_must_be() -> None:
    seen: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(200, json={"object": "session.deleted", "id": "a:b@c%d"})

    command = parse(["sessions", "delete", "a:b@c%d", "--url", "http://h/v1", "--api-key", "k"])
    assert isinstance(command, SessionsCommand)
    assert (command.config.url, command.config.api_key) == ("http://h/v1", "k")
    assert sessions(command, answering(answer), io.StringIO()) == 0
    assert seen[0].url.raw_path == b"/v1/sessions/a:b@c%25d"


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("explode",),
        ("show",),
        ("edit", "s", "one", "text"),
        ("ttl", "s", "soon"),
        ("list", "--colour"),
        ("create", "s", "--metadata", "team"),
        ("create", "s", "--message", "hello"),
        ("list", "--url", "nowhere"),
        ("import", "/nowhere/at/all"),
        ("export", "s", "/nowhere/at/all"),
    ],
)
def test_what_cannot_be_meant_is_a_usage_error(
    app: FastAPI, run: Callable[..., str], arguments: tuple[str, ...]
) -> None:
    TestClient(app, base_url="http://localhost").post("/v1/sessions", json={"id": "s"})
    with pytest.raises(UsageError) as refusal:
        run(*arguments)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("name", ["", ".", "..", "s/turns", "../models"])
@pytest.mark.parametrize("verb", ["show", "turns", "messages", "fork", "rewind", "regenerate", "delete", "ttl"])
def test_no_id_is_a_path_to_something_else(run: Callable[..., str], verb: str, name: str) -> None:
    with pytest.raises(UsageError, match="SESSION"):
        run(verb, name, *(["5"] if verb == "ttl" else []))


def test_every_verb_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    for verb in VERBS:
        with pytest.raises(SystemExit):
            parse(["sessions", verb, "--help"])
        assert "WARMTURN_CHAT_API_KEY" in capsys.readouterr().out
