"""The room for packed weights that are kept between starts: how much there is, and who goes first."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from scheduler import tile_space


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """On a disk of 100 GB, of which 40 are free."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("TILE_CACHE_DIR", raising=False)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=100 << 30, free=40 << 30))
    found = tile_space.folder()
    found.mkdir(parents=True)
    for number, (name, size) in enumerate({"aa-1": 30, "bb-1": 20, "cc-1": 10}.items()):
        path = found / f"{name}{tile_space.SUFFIX}"
        path.write_bytes(bytes(size))
        os.utime(path, (number, number))
    (found / "lock").touch()
    return found


def names() -> list[str]:
    return [one.path.stem for one in tile_space.kept()]


def test_the_least_recently_used_comes_first(folder: Path) -> None:
    assert [(one.path.stem, one.nbytes) for one in tile_space.kept()] == [("aa-1", 30), ("bb-1", 20), ("cc-1", 10)]
    tile_space.note_use("aa-1.tiles")
    tile_space.note_use("of nobody.tiles")
    assert names() == ["bb-1", "cc-1", "aa-1"]


def test_a_folder_of_the_operators_choice(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILE_CACHE_DIR", "relative")
    assert tile_space.folder() == folder
    monkeypatch.setenv("TILE_CACHE_DIR", str(tmp_path / "volume"))
    assert tile_space.folder() == tmp_path / "volume"
    assert tile_space.kept() == []
    assert tile_space.allowed(None) == 10 << 30


def test_how_much_may_be_kept(folder: Path, tmp_path: Path) -> None:
    assert tile_space.allowed(7) == 7
    assert tile_space.allowed(None) == ((40 << 30) + 60) // 4
    shutil.rmtree(tmp_path / "warmturn")
    assert tile_space.allowed(None) == 10 << 30
    assert tile_space.kept() == []


@pytest.mark.parametrize(
    ("nbytes", "space", "name", "left"),
    [
        (10, 70, "dd-1", ["aa-1", "bb-1", "cc-1"]),
        (11, 70, "dd-1", ["bb-1", "cc-1"]),
        (50, 70, "dd-1", ["cc-1"]),
        (70, 70, "dd-1", []),
        (10, 70, "bb-2", ["aa-1", "cc-1"]),  # of the same model, by another program: no longer of use
        (40, 70, "bb-2", ["cc-1"]),
    ],
)
def test_room_is_made(nbytes: int, space: int, name: str, left: list[str], folder: Path) -> None:
    assert tile_space.make_room(nbytes, space, f"{name}.tiles")
    assert names() == left


def test_what_is_mapped_takes_room_still(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = iter([40 << 30, 1 << 30])

    def usage(path: Path) -> SimpleNamespace:
        return SimpleNamespace(total=100 << 30, free=next(looks))

    monkeypatch.setattr(shutil, "disk_usage", usage)
    assert not tile_space.make_room(50, 70, "dd-1.tiles")


@pytest.mark.parametrize(("nbytes", "space"), [(71, 70), (36 << 30, None), (36 << 30, 100 << 30)])
def test_what_has_no_room_changes_nothing(nbytes: int, space: int | None, folder: Path) -> None:
    assert not tile_space.make_room(nbytes, space, "dd-1.tiles")
    assert names() == ["aa-1", "bb-1", "cc-1"]
