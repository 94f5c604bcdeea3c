"""`warmturn chat` in a pseudo-terminal: keys, pasting, history across runs, Ctrl-C and Ctrl-D."""

import fcntl
import json
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

SECONDS = 60.0  # for one thing to appear, on a busy machine
ESCAPES = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07]*\x07|[@-Z\\-_=>])")
PROMPT = "\n>"
WHERE = "\x1b[6n"  # the question where the cursor is
BACK = b"\x1b[A"  # the key Up


class Handler(BaseHTTPRequestHandler):
    """Answers what was asked in capitals; a reply to "wait" ends when it is cancelled."""

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self.send({"data": [{"id": "tiny", "warmturn": {"max_context": 4096}}]})
        else:
            self.send({"error": {"message": "There is no such session."}}, 404)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("content-length") or 0)) or b"{}")
        if self.path.endswith("/cancel"):
            self.server.stopped.set()  # type: ignore[attr-defined]
            self.send({"cancelled": True})
        else:
            self.answer(body)

    def answer(self, body: dict[str, Any]) -> None:
        asked = body["messages"][-1]["content"]
        self.server.asked.append(asked)  # type: ignore[attr-defined]
        self.send_response(200)
        self.end_headers()
        self.event({"choices": [{"delta": {"content": f"**{asked.upper()}**"}}]})
        if asked == "slow":
            time.sleep(0.5)
        if asked == "wait":
            assert self.server.stopped.wait(SECONDS)  # type: ignore[attr-defined]
            self.event({"choices": [{"delta": {}, "finish_reason": "cancelled"}]})
        self.event({"choices": [], "usage": {"prompt_tokens": 40, "completion_tokens": 2}})
        self.wfile.write(b"data: [DONE]\n\n")

    def event(self, event: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        self.wfile.flush()

    def send(self, answer: dict[str, Any], status: int = 200) -> None:
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.fixture
def server() -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.asked, server.stopped = [], threading.Event()  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


class Screen:
    """A program in a pseudo-terminal of 24 lines."""

    def __init__(self, port: int, home: Path) -> None:
        self.master, child = pty.openpty()
        fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        environment = os.environ | {"TERM": "xterm", "XDG_STATE_HOME": str(home)}
        command = [sys.executable, "-m", "server", "chat", "--url", f"http://127.0.0.1:{port}", "--session", "s1"]
        self.program = subprocess.Popen(
            command, stdin=child, stdout=child, stderr=child, env=environment, start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )  # fmt: skip
        os.close(child)
        self.raw = ""
        self.read = 0  # characters of its text that ``until`` has returned

    def text(self) -> str:
        return ESCAPES.sub("", self.raw)[self.read :]

    def until(self, wanted: str) -> str:
        """What has appeared since the last call, up to ``wanted``."""
        end = time.monotonic() + SECONDS
        while wanted not in self.text():
            assert time.monotonic() < end, f"{wanted!r} did not appear in {self.text()!r}"
            if select.select([self.master], [], [], 1.0)[0]:
                self.receive()
        text = self.text()
        found = text[: text.index(wanted) + len(wanted)]
        self.read += len(found)
        return found

    def receive(self) -> None:
        """Read what there is; a terminal answers where its cursor is."""
        data = os.read(self.master, 65536).decode()
        self.raw += data
        for _ in range(data.count(WHERE)):
            self.keys(b"\x1b[5;1R")

    def keys(self, keys: bytes) -> None:
        os.write(self.master, keys)

    def leave(self) -> int:
        """Press Ctrl-D; the exit status."""
        self.keys(b"\x04")
        end = time.monotonic() + SECONDS
        while self.program.poll() is None and time.monotonic() < end:
            if select.select([self.master], [], [], 0.2)[0]:
                try:
                    self.receive()
                except OSError:  # the other side is closed
                    break
        status = self.program.wait(SECONDS)
        os.close(self.master)
        return status


@pytest.mark.wide
def test_a_chat_as_a_person_types_it(server: ThreadingHTTPServer, tmp_path: Path) -> None:
    asked: list[str] = server.asked  # type: ignore[attr-defined]
    screen = Screen(server.server_port, tmp_path)
    greeting = screen.until(PROMPT)
    assert "tiny · session s1" in greeting
    assert "a new session" in greeting
    screen.keys(b"hello\r")
    assert "HELLO" in screen.until("40 new")
    screen.until("context 42 of 4096 (1 %)")  # the status line, which is drawn with the prompt
    screen.keys(b"\x1b[200~one\ntwo\x1b[201~")
    screen.until("two")
    screen.keys(b"\r")
    screen.until("40 new")
    screen.keys(b"first\\\rsecond\r")
    screen.until("40 new")
    assert asked == ["hello", "one\ntwo", "first\nsecond"]
    screen.until(PROMPT)
    screen.keys(b"wait\r")
    screen.until("WAIT")
    screen.keys(b"\x03")
    screen.until("stopped; the reply so far is kept")
    screen.until(PROMPT)
    screen.keys(b"slow\r")
    screen.until("SLOW")
    screen.keys(b"next\r")  # typed while the reply comes: it is the next message
    screen.until("NEXT")
    screen.until("40 new")
    assert asked[-2:] == ["slow", "next"]
    assert screen.leave() == 0

    again = Screen(server.server_port, tmp_path)
    again.until(PROMPT)
    again.keys(4 * BACK + b"\r")  # what was typed before "wait", in the run before
    again.until("40 new")
    assert asked[-1] == "first\nsecond"
    assert again.leave() == 0
    assert (tmp_path / "warmturn" / "chat_history").stat().st_mode & 0o077 == 0
