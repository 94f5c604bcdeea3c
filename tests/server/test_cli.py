"""`warmturn` as a program: what it prints, what it imports, how it starts and ends. The engine is a scripted one."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from server.config import ServeConfig, UsageError
from server.serve import serve

ROOT = Path(__file__).resolve().parent.parent.parent
PATIENCE = 60.0  # seconds until a server that does not start fails its test
SLOW = {"torch", "transformers", "uvicorn", "fastapi", "sqlalchemy", "zmq", "httpx"}

SERVE = """
import sys, scripted_engine
from server.__main__ import main
import server.serve
scripted = server.serve.serve
server.serve.DRAIN_SECONDS = 0.3
server.serve.serve = lambda config: scripted(config, command=scripted_engine.COMMAND)
sys.exit(main(sys.argv[1:]))
"""


def environment() -> dict[str, str]:
    """Ours without warmturn's variables, offline, and with the tests' modules importable."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WARMTURN_")}
    return {**kept, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def warmturn(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run the program to its end."""
    command = (sys.executable, "-P", "-c", SERVE, *arguments)
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=PATIENCE, check=False)


class Server:
    """A running `warmturn serve`, with what it printed."""

    def __init__(self, tmp_path: Path, *arguments: str) -> None:
        self.log = tmp_path / "output"
        self.data = tmp_path / "data"
        command = (sys.executable, "-P", "-c", SERVE, "serve", "--port", "0", "--data-dir", str(self.data), *arguments)
        with self.log.open("w") as output:
            self.process = subprocess.Popen(command, env=environment(), stdout=output, stderr=subprocess.STDOUT)

    @property
    def output(self) -> str:
        return self.log.read_text()

    def wait_for(self, pattern: str) -> str:
        """The first group of ``pattern``, once the server has printed it."""
        found = wait(lambda: re.search(pattern, self.output) or self.process.poll() is not None)
        assert isinstance(found, re.Match), self.output
        return str(found.group(1))

    def url(self) -> str:
        return self.wait_for(r"serving demo at (\S+) \(")

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(PATIENCE)


def wait(condition: Callable[[], object]) -> object:
    """The first true value of ``condition``."""
    until = time.monotonic() + PATIENCE
    while not (value := condition()):
        assert time.monotonic() < until, "waited too long"
        time.sleep(0.02)
    return value


@contextmanager
def serving(tmp_path: Path, *arguments: str) -> Iterator[Server]:
    server = Server(tmp_path, *arguments)
    try:
        yield server
    finally:
        server.process.kill()
        server.process.wait()


@pytest.mark.parametrize("arguments", [("--help",), ("serve", "--help"), ("chat", "--help"), ("--version",)])
def test_help_imports_nothing_slow(arguments: tuple[str, ...]) -> None:
    script = (
        "import sys\nfrom server.__main__ import main\n"
        "try: main(sys.argv[1:])\nexcept SystemExit as e: assert e.code == 0\n"
        "print(*{name.partition('.')[0] for name in sys.modules}, file=sys.stderr)"
    )
    ran = subprocess.run(
        (sys.executable, "-P", "-c", script, *arguments), env=environment(), capture_output=True, text=True, check=True
    )
    assert "warmturn" in ran.stdout
    assert not SLOW & set(ran.stderr.split())


def test_a_usage_error_is_one_line_and_status_2() -> None:
    ran = warmturn("serve", "--port", "many")
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr == "warmturn: --port: input should be a valid integer, unable to parse string as an integer\n"


def test_a_port_in_use_is_told_before_anything_is_loaded(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ran = warmturn("serve", "--port", str(port), "--data-dir", str(tmp_path / "data"))
    assert ran.returncode == 2
    assert ran.stderr == f"warmturn: --port: {port} is in use on 127.0.0.1; another one: --port {port + 1}\n"
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("host", ["203.0.113.7", "no.such.host.invalid"])
def test_an_address_of_another_machine(host: str, tmp_path: Path) -> None:
    ran = warmturn("serve", "--port", "0", "--host", host, "--data-dir", str(tmp_path / "data"))
    assert ran.returncode == 2
    assert re.fullmatch(r"warmturn: --host.*\n", ran.stderr)


def test_a_data_dir_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("")
    ran = warmturn("serve", "--port", "0", "--data-dir", str(tmp_path / "data"))
    assert ran.returncode == 2
    assert re.fullmatch(r"warmturn: --data-dir: \S+ cannot be used: .*\n", ran.stderr)


def test_a_damaged_log_is_told(tmp_path: Path) -> None:
    (tmp_path / "log.sqlite").write_bytes(b"no database" * 1000)
    ran = warmturn("serve", "--port", "0", "--data-dir", str(tmp_path))
    assert (ran.returncode, ran.stderr.count("\n")) == (2, 1)
    assert ran.stderr.startswith("warmturn: the session log cannot be opened: ")


def test_a_model_that_cannot_be_served_is_one_line_and_status_2(tmp_path: Path) -> None:
    ran = warmturn("serve", "fail", "--port", "0", "--data-dir", str(tmp_path))
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr == "warmturn: reading weights\nwarmturn: no such model: fail\n"


def test_a_server_from_its_first_moment_to_sigterm(tmp_path: Path) -> None:
    with serving(tmp_path, "--api-key", "endless=k1") as server:  # this tenant's turns never end by themselves
        url = server.url()
        headers = {"authorization": "Bearer k1"}
        assert httpx.get(f"{url}/health").json() == {"status": "ok"}
        assert httpx.get(f"{url}/v1/models").status_code == 401
        assert httpx.get(f"{url}/v1/models", headers=headers).json()["data"][0]["id"] == "demo"
        assert "reading weights" in server.output
        assert "everyone" not in server.output

        other = warmturn("serve", "--port", "0", "--data-dir", str(server.data))
        assert (other.returncode, other.stderr) == (
            2,
            f"warmturn: --data-dir: {server.data} is in use by another server\n",
        )

        body = {"messages": [{"role": "user", "content": "hello"}], "stream": True}
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, headers=headers, timeout=PATIENCE) as reply:
            events = (line for line in reply.iter_lines() if line.startswith("data:"))
            assert [next(events) for _ in range(3)][2].startswith("data: {")
            server.process.terminate()
            *_, last = events
        assert '"error"' in last  # cut off, and told so
        assert server.process.wait(PATIENCE) == 0
        assert "stopping; once more to leave at once\n" in server.output
        assert server.data.stat().st_mode & 0o077 == 0


def test_ctrl_c_while_loading_ends_with_0(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        server.wait_for("(reading weights)")
        assert server.end(signal.SIGINT) == 0
        assert "Traceback" not in server.output


def test_without_keys_on_all_interfaces_there_is_a_warning(tmp_path: Path) -> None:
    with serving(tmp_path, "--host", "0.0.0.0") as server:
        server.wait_for("(warning: no --api-key is set)")


def test_a_context_that_cannot_be_had_is_told(tmp_path: Path) -> None:
    with serving(tmp_path, "--max-context", "600") as server:
        server.wait_for("(--max-context: the model and the KV memory allow 512, not 600)")


def test_retries_of_the_hub_are_not_told_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_VERBOSITY", "")
    monkeypatch.delenv("HF_HUB_VERBOSITY")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(UsageError):
            serve(ServeConfig(port=taken.getsockname()[1], data_dir=tmp_path))
    assert os.environ["HF_HUB_VERBOSITY"] == "error"


def test_the_engine_goes_when_the_server_is_killed(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        server.wait_for("(reading weights)")
        children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children")
        if not children.exists():
            pytest.skip("this system does not list a process's children")
        (engine,) = (Path(f"/proc/{pid}") for pid in children.read_text().split())
        server.end(signal.SIGKILL)
        wait(lambda: not engine.exists() or "State:\tZ" in (engine / "status").read_text())
