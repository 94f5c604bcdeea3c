"""Build the image from the Dockerfile, start it as an orchestrator would, talk to it, stop it in the middle of a reply.

``python -m deploy.check_image --work FOLDER``, on Linux as root, with debootstrap; nothing of it needs a container
engine. Prints what it saw, and ends with status 1 at the first thing that is not as it should be.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from deploy.check_image.builder import Builder, Image
from deploy.check_image.container import Container

ROOT = Path(__file__).resolve().parents[2]
GRACE = 90.0  # seconds, as in deploy/compose.yaml
START = 600.0  # seconds that a start may take on a busy machine
BEGUN = 0.2  # seconds after which a server listens to nobody yet
STREAM = 150  # tokens of the reply that is running when the container is stopped


class Wrong(Exception):
    """Something is not as it should be."""


def main() -> int:
    options = _options()
    work = Path(options.work).resolve()
    work.mkdir(parents=True, exist_ok=True)
    binds = dict(_bind(text) for text in options.bind)
    arguments = dict(text.partition("=")[::2] for text in options.build_arg)
    try:
        started = time.monotonic()
        builder = Builder(ROOT, work, options.mirror, binds, arguments)
        image = builder.build()
        say(f"built in {time.monotonic() - started:.0f} s")
        weigh(image)
        with tempfile.TemporaryDirectory(prefix="volumes-", dir=work) as folder:
            try_out(image, Path(folder))
    except (Wrong, RuntimeError, ValueError, OSError, subprocess.SubprocessError) as error:
        say(f"FAILED: {error}")
        return 1
    return 0


def weigh(image: Image) -> None:
    """Say how large the image is, and what of it."""
    packages = image.root / "opt/venv/lib/python3.11/site-packages"
    parts = {"Python packages": image.root / "opt/venv", "of them torch": packages / "torch"}
    say(
        f"image: {size(image.root):.0f} MB; " + ", ".join(f"{name} {size(path):.0f} MB" for name, path in parts.items())
    )


def try_out(image: Image, folder: Path) -> None:
    """Three containers, one after the other, on the same volumes. Raises Wrong."""
    volumes = {place: _volume(folder, place, image) for place in image.volumes}
    port = _free_port()
    server = Server(Container(image, volumes, {"WARMTURN_PORT": str(port)}), image, port)
    try:
        say(f"cold start until the health check passes: {server.ready():.1f} s")
        for kernel in ("cache.attention.cpu", "scheduler.accel.cpu.program_kernel"):
            expect(server.container.run(["python", "-m", kernel]).returncode == 0, f"the kernel of {kernel} is loaded")
        writable = server.container.run(["python", "-c", _WRITABLE]).stdout.split()
        expect(set(writable) == {"/tmp", "/dev/shm", *image.volumes}, f"written can be to {' '.join(sorted(writable))}")
        told = server.chat("My secret code is 4821.")
        say(f"said: {told['choices'][0]['message']['content']!r}")
        server.stops_in_a_stream()
        server = Server(Container(image, volumes, {"WARMTURN_PORT": str(port)}), image, port)
        say(f"second start, on the same volumes: {server.ready():.1f} s")
        asked = server.chat("What is the code?")
        answer = asked["choices"][0]["message"]["content"]
        reused = asked["usage"]["prompt_tokens_details"]["cached_tokens"]
        expect("4821" in answer and reused > 0, f"after the restart: {answer!r}, {reused} tokens reused")
        server.container.signal()
        expect(server.container.wait(GRACE) == 0, "an idle container stops with status 0")
        server = Server(Container(image, volumes, {"WARMTURN_PORT": str(port)}), image, port)
        time.sleep(BEGUN)
        server.container.signal()
        status = server.container.wait(GRACE)
        expect(status in (0, 128 + signal.SIGTERM), f"one that has hardly begun is stopped, too: status {status}")
    finally:
        server.container.kill()


class Server:
    """A container that serves the demo model."""

    def __init__(self, container: Container, image: Image, port: int) -> None:
        self.container = container
        self._health = image.healthcheck
        self._port = port
        self._started = time.monotonic()

    def ready(self) -> float:
        """Wait until the image's own health check passes; the seconds since the start. Raises Wrong."""
        failed = 0
        while self.container.run(self._health).returncode != 0:
            failed += 1
            time.sleep(0.2)
            if time.monotonic() - self._started > START:
                raise Wrong("the health check does not pass")
        expect(failed > 0, f"the health check failed {failed} times before")
        return time.monotonic() - self._started

    def chat(self, text: str) -> dict[str, Any]:
        """One turn on the one session, whose history is the server's."""
        with self._post("/v1/sessions/check/chat/completions", {"content": text}, stream=False) as response:
            answer: dict[str, Any] = json.loads(response.read())
            return answer

    def stops_in_a_stream(self) -> None:
        """Stop the container while it streams: the stream ends as it should, then the server. Raises Wrong."""
        body = {"content": "Repeat after me: on and on.", "max_tokens": STREAM, "ignore_eos": True, "temperature": 1}
        with self._post("/v1/sessions/stream/chat/completions", body, stream=True) as response:
            first = response.readline()
            self.container.signal()
            since = time.monotonic()
            lines = [line.decode().rstrip() for line in [first, *response] if line.strip()]
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        reasons = [choice["finish_reason"] for event in events for choice in event.get("choices", [])]
        ended = [reason for reason in reasons if reason]
        expect(
            lines[-1] == "data: [DONE]" and ended == ["length"],
            f"told to stop after the first of {len(lines)} events: the last are {ended} and {lines[-1][6:]}",
        )
        status = self.container.wait(GRACE)
        expect(
            status == 0, f"then the server, with status {status}, {time.monotonic() - since:.1f} s after it was told"
        )

    def _post(self, path: str, body: dict[str, Any], *, stream: bool) -> Any:
        content = {"messages": [{"role": "user", "content": body.pop("content")}], "stream": stream, **body}
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(f"http://127.0.0.1:{self._port}{path}", json.dumps(content).encode(), headers)
        return urllib.request.urlopen(request, timeout=START)


_WRITABLE = """
import os, tempfile
for folder in [*(line.split()[1] for line in open("/proc/mounts")), "/opt", "/opt/cache/warmturn", "/var/tmp", "/home"]:
    try:
        with tempfile.TemporaryFile(dir=folder):
            print(folder)
    except OSError:
        pass
"""


def expect(right: bool, what: str) -> None:
    """Say what was seen. Raises Wrong if it is not right."""
    if not right:
        raise Wrong(what)
    say(what)


def say(text: str) -> None:
    print(f"image-check: {text}", flush=True)


def size(folder: Path) -> float:
    """Megabytes on disk, each file once."""
    told = subprocess.run(["du", "-s", "-B1", str(folder)], capture_output=True, text=True, check=True).stdout
    return int(told.split()[0]) / 1e6


def _volume(folder: Path, place: str, image: Image) -> Path:
    """A folder as Kubernetes hands it to a pod with an fsGroup: root's, and the group's to write to."""
    volume = folder / place.strip("/")
    volume.mkdir()
    os.chown(volume, 0, int(image.user.partition(":")[2]))
    volume.chmod(0o2775)
    return volume


def _bind(text: str) -> tuple[str, Path]:
    outer, _, inner = text.partition(":")
    return inner or outer, Path(outer).resolve()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m deploy.check_image", description=__doc__)
    parser.add_argument("--work", required=True, metavar="FOLDER", help="where root folders are made; the base is kept")
    parser.add_argument("--mirror", metavar="URL", help="Debian's packages (default: debootstrap's)")
    parser.add_argument(
        "--bind", action="append", default=[], metavar="HERE[:THERE]", help="what the steps see of this machine"
    )
    parser.add_argument("--build-arg", action="append", default=[], metavar="NAME=VALUE", help="as of docker build")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
