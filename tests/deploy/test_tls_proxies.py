"""One server behind a proxy with TLS: the configurations for nginx and Caddy as they are shipped, over a stand-in for
the server, with a certificate of the test's own."""

from __future__ import annotations

import json
import os
import shutil
import ssl
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread

import httpx
import pytest
from deploy_kit import DEPLOY
from server_process import START, free_port

NAME = "chat.example.org"
UPSTREAM = "127.0.0.1:8000"
PATIENCE = 30.0
PATH = os.environ.get("PATH", "") + os.pathsep + "/usr/sbin"


class Stub:
    """In place of the server: tells what it was asked, and streams a second event when the first one was read."""

    def __init__(self) -> None:
        self.go_on = Event()
        self.asked_for_more = False  # in time: not because the first event was kept back
        stub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                if self.path == "/v1/stream":
                    self.send_response(200)
                    self.send_header("content-type", "text/event-stream")
                    self.send_header("transfer-encoding", "chunked")
                    self.end_headers()
                    self.chunk(b"data: first\n\n")
                    stub.asked_for_more = stub.go_on.wait(PATIENCE)
                    self.chunk(b"data: second\n\n")
                    self.chunk(b"")
                    return
                self.answer(0)

            def do_POST(self) -> None:
                read, left = 0, int(self.headers["content-length"])
                while left and (data := self.rfile.read(min(left, 1 << 20))):
                    read, left = read + len(data), left - len(data)
                self.answer(read)

            def chunk(self, data: bytes) -> None:
                self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
                self.wfile.flush()

            def answer(self, read: int) -> None:
                headers = {name.lower(): value for name, value in self.headers.items()}
                body = json.dumps({"path": self.path, "headers": headers, "read": read}).encode()
                self.send_response(200)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self.http.server_port


class Proxy:
    """A proxy that runs: its ports, and a client that trusts its certificate."""

    def __init__(self, port: int, plain: int, certificate: Path, stub: Stub) -> None:
        self.url, self.plain, self.stub = f"https://localhost:{port}", f"http://localhost:{plain}", stub
        trust = ssl.create_default_context(cafile=str(certificate))
        self.client = httpx.Client(verify=trust, timeout=PATIENCE, trust_env=False)


def certificate(folder: Path) -> tuple[Path, Path]:
    program = shutil.which("openssl")
    if program is None:
        pytest.skip("openssl is not installed, which makes the certificate")
    chain, key = folder / "fullchain.pem", folder / "privkey.pem"
    made = [program, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    made += ["-addext", "subjectAltName=DNS:localhost", "-keyout", str(key), "-out", str(chain)]
    subprocess.run(made, check=True, capture_output=True)
    return chain, key


def nginx(folder: Path, port: int, plain: int, upstream: int) -> list[str]:
    """The command of nginx over the stand-in."""
    program = shutil.which("nginx", path=PATH)
    if program is None:
        pytest.skip("nginx is not installed here: Debian's package is nginx-light")
    changes = {
        UPSTREAM: f"127.0.0.1:{upstream}",
        NAME: "localhost",
        "listen 443 ssl": f"listen 127.0.0.1:{port} ssl",
        "listen 80": f"listen 127.0.0.1:{plain}",
        "/etc/warmturn/tls": str(folder),
        "/run/nginx.pid": f"{folder}/pid",
        "/var/log/nginx": str(folder),
        "processes auto": "processes 1",
        "access_log": f"client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; access_log",
    }
    text = replaced((DEPLOY / "nginx-tls.conf").read_text(), changes)
    if os.geteuid() == 0:
        text = f"user root;\n{text}"  # the test's folders are root's
    file = folder / "nginx.conf"
    file.write_text(text)
    command = [program, "-p", str(folder), "-c", str(file), "-e", str(folder / "error.log")]
    checked = subprocess.run([*command, "-t"], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr
    assert "warn" not in checked.stderr, checked.stderr
    return [*command, "-g", "daemon off;"]


def caddy(folder: Path, port: int, plain: int, upstream: int) -> list[str]:
    """The command of Caddy over the stand-in."""
    program = shutil.which("caddy", path=PATH)
    if program is None:
        pytest.skip("caddy is not installed here: Debian's package is caddy")
    ours = f"{{\n\tadmin off\n\tauto_https disable_certs\n\thttp_port {plain}\n\thttps_port {port}\n"
    pair = f"\ttls {folder}/fullchain.pem {folder}/privkey.pem\n"
    changes = {
        UPSTREAM: f"127.0.0.1:{upstream}",
        "\n{\n": f"\n{ours}",
        f"\n{NAME} {{\n": f"\nhttps://localhost:{port} {{\n{pair}",
    }
    file = folder / "Caddyfile"
    file.write_text(replaced((DEPLOY / "Caddyfile").read_text(), changes))
    return [program, "run", "--config", str(file), "--adapter", "caddyfile"]


def replaced(text: str, changes: dict[str, str]) -> str:
    for old, new in changes.items():
        assert old in text, old
        text = text.replace(old, new)
    return text


@pytest.fixture(params=[nginx, caddy], scope="module")
def proxy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    folder = tmp_path_factory.mktemp("proxy")
    chain, _ = certificate(folder)
    port, plain = free_port(), free_port()
    with ExitStack() as stack, (folder / "output").open("wb") as output:
        stub = Stub()
        stack.callback(stub.http.server_close)
        command = request.param(folder, port, plain, stub.port)  # skips the tests where there is no such proxy
        thread = Thread(target=stub.http.serve_forever, args=(0.01,))
        thread.start()
        stack.callback(thread.join)
        stack.callback(stub.http.shutdown)
        environment = {**os.environ, "XDG_DATA_HOME": str(folder), "XDG_CONFIG_HOME": str(folder)}
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
        stack.callback(process.wait, PATIENCE)
        stack.callback(process.terminate)
        running = Proxy(port, plain, chain, stub)
        stack.callback(running.client.close)
        deadline = time.monotonic() + START
        while True:
            try:
                running.client.get(f"{running.url}/health")
                break
            except httpx.TransportError:
                assert time.monotonic() < deadline, (folder / "output").read_text()
                assert process.poll() is None, (folder / "output").read_text()
                time.sleep(0.05)
        yield running


def test_the_server_learns_who_asks_and_how(proxy: Proxy) -> None:
    told = {"x-forwarded-for": "6.6.6.6", "x-forwarded-proto": "gopher", "x-request-id": "mine", "x-session-id": "s"}
    asked = proxy.client.get(f"{proxy.url}/v1/models?a=b%20c", headers={**told, "authorization": "Bearer key"}).json()
    headers = asked["headers"]
    assert asked["path"] == "/v1/models?a=b%20c"
    assert headers["host"] == proxy.url.removeprefix("https://")
    assert headers["x-forwarded-for"] == "127.0.0.1"  # not what the client says
    assert headers["x-forwarded-proto"] == "https"
    assert (headers["x-request-id"], headers["x-session-id"]) == ("mine", "s")
    assert headers["authorization"] == "Bearer key"


def test_events_leave_as_they_come(proxy: Proxy) -> None:
    proxy.stub.go_on.clear()
    try:
        with proxy.client.stream("GET", f"{proxy.url}/v1/stream") as answer:
            pieces = answer.iter_bytes()
            assert next(pieces) == b"data: first\n\n"  # the second one is not sent before
            proxy.stub.go_on.set()
            assert b"".join(pieces) == b"data: second\n\n"
        assert proxy.stub.asked_for_more
    finally:
        proxy.stub.go_on.set()


def test_capsules_are_larger_than_other_bodies(proxy: Proxy, request: pytest.FixtureRequest) -> None:
    large = bytes(65 << 20)
    assert proxy.client.post(f"{proxy.url}/v1/sessions/import", content=large).json()["read"] == len(large)
    allowed = bytes(63 << 20)
    assert proxy.client.post(f"{proxy.url}/v1/chat/completions", content=allowed).json()["read"] == len(allowed)
    if request.node.callspec.params["proxy"] is nginx:  # Caddy leaves that to the server
        assert proxy.client.post(f"{proxy.url}/v1/chat/completions", content=large).status_code == 413


def test_a_wish_for_a_websocket_reaches_the_server_and_others_keep_their_connections(proxy: Proxy) -> None:
    wish = {"upgrade": "websocket", "connection": "Upgrade"}
    headers = proxy.client.get(f"{proxy.url}/v1/responses", headers=wish).json()["headers"]
    assert (headers["upgrade"], headers["connection"].lower()) == ("websocket", "upgrade")
    headers = proxy.client.get(f"{proxy.url}/v1/models").json()["headers"]
    assert "upgrade" not in headers
    assert headers.get("connection", "") in ("", "Keep-Alive")


def test_figures_do_not_leave_the_machine(proxy: Proxy) -> None:
    assert proxy.client.get(f"{proxy.url}/metrics").status_code == 404


def test_plain_http_is_sent_to_tls(proxy: Proxy, request: pytest.FixtureRequest) -> None:
    answer = proxy.client.get(f"{proxy.plain}/v1/models")
    assert answer.status_code == 308
    assert answer.headers["location"].startswith("https://localhost")


def test_old_tls_is_refused(proxy: Proxy) -> None:
    trust = ssl.create_default_context()
    trust.check_hostname, trust.verify_mode = False, ssl.CERT_NONE
    trust.maximum_version = ssl.TLSVersion.TLSv1_2
    with httpx.Client(verify=trust, trust_env=False) as client:
        assert client.get(f"{proxy.url}/v1/models").status_code == 200
    trust.set_ciphers("DEFAULT:@SECLEVEL=0")
    with pytest.warns(DeprecationWarning, match="TLSVersion.TLSv1_1 is deprecated"):
        trust.minimum_version = trust.maximum_version = ssl.TLSVersion.TLSv1_1
    with httpx.Client(verify=trust, trust_env=False) as client, pytest.raises(httpx.ConnectError):
        client.get(f"{proxy.url}/v1/models")
