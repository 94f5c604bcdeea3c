"""A model's files are asked for before modules are imported, where there is memory for them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from scheduler import read_ahead as module
from scheduler import tile_space
from scheduler.read_ahead import read_ahead
from scheduler.weights import known_files

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
    thread = read_ahead(str(tmp_path / "m.gguf"))
    assert thread is not None
    thread.join()  # it would be heard by the next test


def test_the_packed_weights_of_an_earlier_start_are_read_instead(
    tmp_path: Path, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("TILE_CACHE_DIR", raising=False)
    monkeypatch.setattr(known_files, "_SETTLED", -1.0)
    mapped: list[str] = []
    plain = module._read_in_huge_pages

    def read(file: Path) -> None:
        mapped.append(file.name)
        plain(file)

    monkeypatch.setattr(module, "_read_in_huge_pages", read)
    model = tmp_path / "m.gguf"
    model.write_bytes(b"12")
    known_files.digest_of([known_files.OpenedFile(model, model.stat())], "config", lambda: "0" * 32)
    known_files.note_tiles("0" * 32, "digest-1.tiles")
    for there in (False, True):
        if there:
            (tile_space.folder() / "digest-1.tiles").write_bytes(bytes(100_000))
        thread = read_ahead(str(model))
        assert thread is not None
        thread.join()
    assert (asked, mapped) == (["m.gguf"], ["digest-1.tiles"])
    thread = read_ahead(str(model), 0)  # it is not used
    assert thread is not None
    thread.join()
    assert (asked, mapped) == (["m.gguf"] * 2, ["digest-1.tiles"])


def test_what_cannot_be_looked_at_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(files: list[Path]) -> int:
        raise FileNotFoundError

    (tmp_path / "m.gguf").write_bytes(b"12")
    monkeypatch.setattr(module, "_nbytes", gone)
    assert read_ahead(str(tmp_path / "m.gguf")) is None
