"""A model's files are asked for before modules are imported, where there is memory for them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from scheduler import read_ahead as module
from scheduler.read_ahead import read_ahead

pytestmark = pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="this system cannot be asked")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that the system was asked for."""
    found: list[str] = []

    def advise(descriptor: int, *_: int) -> None:
        found.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)

    monkeypatch.setattr(os, "posix_fadvise", advise)
    return found


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ("m.gguf", ["m.gguf"]),
        ("p-00001-of-00002.gguf", ["p-00001-of-00002.gguf", "p-00002-of-00002.gguf"]),
        ("p-00002-of-00002.gguf", []),
        ("missing.gguf", []),
        (".", ["a.safetensors", "b.safetensors"]),
        ("owner/repository", []),
    ],
)
def test_what_a_model_is_read_from(given: str, names: list[str], tmp_path: Path, asked: list[str]) -> None:
    files = "m.gguf p-00001-of-00002.gguf p-00002-of-00002.gguf a.safetensors b.safetensors tokenizer.json"
    for name in files.split():
        (tmp_path / name).write_bytes(b"12")
    thread = read_ahead(str(tmp_path / given))
    if thread is not None:
        thread.join()
    assert asked == names


def test_what_would_not_fit_is_not_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "m.gguf").write_bytes(b"1234")
    memory = tmp_path / "meminfo"
    monkeypatch.setattr(module, "_MEMORY", memory)
    assert read_ahead(str(tmp_path / "m.gguf")) is None  # nothing is known
    memory.write_text("MemTotal: 9 kB\nMemAvailable: 0 kB\n")
    assert read_ahead(str(tmp_path / "m.gguf")) is None
    memory.write_text("MemTotal: 9 kB\nMemAvailable: 1 kB\n")
    assert read_ahead(str(tmp_path / "m.gguf")) is not None
