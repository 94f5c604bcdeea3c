"""Digests of a model's files are remembered for as long as the files are the same, and no longer."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from scheduler import tile_space
from scheduler.weights import known_files
from scheduler.weights.known_files import KnownFiles, OpenedFile, known_of, note_tiles


@pytest.fixture
def paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("TILE_CACHE_DIR", raising=False)
    monkeypatch.setattr(known_files, "_SETTLED", -1.0)
    found = [tmp_path / "a", tmp_path / "b"]
    for path in found:
        path.write_bytes(b"weights")
    return found


def opened(paths: list[Path]) -> list[OpenedFile]:
    return [OpenedFile(path, os.stat(path)) for path in paths]


def digest_of(paths: list[Path], config: str, make: Callable[[], str]) -> str:
    """As of files that have just been opened."""
    return known_files.digest_of(opened(paths), config, make)


def digest(number: int) -> str:
    return f"{number:032x}"


def kept(paths: list[Path]) -> KnownFiles:
    found = known_of(paths)
    assert found is not None
    return found


class Reader:
    """Makes digests, and counts."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> str:
        self.count += 1
        return digest(self.count)


def test_files_are_read_once(paths: list[Path]) -> None:
    make = Reader()
    assert [digest_of(paths, "config", make) for _ in range(3)] == [digest(1)] * 3
    assert digest_of(paths, "another", make) == digest(2)
    assert digest_of(paths[:1], "config", make) == digest(3)


def _longer(path: Path) -> None:
    path.write_bytes(b"weights and more")


def _in_place(path: Path) -> None:
    """Other bytes, and the time of change of before."""
    facts = path.stat()
    with path.open("r+b") as file:
        file.write(b"W")
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))


def _renamed(path: Path) -> None:
    """Another file with the same size and times."""
    facts, other = path.stat(), path.with_name("other")
    other.write_bytes(b"WEIGHTS")
    os.utime(other, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    other.replace(path)


@pytest.mark.parametrize("change", [_longer, _in_place, _renamed])
def test_a_changed_file_is_read_again(change: Callable[[Path], None], paths: list[Path]) -> None:
    make = Reader()
    digest_of(paths, "config", make)
    change(paths[1])
    assert digest_of(paths, "config", make) == digest(2)


def test_a_file_that_changes_meanwhile_is_not_remembered(paths: list[Path]) -> None:
    make = Reader()

    def changing() -> str:
        _longer(paths[0])
        return make()

    assert digest_of(paths, "config", changing) == digest(1)
    assert digest_of(paths, "config", make) == digest(2)


@pytest.mark.parametrize("change", [_longer, _in_place, _renamed])
def test_a_file_that_was_replaced_after_it_was_opened(change: Callable[[Path], None], paths: list[Path]) -> None:
    """Its mapping has the bytes of the old file."""
    files = opened(paths)
    change(paths[1])
    make = Reader()
    assert known_files.digest_of(files, "config", make) == digest(1)
    assert digest_of(paths, "config", make) == digest(2)


def test_a_file_that_was_replaced_by_a_known_one(paths: list[Path], tmp_path: Path) -> None:
    make = Reader()
    other = tmp_path / "other"
    other.write_bytes(b"other weights")
    known = digest_of([other], "config", make)
    files = opened(paths[:1])
    other.replace(paths[0])
    assert known_files.digest_of(files, "config", make) == digest(2) != known


def test_a_file_that_has_just_changed_is_not_remembered(paths: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_files, "_SETTLED", 1000.0)
    make = Reader()
    assert [digest_of(paths, "config", make) for _ in range(2)] == [digest(1), digest(2)]


def test_what_cannot_be_kept_is_made_again(paths: list[Path]) -> None:
    make = Reader()
    files = opened(paths)
    paths[0].unlink()
    assert known_files.digest_of(files, "config", make) == digest(1)
    paths[0].write_bytes(b"weights")
    tile_space.folder().mkdir(parents=True)
    (tile_space.folder() / "files").write_bytes(b"no folder")
    assert [digest_of(paths, "config", make) for _ in range(2)] == [digest(2), digest(3)]


def test_damage_is_not_believed(paths: list[Path]) -> None:
    make = Reader()
    digest_of(paths, "config", make)
    (kept,) = (tile_space.folder() / "files").iterdir()
    kept.write_bytes(kept.read_bytes()[:-3])
    assert digest_of(paths, "config", make) == digest(2)


@pytest.mark.parametrize("lie", [{"digest": "../../elsewhere"}, {"tiles": "../x.tiles"}, {"tiles": "/x.tiles"}])
def test_names_are_not_paths(lie: dict[str, str], paths: list[Path]) -> None:
    make = Reader()
    digest_of(paths, "config", make)
    (file,) = (tile_space.folder() / "files").iterdir()
    file.write_bytes(msgspec.json.encode(msgspec.structs.replace(kept(paths), **lie)))
    assert known_of(paths) is None
    assert digest_of(paths, "config", make) == digest(2)


def test_what_others_could_have_written_is_not_believed(paths: list[Path]) -> None:
    make = Reader()
    digest_of(paths, "config", make)
    (tile_space.folder() / "files").chmod(0o777)
    assert digest_of(paths, "config", make) == digest(2)


def test_a_user_without_a_home_folder(paths: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", homeless)
    make = Reader()
    assert [digest_of(paths, "config", make) for _ in range(2)] == [digest(1), digest(2)]
    assert known_of(paths) is None
    note_tiles(digest(1), "x.tiles")
    assert tile_space.kept() == []


def test_only_so_many_are_remembered(paths: list[Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(known_files, "_MOST", 2)
    for number in range(4):
        path = tmp_path / str(number)
        path.write_bytes(b"weights")
        digest_of([path], "config", Reader())
    assert len(list((tile_space.folder() / "files").iterdir())) == 2


def test_the_packed_weights_of_files_are_found(paths: list[Path]) -> None:
    digest_of(paths, "config", lambda: digest(1))
    digest_of(paths[:1], "config", lambda: digest(2))
    note_tiles(digest(1), "mine-1.tiles")
    assert [kept(some).tiles for some in (paths, paths[:1])] == ["mine-1.tiles", ""]
    digest_of(paths, "config", lambda: digest(1))
    assert kept(paths).tiles == "mine-1.tiles"
    note_tiles(digest(1), "")
    assert kept(paths).tiles == ""
