"""The commands of `warmturn chat` against a server process's routes, in one process."""

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from server.cli.chat.conversation import ChatSession
from server.cli.chat.reply_view import PlainView
from server.cli.chat.slash_commands import COMMANDS, Quit, Terminal, obey


class Notes:
    """A stream that keeps what is written to it."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None: ...


class Sessions:
    """The routes of sessions, with turns that answer what was asked in capitals."""

    def __init__(self) -> None:
        self.held: dict[str, list[dict[str, Any]]] = {}
        self.bodies: list[dict[str, Any]] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        body = json.loads(request.content) if request.content else {}
        if path == "/v1/chat/completions":
            return self.turn(body)
        if path == "/v1/sessions":
            data = [self.state(name) for name in sorted(self.held)]
            return httpx.Response(200, json={"object": "list", "data": data, "has_more": False, "last_id": None})
        _, _, _, name, *rest = path.split("/")
        if name not in self.held:
            return httpx.Response(404, json={"error": {"message": f"There is no session {name!r}."}})
        return self.change(name, rest[0] if rest else "", body)

    def turn(self, body: dict[str, Any]) -> httpx.Response:
        self.bodies.append(body)
        messages = self.held.setdefault(body["session_id"], [])
        number = 1 + max((message["turn"] for message in messages), default=0)
        asked = body["messages"][-1]["content"]
        for message in [*body["messages"], {"role": "assistant", "content": asked.upper()}]:
            messages.append({**message, "index": len(messages), "turn": number})
        usage = {"prompt_tokens": 10 * number, "completion_tokens": 3}
        events: list[Any] = [
            {"choices": [{"delta": {"reasoning_content": "Hm."}}]},
            {"choices": [{"delta": {"content": asked.upper()}}]},
            {"choices": [], "usage": usage},
        ]
        lines = [*(json.dumps(event) for event in events), "[DONE]"]
        return httpx.Response(200, content="".join(f"data: {line}\n\n" for line in lines).encode())

    def change(self, name: str, verb: str, body: dict[str, Any]) -> httpx.Response:
        if verb == "messages":
            return httpx.Response(200, json={"object": "list", "data": self.held[name]})
        if verb == "rewind":
            self.held[name] = [message for message in self.held[name] if message["turn"] <= body["turn"]]
        if verb == "fork":
            last = body.get("turn", 10**9)
            self.held[f"{name}-2"] = [message for message in self.held[name] if message["turn"] <= last]
            name = f"{name}-2"
        return httpx.Response(200, json=self.state(name))

    def state(self, name: str) -> dict[str, Any]:
        turns = max((message["turn"] for message in self.held[name]), default=0)
        return {
            "object": "session",
            "id": name,
            "created_at": 0,
            "last_used_at": 0,
            "turns": turns,
            "messages": len(self.held[name]),
            "tokens": 20 * turns,
            "metadata": {},
            "title": f"About {name}",
            "expires_at": None,
            "pinned_until": None,
            "parent": None,
            "model_matches": True,
            "kv": {"device": {"tokens": 20 * turns, "bytes": 4096}},
        }


class Desk:
    """A terminal with its server and what it has shown."""

    def __init__(self) -> None:
        self.server = Sessions()
        self.shown = Notes()
        http = httpx.Client(transport=httpx.MockTransport(self.server), base_url="http://test")
        view = PlainView(self.shown, self.shown)  # type: ignore[arg-type]
        self.conversation = ChatSession(http, "tiny", 4096, "s1")
        self.terminal = Terminal(self.conversation, view, [])

    def says(self, *lines: str) -> str:
        """What the last of these lines showed."""
        for line in lines:
            self.shown.text = ""
            if line.startswith("/"):
                obey(self.terminal, line)
            else:
                self.conversation.send(line, self.terminal.view)
        return self.shown.text

    def texts(self, name: str = "s1") -> list[str]:
        return [message["content"] for message in self.server.held[name]]


@pytest.fixture
def desk() -> Desk:
    return Desk()


def test_help_names_every_command(desk: Desk) -> None:
    shown = desk.says("/help")
    assert all(f"/{name}" in shown for name in COMMANDS)
    assert "/hepl is no command" in desk.says("/hepl")


def test_undo_drops_turns_and_a_first_system_message_is_sent_again(desk: Desk) -> None:
    desk.says("/system Be brief.", "one", "two")
    assert desk.texts() == ["Be brief.", "one", "ONE", "two", "TWO"]
    assert desk.says("/undo") == "1 turn is left\n"
    assert desk.texts() == ["Be brief.", "one", "ONE"]
    assert desk.says("/undo 2") == "/undo: the session has 1 turn\n"
    assert desk.says("/undo x") == "/undo: expected a whole number\n"
    desk.says("/undo", "three")
    assert desk.texts() == ["Be brief.", "three", "THREE"]


def test_the_status_line_knows_the_session_after_each_command(desk: Desk) -> None:
    desk.says("one", "two")
    whole = desk.conversation.used
    for command in ("/undo", "/fork", "/fork 0"):
        desk.says(command)
        assert desk.conversation.used == desk.conversation.state()["tokens"] < whole
    desk.says("/open s1")
    assert 0 < desk.conversation.used < whole
    desk.says("/new")
    assert desk.conversation.used == 0


def test_an_edited_message_takes_the_place_of_the_last(desk: Desk) -> None:
    desk.says("one", "two", "/edit drei")
    assert desk.texts() == ["one", "ONE", "drei", "DREI"]
    desk.says("/edit")
    assert desk.terminal.prefilled == "drei"
    assert desk.texts()[-1] == "DREI"  # nothing is dropped before the new one is sent
    desk.says("vier")
    assert desk.texts() == ["one", "ONE", "vier", "VIER"]


def test_sessions_are_begun_listed_opened_and_forked(desk: Desk) -> None:
    desk.says("one", "two", "/fork 1")
    assert desk.conversation.session == "s1-2"
    desk.says("three")
    assert (desk.texts("s1-2"), desk.texts("s1")) == (["one", "ONE", "three", "THREE"], ["one", "ONE", "two", "TWO"])
    listed = desk.says("/list")
    assert re.search(r"^ 2  \S+ \S+ · s1-2 · 2 turns · About s1-2$", listed, re.MULTILINE), listed
    shown = desk.says("/open 1")
    assert shown == "session s1\n> one\nONE\n> two\nTWO\n"
    assert desk.says("/open nobody") == "There is no session 'nobody'.\n"
    assert desk.conversation.session == "s1"
    desk.says("/new alice", "hello")
    assert desk.texts("alice") == ["hello", "HELLO"]
    assert desk.says("/new a/b") == "SESSION: no session can have this id\n"
    desk.says("/new")
    assert desk.conversation.session.startswith("chat-")


def test_settings_go_with_the_next_turns(desk: Desk) -> None:
    desk.says("/set temperature 0.2", '/set stop ["a"]', "/set reasoning_effort low", "one")
    body = desk.server.bodies[-1]
    assert (body["temperature"], body["stop"], body["reasoning_effort"]) == (0.2, ["a"], "low")
    assert desk.says("/set") == 'temperature 0.2, stop ["a"], reasoning_effort "low"\n'
    desk.says("/set temperature", "two")
    assert "temperature" not in desk.server.bodies[-1]
    assert desk.says("/set colour red").startswith("/set: there is no setting colour; there are temperature, top_p")


def test_a_conversation_is_saved(desk: Desk, tmp_path: Path) -> None:
    desk.says("one")
    desk.says(f"/save {tmp_path}/talk.md", f"/save {tmp_path}/talk.json")
    assert (tmp_path / "talk.md").read_text() == "## User\n\none\n\n## Assistant\n\nONE\n"
    saved = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "ONE"}]
    assert json.loads((tmp_path / "talk.json").read_text()) == saved
    assert desk.says(f"/save {tmp_path}/talk.md") == f"/save: {tmp_path}/talk.md exists\n"
    assert "cannot be written" in desk.says(f"/save {tmp_path}/missing/talk.md")


def test_stats_name_length_cache_context_and_the_last_turn(desk: Desk) -> None:
    shown = desk.says("one", "/stats")
    assert "1 turns, 2 messages, 20 tokens" in shown
    assert "on device    20 tokens, 4096 bytes" in shown
    assert "context      4096 tokens" in shown
    assert "last turn    reused 0 of 10 prompt tokens" in shown


def test_quit(desk: Desk) -> None:
    with pytest.raises(Quit):
        desk.says("/quit")
