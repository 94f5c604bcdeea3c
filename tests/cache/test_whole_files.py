"""Files that are there whole or not at all, and files that are refused before they are read."""

from __future__ import annotations

import errno
import os
import socket
import stat
import threading
from pathlib import Path
from typing import Any

import pytest

from cache.whole_files import CorruptFile, clear_temporaries, make_folder, open_file, read_at, remove, write_file

CHUNKS: list[bytes | memoryview] = [b"one", memoryview(b"two"), b"", b"three" * 1000]
WHOLE = b"one" + b"two" + b"three" * 1000


def fail_at(monkeypatch: pytest.MonkeyPatch, name: str, at: int, error: BaseException) -> None:
    """The call of ``os.<name>`` of that number raises, counted from 1."""
    real, calls = getattr(os, name), 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at:
            raise error
        return real(*args, **kwargs)

    monkeypatch.setattr(os, name, counted)


def test_a_file_is_written_whole_and_for_this_user_only(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        assert write_file(tmp_path, "a.kv", CHUNKS) == len(WHOLE)
    finally:
        os.umask(old)
    assert (tmp_path / "a.kv").read_bytes() == WHOLE
    assert stat.S_IMODE((tmp_path / "a.kv").stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["a.kv"]


def test_it_is_synced_then_renamed_then_the_folder_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []
    real_fsync = os.fsync

    def fsync(fd: int) -> None:
        kind = "folder" if stat.S_ISDIR(os.fstat(fd).st_mode) else f"file of {os.fstat(fd).st_size}"
        steps.append(f"sync {kind}, {'there' if (tmp_path / 'a.kv').exists() else 'not there'}")
        real_fsync(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    write_file(tmp_path, "a.kv", CHUNKS)
    assert steps == [f"sync file of {len(WHOLE)}, not there", "sync folder, there"]


def test_short_writes_and_reads_are_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, preadv = os.write, os.preadv
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:7]))
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: preadv(fd, [buffers[0][:7]], offset))
    write_file(tmp_path, "a.kv", CHUNKS)
    assert (tmp_path / "a.kv").read_bytes() == WHOLE
    fd = open_file(tmp_path, "a.kv")
    assert bytes(read_at(fd, 100, 4)) == WHOLE[4:104]
    os.close(fd)


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.EROFS])
@pytest.mark.parametrize(
    ("call", "at"), [("open", 2), ("write", 1), ("write", 3), ("fsync", 1), ("rename", 1), ("fsync", 2)]
)
def test_a_write_that_fails_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, at: int, error: int
) -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        fail_at(patch, call, at, OSError(error, os.strerror(error)))
        with pytest.raises(OSError, match=os.strerror(error)) as raised:
            write_file(tmp_path, "a.kv", CHUNKS)
    assert raised.value.errno == error
    assert os.listdir(tmp_path) == []
    assert len(os.listdir("/proc/self/fd")) == descriptors
    write_file(tmp_path, "a.kv", CHUNKS)  # and the next one is written
    assert (tmp_path / "a.kv").read_bytes() == WHOLE


def test_a_writer_that_is_interrupted_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_at(monkeypatch, "rename", 1, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        write_file(tmp_path, "a.kv", CHUNKS)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", ["", ".", "..", "../a", "a/b", ".hidden", "a\0b", "x" * 300, "ä", "a\n", " a"])
def test_a_name_cannot_lead_anywhere_else(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(ValueError, match="name"):
        write_file(tmp_path / "folder", name, CHUNKS)
    with pytest.raises(CorruptFile, match="name"):
        open_file(tmp_path / "folder", name)
    assert os.listdir(tmp_path / "folder") == []


def plant(path: Path, kind: str) -> None:
    """Something that is not a file of ours."""
    target = path.parent / "target"
    if kind == "link":
        target.write_bytes(WHOLE)
        path.symlink_to(target)
    elif kind == "dangling link":
        path.symlink_to(target)
    elif kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")


@pytest.mark.parametrize("kind", ["link", "dangling link", "folder", "fifo", "device", "nothing"])
def test_what_is_not_a_regular_file_is_doubted_at_once(tmp_path: Path, kind: str) -> None:
    plant(tmp_path / "a.kv", kind)
    seen: list[BaseException] = []

    def attempt() -> None:
        try:
            open_file(tmp_path, "a.kv")
        except BaseException as error:
            seen.append(error)

    thread = threading.Thread(target=attempt, daemon=True)  # so that a wait is seen as a failure
    thread.start()
    thread.join(10)
    assert [type(error) for error in seen] == [CorruptFile]
    assert str(tmp_path) not in str(seen[0])


def test_a_socket_is_doubted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the address of a socket is short
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("a.kv")
        with pytest.raises(CorruptFile, match="not a regular file"):
            open_file(tmp_path, "a.kv")


def test_another_users_file_is_doubted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_file(tmp_path, "a.kv", CHUNKS)
    descriptors = len(os.listdir("/proc/self/fd"))
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    with pytest.raises(CorruptFile, match="another user"):
        open_file(tmp_path, "a.kv")
    assert len(os.listdir("/proc/self/fd")) == descriptors


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (errno.EACCES, CorruptFile),
        (errno.EPERM, CorruptFile),
        (errno.EMFILE, OSError),
        (errno.EIO, OSError),
        (errno.ENOMEM, OSError),
    ],
)
def test_the_machines_trouble_is_not_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int, kind: type[Exception]
) -> None:
    write_file(tmp_path, "a.kv", CHUNKS)
    fail_at(monkeypatch, "open", 2, OSError(error, os.strerror(error)))  # the first opens the folder
    with pytest.raises(kind):
        open_file(tmp_path, "a.kv")


def test_an_unreadable_file_is_doubted(tmp_path: Path) -> None:
    write_file(tmp_path, "a.kv", CHUNKS)
    (tmp_path / "a.kv").chmod(0)
    if os.access(tmp_path / "a.kv", os.R_OK):
        pytest.skip("this user reads every file")
    with pytest.raises(CorruptFile, match="not readable"):
        open_file(tmp_path, "a.kv")


def test_a_file_that_was_cut_is_doubted(tmp_path: Path) -> None:
    write_file(tmp_path, "a.kv", CHUNKS)
    fd = open_file(tmp_path, "a.kv")
    assert bytes(read_at(fd, 6, len(WHOLE) - 6)) == WHOLE[-6:]
    with pytest.raises(CorruptFile, match="shorter"):
        read_at(fd, 7, len(WHOLE) - 6)
    os.close(fd)


def test_a_folder_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    real, link = tmp_path / "real", tmp_path / "link"
    make_folder(real)
    write_file(real, "a.kv", CHUNKS)
    link.symlink_to(real)
    with pytest.raises(CorruptFile):
        open_file(link, "a.kv")
    for act in (
        lambda: write_file(link, "b.kv", CHUNKS),
        lambda: remove(link, ["a.kv"]),
        lambda: clear_temporaries(link),
        lambda: make_folder(link),
        lambda: make_folder(link / "deeper"),
    ):
        with pytest.raises(NotADirectoryError):
            act()
    assert os.listdir(real) == ["a.kv"]


def test_folders_are_made_for_this_user_and_each_entry_is_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    real = os.fsync

    def fsync(fd: int) -> None:
        synced.append(os.fstat(fd).st_ino)
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    old = os.umask(0)
    try:
        make_folder(tmp_path / "a" / "b" / "c")
    finally:
        os.umask(old)
    made = [tmp_path / "a", tmp_path / "a" / "b", tmp_path / "a" / "b" / "c"]
    assert [stat.S_IMODE(path.stat().st_mode) for path in made] == [0o700] * 3
    assert synced == [path.parent.stat().st_ino for path in made]
    make_folder(tmp_path / "a" / "b")
    assert len(synced) == 3


def test_removing_takes_what_is_there_links_themselves_and_nothing_else(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(b"kept")
    folder = tmp_path / "folder"
    make_folder(folder)
    for name in ("a.kv", "b.kv", "c.kv"):
        write_file(folder, name, CHUNKS)
    (folder / "link").symlink_to(outside)
    remove(folder, ["a.kv", "missing", "c.kv", "link"])
    assert os.listdir(folder) == ["b.kv"]
    with pytest.raises(ValueError, match="slash"):
        remove(folder, ["../outside"])
    assert outside.read_bytes() == b"kept"


def test_only_temporaries_are_cleared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_file(tmp_path, "a.kv", CHUNKS)
    write_file(tmp_path, "b.tmp", CHUNKS)
    with monkeypatch.context() as patch:
        fail_at(patch, "rename", 1, KeyboardInterrupt())
        fail_at(patch, "unlink", 1, KeyboardInterrupt())  # a kill leaves no time to clear up
        with pytest.raises(KeyboardInterrupt):
            write_file(tmp_path, "c.kv", CHUNKS)
    assert len(os.listdir(tmp_path)) == 3
    clear_temporaries(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["a.kv", "b.tmp"]


def test_a_doubt_carries_its_reason() -> None:
    assert CorruptFile("a reason").reason == "a reason"
