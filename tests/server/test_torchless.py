"""A server process has no torch, and reads the tokenizers that need it with the help of another process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from server_process import ServerProcess

from server.chat.chat_tokenizer import ChatTokenizer
from server.log.logged_message import LoggedMessage

pytestmark = pytest.mark.wide

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "server" / "demo"

# Prints the fingerprint of the demo's tokenizer and the ids of a text, as JSON, without torch. With "needs torch"
# reading it fails the first time as it does for a GGUF file.
READ = """
import json, sys
from server import torchless
from server.chat.chat_tokenizer import ChatTokenizer
from server.log.logged_message import LoggedMessage

torchless.without_torch()
if "needs torch" in sys.argv:
    read = torchless._read
    def refuse(model):
        torchless._read = read
        raise ImportError("requires torch")
    torchless._read = refuse
tokens = ChatTokenizer.load(sys.argv[1])
text = tokens.render([LoggedMessage("user", "How far is the moon?")], generation_prompt=True)
assert sys.modules["torch"] is None
print(json.dumps([tokens.fingerprint(7), text, tokens.encode(text, special=False), tokens.info]))
"""


def read(*how: str) -> list[object]:
    """What ``READ`` prints, in a fresh interpreter."""
    command = [sys.executable, "-c", READ, str(DEMO), *how]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found: list[object] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(None, tmp_path_factory.mktemp("torchless"), warm=False) as running:
        yield running


def mapped(pid: int) -> set[str]:
    """The names of the files that a process has mapped."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {Path(parts[5]).name for line in lines if len(parts := line.split(maxsplit=5)) > 5}


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="this system does not show what a process maps")
def test_a_server_process_has_no_torch_after_it_has_served_a_chat(server: ServerProcess) -> None:
    chat = {"model": "m", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    assert server.post("/v1/chat/completions", chat).status_code == 200

    def of_torch(names: set[str]) -> set[str]:
        return {name for name in names if name.startswith(("libtorch", "libc10"))}

    assert of_torch(mapped(server.process.pid)) == set()
    assert of_torch(mapped(server.engine_pid())) != set(), "the engine's are found, so the server's would be"


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="this system does not show what a process maps")
def test_a_server_process_has_neither_transformers_nor_numpy(server: ServerProcess) -> None:
    chat = {"model": "m", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "regex": "[a-z]+"}
    assert server.post("/v1/chat/completions", chat).status_code == 200

    def numpy(pid: int) -> bool:
        return any(name.startswith("_multiarray_umath") for name in mapped(pid))

    assert not numpy(server.process.pid), "transformers imports it"
    assert numpy(server.engine_pid())


def usual() -> list[object]:
    """The same in this process, which has torch."""
    assert sys.modules["torch"] is torch
    tokens = ChatTokenizer.load(str(DEMO))
    text = tokens.render([LoggedMessage("user", "How far is the moon?")], generation_prompt=True)
    made = [tokens.fingerprint(7), text, tokens.encode(text, special=False), tokens.info]
    found: list[object] = json.loads(json.dumps(made))
    return found


@pytest.mark.slow
def test_a_tokenizer_is_the_same_without_torch_and_through_another_process() -> None:
    assert read() == usual()
    assert read("needs torch") == usual()
