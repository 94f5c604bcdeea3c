"""The remote tier keeps files as they are, believes nothing that it is told, and lets nobody wait for long."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from cache.tiers.circuit_breaker import MOST_ABANDONED
from cache.tiers.remote import RemoteTier

MODEL, OTHER = "ab" * 16, "cd" * 16
HOME, AWAY = "11" * 16, "22" * 16
ONE, TWO = f"{1:016x}-{'a' * 32}.kv", f"{2:016x}-{'b' * 32}.kv"


class Unsteady(MemoryFileSystem):  # type: ignore[misc]
    """A memory filesystem that fails, hangs or lies as the test says."""

    protocol = "unsteady"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    failure: Exception | None = None
    hang: threading.Event | None = None
    calls = 0

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        stripped: str = MemoryFileSystem._strip_protocol(path.replace("unsteady://", "memory://"))
        return stripped

    def invalidate_cache(self, path: str | None = None) -> None:
        type(self).calls += 1
        if self.hang is not None:
            self.hang.wait(20)
        if self.failure is not None:
            raise self.failure


fsspec.register_implementation("unsteady", Unsteady)


@pytest.fixture(autouse=True)
def clean() -> None:
    for system in (MemoryFileSystem, Unsteady):
        system.store.clear()
        system.pseudo_dirs[:] = [""]
    Unsteady.failure, Unsteady.hang, Unsteady.calls = None, None, 0


@pytest.fixture(params=["memory://tier/kv", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"file://{tmp_path}/remote/kv" if request.param == "file" else str(request.param)


def file(tmp_path: Path, content: bytes) -> Path:
    path = tmp_path / "source"
    path.write_bytes(content)
    return path


def put(tier: RemoteTier, tmp_path: Path, folder: str, name: str, size: int = 10) -> None:
    tier.put(folder, name, file(tmp_path, os.urandom(size)))


def test_files_come_back_as_they_went_also_to_another_server(url: str, tmp_path: Path) -> None:
    content = os.urandom(3_000_000)
    tier = RemoteTier(url, MODEL, None)
    assert tier.names(HOME) == []
    tier.put(HOME, TWO, file(tmp_path, content))
    tier.put(HOME, ONE, file(tmp_path, b"short"))
    second = RemoteTier(url, MODEL, None)
    assert second.names(HOME) == [(ONE, 5), (TWO, len(content))]
    target = tmp_path / "folder" / "target"
    target.parent.mkdir()
    second.get(HOME, TWO, target)
    assert target.read_bytes() == content
    assert target.stat().st_mode & 0o777 == 0o600
    assert [p.name for p in target.parent.iterdir()] == ["target"]
    assert RemoteTier(url, OTHER, None).names(HOME) == []


def test_what_is_not_there_is_told_apart_from_what_fails(url: str, tmp_path: Path) -> None:
    tier = RemoteTier(url, MODEL, None)
    with pytest.raises(FileNotFoundError):
        tier.get(HOME, ONE, tmp_path / "target")
    tier.remove(HOME, [ONE])
    tier.remove(HOME, None)
    assert not tier.away
    assert list(tmp_path.glob("*.tmp")) == list(tmp_path.glob(".*")) == []


def test_a_file_is_never_written_over(url: str, tmp_path: Path) -> None:
    tier = RemoteTier(url, MODEL, None)
    tier.put(HOME, ONE, file(tmp_path, b"first"))
    tier.put(HOME, ONE, file(tmp_path, b"again"))
    with pytest.raises(FileExistsError):
        tier.put(HOME, ONE, file(tmp_path, b"longer"))
    tier.get(HOME, ONE, tmp_path / "target")
    assert (tmp_path / "target").read_bytes() == b"first"
    assert tier.used == 5


def test_removing_files_and_folders(url: str, tmp_path: Path) -> None:
    tier = RemoteTier(url, MODEL, None)
    for folder in (HOME, AWAY):
        put(tier, tmp_path, folder, ONE, 30)
        put(tier, tmp_path, folder, TWO, 70)
    tier.remove(HOME, [ONE])
    assert (tier.names(HOME), tier.used) == ([(TWO, 70)], 170)
    tier.remove(HOME, None)
    assert (tier.names(HOME), tier.used) == ([], 100)
    assert len(tier.names(AWAY)) == 2


def test_the_least_recently_used_folders_leave_first(url: str, tmp_path: Path) -> None:
    folders = [f"{n:032x}" for n in range(6)]
    tier = RemoteTier(url, MODEL, 300)
    foreign = RemoteTier(url, OTHER, None)
    put(foreign, tmp_path, folders[0], ONE, 100)
    for folder in folders:
        put(tier, tmp_path, folder, ONE, 100)
    tier.get(folders[1], ONE, tmp_path / "target")
    assert tier.collect(lambda folder: folder == folders[0]) == 400
    left = [folder for folder in folders if tier.names(folder)]
    assert left == [folders[0], folders[1], folders[5]]
    assert tier.used == 300
    assert foreign.names(folders[0]) == []
    assert RemoteTier(url, MODEL, 300).collect(lambda folder: False) == 0


def test_without_a_budget_all_is_counted_and_nothing_leaves(url: str, tmp_path: Path) -> None:
    put(RemoteTier(url, MODEL, None), tmp_path, HOME, ONE, 100)
    fresh = RemoteTier(url, OTHER, None)
    assert fresh.used == 0
    assert fresh.collect(lambda folder: False) == 0
    assert fresh.used == 100


@pytest.mark.parametrize("bad", ["", "..", "../x", "AB", "a/b", "a" * 65, "a\n", ".", "a\0"])
def test_names_are_checked_before_they_are_paths(bad: str, tmp_path: Path) -> None:
    tier = RemoteTier(f"file://{tmp_path}/remote", MODEL, None)
    source = file(tmp_path, b"x")
    with pytest.raises(ValueError, match="not a name"):
        RemoteTier("memory://x", bad, None)
    for call in (lambda: tier.put(bad, ONE, source), lambda: tier.names(bad), lambda: tier.remove(bad, None)):
        with pytest.raises(ValueError, match="not a name"):
            call()
    with pytest.raises(ValueError, match="not a name"):
        tier.get(HOME, f"{bad}.kvx", source)
    with pytest.raises(ValueError, match="not a name"):
        tier.remove(HOME, [f"{bad}/.kv"])
    assert not (tmp_path / "remote").exists()


@pytest.mark.parametrize(
    "bad", ["simplecache::memory://x", "nosuch://x", "s3nope://key:word@x", "memory://", "file:///"]
)
def test_a_url_that_cannot_be_is_refused_without_its_words(bad: str) -> None:
    with pytest.raises(ValueError, match="URL") as caught:
        RemoteTier(bad, MODEL, None)
    assert "word" not in str(caught.value)


def test_strange_files_are_not_seen_and_not_touched(tmp_path: Path) -> None:
    root = tmp_path / "remote"
    tier = RemoteTier(f"file://{root}", MODEL, 0)
    put(tier, tmp_path, HOME, ONE)
    strange = [root / "notes.txt", root / "deadbeef", root / MODEL / "README", root / MODEL / HOME / "x.kv.bak"]
    strange += [root / MODEL / HOME / "Z.kv", root / MODEL / "Z" / ONE, root / "Z" / HOME / ONE]
    for path in strange:
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_bytes(b"mine")
    os.mkfifo(root / MODEL / HOME / TWO)
    (root / MODEL / AWAY / TWO).mkdir(parents=True)
    assert tier.names(HOME) == [(ONE, 10)]
    assert tier.names(AWAY) == []
    for folder in (HOME, AWAY):
        with pytest.raises(FileNotFoundError):
            tier.get(folder, TWO, tmp_path / "target")
        with pytest.raises(FileExistsError):
            put(tier, tmp_path, folder, TWO)
    assert tier.collect(lambda folder: False) == 10
    tier.remove(HOME, None)
    assert all(path.read_bytes() == b"mine" for path in strange)
    assert (root / MODEL / HOME / TWO).exists()


@pytest.mark.parametrize("linked", ["folder", "fingerprint", "file"])
def test_links_lead_nowhere(linked: str, tmp_path: Path) -> None:
    root, outside = tmp_path / "remote", tmp_path / "outside"
    precious = outside / HOME / ONE if linked == "fingerprint" else outside / ONE
    precious.parent.mkdir(parents=True)
    precious.write_bytes(b"precious")
    link = {"folder": root / MODEL / HOME, "fingerprint": root / MODEL, "file": root / MODEL / HOME / ONE}[linked]
    link.parent.mkdir(parents=True)
    link.symlink_to(precious if linked == "file" else outside)
    tier = RemoteTier(f"file://{root}", MODEL, 0)
    assert tier.names(HOME) == []
    with pytest.raises(FileNotFoundError):
        tier.get(HOME, ONE, tmp_path / "target")
    if linked != "file":
        with pytest.raises(OSError, match="no such file"):
            put(tier, tmp_path, HOME, TWO)
    tier.collect(lambda folder: False)
    tier.remove(HOME, [ONE])
    tier.remove(HOME, None)
    assert precious.read_bytes() == b"precious"
    assert [p.name for p in precious.parent.iterdir()] == [ONE]
    assert not tier.away


def test_a_local_folder_is_for_its_owner_only(tmp_path: Path) -> None:
    put(RemoteTier(f"file://{tmp_path}/remote", MODEL, None), tmp_path, HOME, ONE)
    assert (tmp_path / "remote" / MODEL / HOME).stat().st_mode & 0o777 == 0o700


def test_a_put_that_fails_leaves_nothing_for_readers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def half(self: Any, path1: str, path2: str, **_: Any) -> None:
        Path(path2).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(LocalFileSystem, "put_file", half)
    tier = RemoteTier(f"file://{tmp_path}/remote", MODEL, None)
    with pytest.raises(OSError, match="the remote tier failed: OSError"):
        put(tier, tmp_path, HOME, ONE)
    assert list((tmp_path / "remote" / MODEL / HOME).iterdir()) == []
    assert tier.used == 0


def test_readers_never_see_a_file_in_the_making(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[tuple[str, int]]] = []
    copy = LocalFileSystem.put_file

    def watched(self: Any, path1: str, path2: str, **more: Any) -> None:
        copy(self, path1, path2, **more)
        seen.append(RemoteTier(f"file://{tmp_path}/remote", MODEL, None).names(HOME))

    monkeypatch.setattr(LocalFileSystem, "put_file", watched)
    put(RemoteTier(f"file://{tmp_path}/remote", MODEL, None), tmp_path, HOME, ONE)
    assert seen == [[]]


def test_what_dead_writers_left_is_swept_and_what_living_ones_write_is_not(tmp_path: Path) -> None:
    tier = RemoteTier(f"file://{tmp_path}/remote", MODEL, None)
    put(tier, tmp_path, HOME, ONE)
    old, new = (tmp_path / "remote" / MODEL / HOME / f".{digit * 32}.tmp" for digit in "01")
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (time.time() - 7200,) * 2)
    tier.collect(lambda folder: True)
    assert (old.exists(), new.exists(), len(tier.names(HOME))) == (False, True, 1)


def test_a_get_that_is_cut_short_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = RemoteTier("memory://tier", MODEL, None)
    put(tier, tmp_path, HOME, ONE, 100)
    monkeypatch.setattr(MemoryFileSystem, "get_file", lambda self, there, here: Path(here).write_bytes(b"half"))
    target = tmp_path / "folder" / "target"
    target.parent.mkdir()
    with pytest.raises(OSError, match="another size"):
        tier.get(HOME, ONE, target)
    assert list(target.parent.iterdir()) == []


@pytest.mark.parametrize("failure", [PermissionError(13, "key=word"), ValueError("word"), RuntimeError("word at host")])
def test_every_failure_is_an_oserror_without_its_words_and_then_rest(failure: Exception, tmp_path: Path) -> None:
    tier = RemoteTier("unsteady://tier", MODEL, None)
    Unsteady.failure = failure
    with pytest.raises(OSError, match=type(failure).__name__) as caught:
        tier.names(HOME)
    assert "word" not in str(caught.value)
    assert caught.value.__cause__ is caught.value.__context__ is None
    assert tier.away
    Unsteady.failure, tried = None, Unsteady.calls
    source = file(tmp_path, b"x")
    for call in (
        lambda: tier.put(HOME, ONE, source),
        lambda: tier.get(HOME, ONE, tmp_path / "target"),
        lambda: tier.names(HOME),
        lambda: tier.remove(HOME, None),
        lambda: tier.collect(lambda folder: True),
    ):
        with pytest.raises(OSError, match="a moment ago"):
            call()
    assert Unsteady.calls == tried


def test_after_the_rest_it_is_tried_again(tmp_path: Path) -> None:
    tier = RemoteTier("unsteady://tier", MODEL, None, rest=0.0)
    Unsteady.failure = ConnectionError("gone")
    with pytest.raises(OSError, match="ConnectionError"):
        put(tier, tmp_path, HOME, ONE)
    Unsteady.failure = None
    put(tier, tmp_path, HOME, ONE)
    assert len(tier.names(HOME)) == 1


def test_a_filesystem_that_hangs_is_left_and_not_asked_forever(tmp_path: Path) -> None:
    tier = RemoteTier("unsteady://tier", MODEL, None, patience=0.02, rest=0.0)
    Unsteady.hang = threading.Event()
    for _ in range(MOST_ABANDONED):
        with pytest.raises(TimeoutError, match="did not answer"):
            tier.names(HOME)
    with pytest.raises(OSError, match="left alone"):
        tier.names(HOME)
    assert Unsteady.calls == MOST_ABANDONED
    Unsteady.hang.set()
    for thread in threading.enumerate():
        if thread.name == "remote":
            thread.join(20)
    Unsteady.hang = None
    assert tier.names(HOME) == []
