"""Pages of other origins, in a real browser: which of them may call the server and read what it answers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from server_process import ServerProcess

if TYPE_CHECKING:
    from playwright.sync_api import Browser

KEY = "a-key-of-ann"
CALL = """async ([url, key]) => {
  const headers = { authorization: `Bearer ${key}`, "content-type": "application/json" };
  const body = { model: "m", messages: [{ role: "user", content: "My name is Walter." }], stream: true };
  try {
    const answer = await fetch(`${url}/v1/chat/completions`, { method: "POST", headers, body: JSON.stringify(body) });
    const text = await answer.text();
    return [answer.status, answer.headers.get("x-request-id") !== null, text.trim().endsWith("data: [DONE]")];
  } catch (error) {
    return error.name;
  }
}"""


class Quiet(SimpleHTTPRequestHandler):
    """Serves a folder and writes no log."""

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ThreadingHTTPServer]:
    """A web server with one empty page, under two origins: 127.0.0.1 and localhost."""
    folder: Path = tmp_path_factory.mktemp("pages")
    (folder / "index.html").write_text("<!doctype html><link rel=icon href=data:,>")
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def test_a_page_of_an_allowed_origin_streams_and_others_read_nothing(
    chromium: Browser, pages: ThreadingHTTPServer, tmp_path: Path
) -> None:
    port = pages.server_address[1]
    allowed = f"http://127.0.0.1:{port}"
    with ServerProcess(None, tmp_path, "--allow-origin", allowed, "--api-key", f"ann={KEY}") as server:
        tab = chromium.new_page()
        tab.goto(allowed)
        assert tab.evaluate(CALL, [server.url, KEY]) == [200, True, True]
        assert tab.evaluate(CALL, [server.url, "not-a-key"])[0] == 401  # an error can be read as well
        tab.goto(f"http://localhost:{port}")
        assert tab.evaluate(CALL, [server.url, KEY]) == "TypeError"
        tab.close()
