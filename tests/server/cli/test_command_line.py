"""`warmturn` as a program: what it prints, what it imports, how it starts and ends. The engine is a scripted one."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from scripted_server import PATIENCE, environment, serving, warmturn

from server.config.serve_options import DEMO_FOLDER, ServeConfig
from server.config.usage_error import UsageError
from server.engine.launcher import EngineLauncher
from server.serve import serve

SLOW = {"torch", "transformers", "uvicorn", "fastapi", "sqlalchemy", "zmq", "httpx"}


@pytest.mark.parametrize(
    "arguments", [("--help",), ("serve", "--help"), ("doctor", "--help"), ("bench", "--help"), ("--version",)]
)
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
    assert ran.stderr == "warmturn: --port: expected a whole number\n"


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
    with serving(
        tmp_path, "--api-key", "endless=k1", "--drain-seconds", "0.3"
    ) as server:  # this tenant's turns never end by themselves
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
        assert "stopping; a second signal stops at once\n" in server.output
        assert server.data.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_loading_ends_with_0(number: signal.Signals, tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        server.wait_for("(reading weights)")
        assert server.end(number) == 0
        assert "Traceback" not in server.output


def test_a_server_on_all_interfaces_without_keys_and_a_context_that_cannot_be_had_are_told(tmp_path: Path) -> None:
    with serving(tmp_path, "--host", "0.0.0.0", "--max-context", "600") as server:
        server.wait_for("(warning: no --api-key is set)")
        server.wait_for("(--max-context: the model and the KV memory allow 512, not 600)")


def test_a_model_without_a_chat_template_is_told_and_its_chats_are_refused_with_the_reason(tmp_path: Path) -> None:
    folder = tmp_path / "base"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_FOLDER / name, folder)
    with serving(tmp_path, str(folder)) as server:
        server.wait_for("(the model has no chat template: it completes text, and chats are refused)")
        url = server.wait_for(r"serving base at (\S+)")
        chat = {"model": "base", "messages": [{"role": "user", "content": "Hello"}]}
        answer = httpx.post(f"{url}/v1/chat/completions", json=chat)
    assert answer.status_code == 400
    assert "no chat template" in answer.json()["error"]["message"]


def test_a_chat_template_that_takes_nothing_is_told(tmp_path: Path) -> None:
    folder = tmp_path / "broken"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_FOLDER / name, folder)
    (folder / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content")
    with serving(tmp_path, str(folder)) as server:
        server.wait_for("(the model's chat template takes no simple conversation: chats may be refused)")


def test_retries_of_the_hub_are_not_told_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_VERBOSITY", "")
    monkeypatch.delenv("HF_HUB_VERBOSITY")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(UsageError):
            serve(ServeConfig(port=taken.getsockname()[1], data_dir=tmp_path), EngineLauncher())
    assert os.environ["HF_HUB_VERBOSITY"] == "error"
