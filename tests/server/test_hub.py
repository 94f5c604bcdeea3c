"""A hub that cannot be reached is noticed before transformers tries it again and again."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from server.hub import look_for


@pytest.fixture
def listener(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    for name in ("HF_HUB_OFFLINE", "http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{listening.getsockname()[1]}")
        yield listening


def offline() -> bool:
    return "HF_HUB_OFFLINE" in os.environ


def test_a_hub_that_answers_is_asked(listener: socket.socket, capsys: pytest.CaptureFixture[str]) -> None:
    look_for("somebody/some-model")
    assert not offline()
    assert "looking for somebody/some-model at http://127.0.0.1" in capsys.readouterr().err


def test_without_a_hub_what_is_there_is_taken(listener: socket.socket, capsys: pytest.CaptureFixture[str]) -> None:
    listener.close()
    look_for("somebody/some-model")
    assert offline()
    assert "cannot be reached" in capsys.readouterr().err


def test_folders_proxies_and_those_who_are_offline_need_no_hub(
    listener: socket.socket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    listener.close()
    for local in (str(tmp_path), "missing.gguf", "./missing.gguf", "/nowhere/at/all/missing.gguf"):
        look_for(local)
        assert not offline()
    monkeypatch.setenv("https_proxy", "http://proxy:3128")
    look_for("somebody/some-model")
    assert not offline()
    assert capsys.readouterr().err == ""
