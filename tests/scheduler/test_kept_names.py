"""Names that were read once are taken from a file as long as the sources are the same, and from nowhere else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from scheduler.kept_names import Names, keep_names, stamp

NAMES: Names = {frozenset(): {"a.one": {"One", "Uno"}}, frozenset({"torch", "vision"}): {"b.two": {"Two"}}}


class Reader:
    """Counts how often the names are read."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.times = folder, 0

    def names(self) -> Names:
        stamp.cache_clear()  # as in another process
        return keep_names("test.names", (str(self.folder),), self.read)

    def read(self) -> Names:
        self.times += 1
        return NAMES


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Reader:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    sources = tmp_path / "models"
    (sources / "a" / "__pycache__").mkdir(parents=True)
    (sources / "a" / "one.py").write_text("__all__ = ['One', 'Uno']")
    return Reader(sources)


def file(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "warmturn" / "test.names"


def test_they_are_read_once(reader: Reader, tmp_path: Path) -> None:
    assert [reader.names() for _ in range(3)] == [NAMES] * 3
    assert reader.times == 1
    assert file(tmp_path).parent.stat().st_mode & 0o077 == 0
    assert [path.name for path in file(tmp_path).parent.iterdir()] == ["test.names"]


def test_compiled_modules_are_no_sources(reader: Reader) -> None:
    reader.names()
    (reader.folder / "a" / "__pycache__" / "one.pyc").write_bytes(b"x")
    reader.names()
    assert reader.times == 1


def edit(folder: Path) -> None:
    """Another text of the same size, a moment later."""
    path = folder / "a" / "one.py"
    before = path.stat().st_mtime_ns
    path.write_text(path.read_text().replace("Uno", "Ein"))
    os.utime(path, ns=(before + 1, before + 1))


def add(folder: Path) -> None:
    (folder / "a" / "two.py").write_text("")


def remove(folder: Path) -> None:
    (folder / "a" / "one.py").unlink()


def longer(folder: Path) -> None:
    """At the same time, as when a file is unpacked."""
    path = folder / "a" / "one.py"
    before = path.stat().st_mtime_ns
    path.write_text(path.read_text() + "\n")
    os.utime(path, ns=(before, before))


@pytest.mark.parametrize("change", [edit, add, remove, longer])
def test_other_sources_are_read_again(reader: Reader, change: object) -> None:
    reader.names()
    assert callable(change)
    change(reader.folder)
    assert (reader.names(), reader.times) == (NAMES, 2)
    assert (reader.names(), reader.times) == (NAMES, 2)


@pytest.mark.parametrize("place", [0, 63, 64, 127, 128, -1])
def test_a_damaged_file_is_made_anew(reader: Reader, tmp_path: Path, place: int) -> None:
    reader.names()
    data = bytearray(file(tmp_path).read_bytes())
    data[place] ^= 1
    file(tmp_path).write_bytes(data)
    assert (reader.names(), reader.times) == (NAMES, 2)
    assert (reader.names(), reader.times) == (NAMES, 2)


@pytest.mark.parametrize("cut", [0, 10, 130])
def test_a_file_that_was_cut_off_is_made_anew(reader: Reader, tmp_path: Path, cut: int) -> None:
    reader.names()
    file(tmp_path).write_bytes(file(tmp_path).read_bytes()[:cut])
    assert (reader.names(), reader.times) == (NAMES, 2)


def test_without_a_folder_to_keep_them_in_they_are_read_each_time(
    reader: Reader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert [reader.names() for _ in range(2)] == [NAMES] * 2
    assert reader.times == 2


def test_what_reading_raises_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def fail() -> Names:
        raise ValueError("the sources cannot be read")

    with pytest.raises(ValueError, match="cannot be read"):
        keep_names("test.names", (str(tmp_path),), fail)
