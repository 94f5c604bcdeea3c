"""The data folder: held by one server at a time, and what lies in it under our names is ours."""

import os
import stat
from pathlib import Path

import pytest

from server.config.usage_error import UsageError
from server.log import data_dir


def refusal(folder: Path) -> str:
    with pytest.raises(UsageError) as refused, data_dir.locked(folder):
        pass
    return str(refused.value)


def test_a_new_folder_is_for_this_user_only_and_can_be_taken_again(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "data"
    for _ in range(2):
        with data_dir.locked(folder) as held:
            assert held == folder
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700
            assert stat.S_IMODE((folder / "lock").stat().st_mode) == 0o600
            assert "is in use by another server" in refusal(folder)


@pytest.mark.parametrize("name", ["lock", "log.sqlite", "log.sqlite-wal", "kv", "transfer", "verdicts"])
def test_a_link_under_one_of_our_names_is_refused_and_not_followed(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    (tmp_path / "elsewhere").mkdir()
    for target in ("elsewhere", "nowhere"):
        (folder / name).symlink_to(tmp_path / target)
        assert f"{folder / name} is not a " in refusal(folder)
        (folder / name).unlink()
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("name", ["lock", "log.sqlite", "kv"])
def test_a_pipe_under_one_of_our_names_is_refused_and_not_opened(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / name)
    assert f"{tmp_path / name} is not a " in refusal(tmp_path)


def test_what_belongs_to_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kv").mkdir()
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    told = refusal(tmp_path)  # a folder of root's is taken, as mounted volumes are; what lies in it is not
    assert told == f"--data-dir: {tmp_path / 'kv' if me == 0 else tmp_path} belongs to another user"


def test_a_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() == 0:
        os.chown(tmp_path, 12345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert refusal(tmp_path) == f"--data-dir: {tmp_path} belongs to another user"
    assert not (tmp_path / "lock").exists()


def test_a_folder_that_is_a_link_to_one_is_taken(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "data").symlink_to(tmp_path / "disk")
    with data_dir.locked(tmp_path / "data"):
        assert (tmp_path / "disk" / "lock").is_file()


def test_a_folder_keeps_the_name_of_its_server(tmp_path: Path) -> None:
    name = data_dir.identity(tmp_path)
    assert len(name) == 32
    assert data_dir.identity(tmp_path) == name
    (tmp_path / "server").write_bytes(b"\xff nonsense")
    assert data_dir.identity(tmp_path) not in (name, "\xff nonsense")
    assert [one.name for one in tmp_path.iterdir()] == ["server"]


def test_a_cache_is_emptied(tmp_path: Path) -> None:
    data_dir.empty_cache(tmp_path)  # there is none
    (tmp_path / "kv" / "a").mkdir(parents=True)
    (tmp_path / "kv" / "a" / "0.kv").write_bytes(b"x")
    (tmp_path / "log.sqlite").write_bytes(b"x")
    data_dir.empty_cache(tmp_path)
    assert [one.name for one in tmp_path.iterdir()] == ["log.sqlite"]
