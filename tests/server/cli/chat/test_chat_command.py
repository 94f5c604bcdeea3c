"""`warmturn chat` against a server made of canned answers."""

import io
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from server.cli.chat.chat_command import chat
from server.config.client_options import ChatConfig
from server.config.usage_error import UsageError

Handler = Callable[[httpx.Request], httpx.Response]

USAGE = {"prompt_tokens": 431, "completion_tokens": 57, "prompt_tokens_details": {"cached_tokens": 412}}


class Events(httpx.SyncByteStream):
    """Server-sent events; an exception among them is raised in its turn."""

    def __init__(self, *events: Any) -> None:
        self._events = events

    def __iter__(self) -> Iterator[bytes]:
        for event in self._events:
            if isinstance(event, BaseException):
                raise event
            data = event if isinstance(event, str) else json.dumps(event)
            yield f": ping\n\ndata: {data}\n\n".encode()


def says(text: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}], "usage": None}


def reply(*texts: str) -> Events:
    first = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}], "usage": None}
    return Events(first, *map(says, texts), {"choices": [], "usage": USAGE}, "[DONE]")


class Server:
    """Answers /v1/models, and each turn with the next of its replies; keeps what it was asked."""

    def __init__(self, *replies: Events | httpx.Response) -> None:
        self.replies = list(replies)
        self.asked: list[dict[str, Any]] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"object": "list", "data": [{"id": "tiny"}]})
        self.asked.append(json.loads(request.content))
        answer = self.replies.pop(0)
        return answer if isinstance(answer, httpx.Response) else httpx.Response(200, stream=answer)


def talk(
    monkeypatch: pytest.MonkeyPatch, server: Handler, typed: str = "hello\n", config: ChatConfig | None = None
) -> str:
    """What the terminal shows when ``typed`` is typed."""
    out = io.StringIO()
    monkeypatch.setattr("sys.stdout", out)
    client = httpx.Client(transport=httpx.MockTransport(server), base_url="http://test")
    assert chat(config or ChatConfig(session="s1"), client, typed.splitlines()) == 0
    return out.getvalue()


def test_a_turn_is_streamed_and_its_cost_told(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(reply("Hel", "lo!"))
    shown = talk(monkeypatch, server)
    assert "tiny · session s1" in shown
    assert "\nHello!\nreused 412 of 431 prompt tokens · 19 new · 57 out · first token " in shown
    assert server.asked == [
        {
            "model": "tiny",
            "session_id": "s1",
            "messages": [{"role": "user", "content": "hello"}],
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, "reused 812 of 840 (disk 800, device 12), 28 new, loaded in 12 ms · 57 out"),
        ({"reused": {"device": 0, "host": 0}, "new": 840, "load_ms": 0.0}, "reused 0 of 840, 840 new · 57 out"),
        (
            {"reused": {"device": 40}, "recomputed": 772, "load_ms": 0.0, "miss": {"reason": "no_room", "at": 40}},
            "reused 40 of 840 (device 40), 772 recomputed, 28 new, miss: no room at token 40 · 57 out",
        ),
    ],
)
def test_the_cache_receipt_is_told_where_the_server_gives_one(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], told: str
) -> None:
    tiers = {"device": 12, "host": 0, "disk": 800, "remote": 0}
    cache = {"prompt_tokens": 840, "reused": tiers, "recomputed": 0, "new": 28, "load_ms": 12.3, "miss": None}
    end = {"choices": [], "usage": USAGE, "cache": {**cache, **changes}}
    assert f"\nHello\n{told}" in talk(monkeypatch, Server(Events(says("Hello"), end, "[DONE]")))


def test_only_new_messages_are_sent_and_the_system_message_once(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(reply("1"), reply("2"))
    talk(monkeypatch, server, "one\n\n  two \n", ChatConfig(session="s1", system="be brief", temperature=0, model="m"))
    assert [request["messages"] for request in server.asked] == [
        [{"role": "system", "content": "be brief"}, {"role": "user", "content": "one"}],
        [{"role": "user", "content": "two"}],
    ]
    assert [(request["model"], request["temperature"]) for request in server.asked] == [("m", 0), ("m", 0)]


class Interrupted(Events):
    """A Ctrl-C after some events; the others come when ``go`` is set."""

    def __init__(self, before: Any, *after: Any) -> None:
        super().__init__(*after)
        self.go = threading.Event()
        self._before = Events(before)

    def __iter__(self) -> Iterator[bytes]:
        yield from self._before
        os.kill(os.getpid(), signal.SIGINT)
        assert self.go.wait(20)
        yield from super().__iter__()


class Stoppable(Server):
    """One that stops turns, or answers that it cannot."""

    def __init__(self, answer: int, *replies: Events) -> None:
        super().__init__(*replies)
        self.answer = answer
        self.stopped: list[str] = []
        self._running: Interrupted | None = None

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/cancel"):
            self.stopped.append(request.url.path)
            assert self._running is not None
            if self.answer == 200:
                self._running.go.set()
            return httpx.Response(self.answer)
        if self.replies and isinstance(self.replies[0], Interrupted):
            self._running = self.replies[0]
        return super().__call__(request)


END = {"choices": [{"index": 0, "delta": {}, "finish_reason": "cancelled"}], "usage": None}


def test_ctrl_c_stops_the_reply_which_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Stoppable(200, Interrupted(says("One, two"), END, {"choices": [], "usage": USAGE}, "[DONE]"), reply("3"))
    before = signal.getsignal(signal.SIGINT)
    shown = talk(monkeypatch, server, "count\nenough\n", ChatConfig(session="s:1", system="be brief"))
    assert "One, two\nstopped; the reply so far is kept · reused 412 of 431 prompt tokens" in shown
    assert server.stopped == ["/v1/sessions/s:1/cancel"]
    assert [message["role"] for message in server.asked[1]["messages"]] == [
        "user"
    ]  # the session has the system message
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize("answer", [404, 409])
def test_ctrl_c_at_a_server_that_cannot_stop_a_turn(monkeypatch: pytest.MonkeyPatch, answer: int) -> None:
    server = Stoppable(answer, Interrupted(says("One, two")), reply("Fine."))
    shown = talk(monkeypatch, server, "count\nenough\n", ChatConfig(session="s1", system="be brief"))
    assert "One, two\nstopped; this turn is not part of the session\nFine.\n" in shown
    assert server.asked[1]["messages"][0]["role"] == "system"  # the stopped turn did not bring it in


def test_a_turn_that_is_stopped_before_its_first_word(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = {"error": {"message": "This turn was cancelled before its first token.", "code": "turn_cancelled"}}
    shown = talk(monkeypatch, Server(httpx.Response(499, json=gone), reply("Fine.")), "count\nenough\n")
    assert "\nThis turn was cancelled before its first token.\nFine.\n" in shown


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (httpx.Response(409, json={"error": {"message": "Busy."}}), "\nBusy.\n"),
        (httpx.Response(502, text="bad gateway"), "\nHTTP 502\n"),
        (Events(says("Half"), {"error": {"message": "The engine died."}}), "Half\nThe engine died.\n"),
        (Events(says("Half")), "Half\nthe server ended the reply early\n"),
        (Events(httpx.ReadError("gone")), "the connection to the server was lost (ReadError)\n"),
    ],
)
def test_a_turn_that_fails_is_one_line(
    monkeypatch: pytest.MonkeyPatch, answer: Events | httpx.Response, told: str
) -> None:
    server = Server(answer, reply("Again."))
    shown = talk(monkeypatch, server, "one\ntwo\n")
    assert told in shown
    assert "Again.\n" in shown
    assert len(server.asked) == 2


def refuse(_request: httpx.Request) -> httpx.Response:
    raise httpx.ConnectError("refused")


@pytest.mark.parametrize(
    ("server", "told"),
    [
        (refuse, "no server answers at http://127.0.0.1:8000; `warmturn serve` starts one"),
        (lambda _: httpx.Response(401, json={"error": {"message": "no"}}), "--api-key: the server refused this key"),
        (lambda _: httpx.Response(503, json={"error": {"message": "Still loading."}}), "says: Still loading."),
        (lambda _: httpx.Response(200, text="<html>"), "does not have OpenAI's API"),
    ],
)
def test_without_a_server_there_is_no_chat(monkeypatch: pytest.MonkeyPatch, server: Handler, told: str) -> None:
    with pytest.raises(UsageError) as refusal:
        talk(monkeypatch, server)
    assert told in str(refusal.value)
    assert "\n" not in str(refusal.value)


def once(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    server: Handler,
    message: str | None = None,
    piped: str = "",
) -> tuple[int, str, str]:
    """The exit status of a chat behind a pipe, what it printed, and what it said on standard error."""
    monkeypatch.setattr("sys.stdin", io.StringIO(piped))
    client = httpx.Client(transport=httpx.MockTransport(server), base_url="http://test")
    status = chat(ChatConfig(session="s1", message=message), client)
    shown = capsys.readouterr()
    return status, shown.out, shown.err


@pytest.mark.parametrize(
    ("message", "piped", "sent"),
    [
        ("review this", "+ a\n- b\n", "review this\n\n+ a\n- b"),
        (None, "\none\ntwo\n", "one\ntwo"),
        ("hello", "", "hello"),
    ],
)
def test_a_pipe_and_a_message_are_one_turn_whose_reply_alone_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], message: str | None, piped: str, sent: str
) -> None:
    server = Server(reply("Fi", "ne."))
    status, out, err = once(monkeypatch, capsys, server, message, piped)
    assert (status, out) == (0, "Fine.\n")
    assert err.startswith("reused 412 of 431 prompt tokens")
    assert server.asked[0]["messages"] == [{"role": "user", "content": sent}]


def test_a_message_without_an_answer_is_exit_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server = Server(httpx.Response(409, json={"error": {"message": "Busy."}}))
    assert once(monkeypatch, capsys, server, "hello") == (1, "", "Busy.\n")


def test_an_empty_pipe_is_a_wrong_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match="MESSAGE: nothing to send"):
        once(monkeypatch, capsys, Server(), piped="\n")
