"""The doctor on ports, folders, disks, logs, remote tiers and the hub: what it finds; it leaves nothing behind."""

from __future__ import annotations

import os
import socket
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from postgres_server import PostgresServer

from scheduler import tile_space
from server.cli.doctor import doctor_storage
from server.cli.doctor.findings import Finding, Level
from server.config.doctor_options import DoctorConfig
from server.log import data_dir
from server.log.session_log import SessionLog
from server.log.tables import FORMAT


@pytest.fixture(autouse=True)
def _a_plain_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_storage, "file_system", lambda folder: "ext4")


def config(data: Path, **values: Any) -> DoctorConfig:
    return DoctorConfig(data_dir=data, **{"port": 0, **values})


def one(found: Iterable[Finding]) -> Finding:
    (finding,) = found
    return finding


@contextmanager
def answering(status: int, body: bytes) -> Iterator[int]:
    """A server of HTTP that says the same to everything; its port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


# --- the port ------------------------------------------------------------------------------------------------


def test_a_free_port_and_who_reaches_it(tmp_path: Path) -> None:
    assert one(doctor_storage.port(config(tmp_path))).level is Level.OK
    everyone = one(doctor_storage.port(config(tmp_path, host="0.0.0.0")))
    assert (everyone.level, everyone.advice) == (Level.WARNING, "set --api-key NAME=KEY")
    assert one(doctor_storage.port(config(tmp_path, host="0.0.0.0", api_key="a=k"))).level is Level.OK


def test_a_port_that_a_stranger_has(tmp_path: Path) -> None:
    with answering(200, b"<html>") as number:
        found = one(doctor_storage.port(config(tmp_path, port=number)))
    assert (found.level, f"{number} is in use" in found.text) == (Level.FAULT, True)


def test_a_port_at_which_a_server_of_ours_answers(tmp_path: Path) -> None:
    with answering(503, b'{"status": "loading"}') as number:
        found = one(doctor_storage.port(config(tmp_path, port=number)))
    assert (found.level, found.text.endswith("loading")) == (Level.OK, True)


# --- the data dir and its disk -------------------------------------------------------------------------------


def test_a_data_dir_that_is_not_made_yet_is_not_made_now(tmp_path: Path) -> None:
    there = config(tmp_path / "a" / "b")
    assert one(doctor_storage.data(there)).level is Level.OK
    assert one(doctor_storage.disk(there)).level is not Level.FAULT
    assert one(doctor_storage.log(there)).text == "none yet"
    assert list(tmp_path.iterdir()) == []


def test_a_data_dir_in_use(tmp_path: Path) -> None:
    with data_dir.locked(tmp_path / "data") as folder:
        found = one(doctor_storage.data(config(folder)))
        assert (found.level, "in use" in found.text) == (Level.FAULT, True)
        with answering(200, b'{"status": "ok"}') as number:
            assert one(doctor_storage.data(config(folder, port=number))).level is Level.OK
    assert one(doctor_storage.data(config(folder))).level is Level.OK


def test_a_data_dir_that_others_can_read(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir(mode=0o755)
    assert [found.level for found in doctor_storage.data(config(folder))] == [Level.WARNING, Level.OK]


def test_a_data_dir_that_cannot_be_ours(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir(mode=0o700)
    (folder / "kv").write_text("")
    found = one(doctor_storage.data(config(folder)))
    assert (found.level, "kv is not a folder" in found.text) == (Level.FAULT, True)


@pytest.mark.parametrize(
    ("kind", "database", "level"),
    [
        ("nfs4", None, Level.WARNING),
        ("nfs4", "postgresql://h/d", Level.OK),
        ("overlay", None, Level.WARNING),
        ("tmpfs", None, Level.WARNING),
        ("xfs", None, Level.OK),
    ],
)
def test_kinds_of_disks(
    kind: str, database: str | None, level: Level, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_storage, "file_system", lambda folder: kind)
    found = one(doctor_storage.data(config(tmp_path / "data", database=database)))
    assert (found.level, found.figures["file_system"]) == (level, kind)


def test_the_kind_of_a_real_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert doctor_storage.file_system(Path("/proc/self")) == "proc"


def test_a_full_disk(tmp_path: Path) -> None:
    found = one(doctor_storage.data(config(tmp_path / "data", disk_floor=2**60)))
    assert (found.level, "no KV is written" in found.text) == (Level.WARNING, True)


def test_a_disk_is_measured_and_left_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_storage, "WRITTEN", 2**20)
    found = one(doctor_storage.disk(config(tmp_path)))
    assert found.figures["write"] > 0 < found.figures["read"]
    assert found.figures["sync_seconds"] > 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("speeds", "durability", "level", "said"),
    [
        ((1e9, 0.001, 1e9), "power", Level.OK, ""),
        ((1e9, 0.2, 1e9), "power", Level.WARNING, "every turn wait"),
        ((1e9, 0.2, 1e9), "process", Level.OK, ""),
        ((1e9, 0.001, 1e6), "process", Level.WARNING, "--disk-space 0"),
    ],
)
def test_slow_disks(
    speeds: Any, durability: str, level: Level, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_storage, "measure_disk", lambda file: speeds)
    found = one(doctor_storage.disk(config(tmp_path, durability=durability)))
    assert (found.level, said in found.advice) == (level, True)


def test_a_disk_that_takes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: object) -> tuple[float, float, float]:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(doctor_storage, "measure_disk", full)
    assert one(doctor_storage.disk(config(tmp_path))).level is Level.FAULT


# --- the log -------------------------------------------------------------------------------------------------


@pytest.fixture
def logged(tmp_path: Path) -> Path:
    """A data dir with a log that nobody has open."""
    import asyncio

    log = SessionLog(tmp_path / "log.sqlite", "process", "0" * 32, lambda: None)
    asyncio.run(log.close())
    return tmp_path


def tree(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_log_at_rest_is_read_and_not_touched(logged: Path) -> None:
    before = tree(logged)
    found = one(doctor_storage.log(config(logged)))
    assert (found.level, found.figures) == (Level.OK, {"sessions": 0})
    assert f"format {FORMAT}" in found.text
    assert tree(logged) == before


def test_a_log_in_a_file_of_its_own(logged: Path, tmp_path: Path) -> None:
    found = one(doctor_storage.log(config(tmp_path / "data", database=f"sqlite:///{logged}/log.sqlite")))
    assert (found.level, found.figures) == (Level.OK, {"sessions": 0})
    before = tree(logged)
    assert one(doctor_storage.log(config(tmp_path / "data", database=f"sqlite:///{logged}/none"))).text == "none yet"
    assert tree(logged) == before
    wrong = one(doctor_storage.log(config(tmp_path / "data", database="mysql://ann:secret@host/log")))
    assert (wrong.level, "secret" in wrong.text) == (Level.FAULT, False)


def change(logged: Path, statement: str) -> None:
    connection = sqlite3.connect(logged / "log.sqlite")
    connection.execute("PRAGMA journal_mode = DELETE")
    connection.execute(statement)
    connection.commit()
    connection.close()


def test_a_log_of_another_version(logged: Path) -> None:
    change(logged, f"UPDATE log_format SET version = {FORMAT + 1}")
    found = one(doctor_storage.log(config(logged)))
    assert (found.level, f"format {FORMAT + 1}" in found.text) == (Level.FAULT, True)
    change(logged, f"UPDATE log_format SET version = {FORMAT - 1}")
    found = one(doctor_storage.log(config(logged)))
    assert (found.level, "brought up" in found.text) == (Level.OK, True)


def test_a_damaged_log(logged: Path) -> None:
    (logged / "log.sqlite").write_bytes(b"no database" * 1000)
    found = one(doctor_storage.log(config(logged)))
    assert (found.level, "damaged" in found.text) == (Level.WARNING, True)


def test_a_log_with_a_damaged_page(logged: Path) -> None:
    path = logged / "log.sqlite"
    data = bytearray(path.read_bytes())
    data[-4096:] = b"\xff" * 4096
    path.write_bytes(data)
    assert one(doctor_storage.log(config(logged))).level is Level.WARNING


def test_a_log_in_use_is_left_alone(logged: Path) -> None:
    (logged / "log.sqlite-wal").write_bytes(b"")
    before = tree(logged)
    assert "in use" in one(doctor_storage.log(config(logged))).text
    assert tree(logged) == before


def test_a_log_in_postgresql(postgres: PostgresServer, tmp_path: Path) -> None:
    import asyncio

    url = postgres.new_database()
    found = one(doctor_storage.log(config(tmp_path, database=url)))
    assert (found.level, "no log in it yet" in found.text) == (Level.OK, True)
    asyncio.run(SessionLog(url, "process", "0" * 32, lambda: None).close())
    found = one(doctor_storage.log(config(tmp_path, database=url)))
    assert (found.level, f"a log of format {FORMAT}" in found.text) == (Level.OK, True)


def test_a_database_that_does_not_answer(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"postgresql://ann:secret@127.0.0.1:{free.getsockname()[1]}/log"
    found = one(doctor_storage.log(config(tmp_path, database=url)))
    assert found.level is Level.FAULT
    assert "secret" not in found.text + found.advice


# --- the remote tier and the hub -----------------------------------------------------------------------------


def test_no_remote_tier_is_nothing_to_tell(tmp_path: Path) -> None:
    assert list(doctor_storage.remote(config(tmp_path))) == []


def test_a_remote_tier_is_tried_and_left_as_it_was(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/far"
    assert one(doctor_storage.remote(config(tmp_path, remote=url))).level is Level.OK
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "far").mkdir()
    assert one(doctor_storage.remote(config(tmp_path, remote=url))).level is Level.OK
    assert list((tmp_path / "far").iterdir()) == []


def test_remote_tiers_that_cannot_be_had(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for url in (f"file://{tmp_path}/file/below", "nonsense://bucket/secret", "s3://bucket/secret"):
        found = one(doctor_storage.remote(config(tmp_path, remote=url)))
        assert found.level is Level.FAULT
        assert "secret" not in found.text + found.advice


def hub(model: str) -> Finding:
    return one(doctor_storage.hub(DoctorConfig(model=model)))


def test_a_model_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert hub("demo").level is Level.OK
    assert hub("org/model").level is Level.FAULT
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for status, level, said in (
        (200, Level.OK, "will be downloaded"),
        (401, Level.FAULT, "token"),
        (404, Level.FAULT, "404"),
    ):
        with answering(status, b"{}") as number:
            monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{number}")
            found = hub("org/model")
            assert (found.level, said in found.text) == (level, True)
    found = hub("org/model")  # nobody listens there any more
    assert (found.level, "does not answer" in found.text) == (Level.FAULT, True)


def test_every_check_is_one_of_the_doctors() -> None:
    from server.cli.doctor.doctor import CHECKS

    checks: list[Callable[..., Any]] = [check for _, _, check in CHECKS]
    for name in ("port", "data", "disk", "packed", "log", "remote", "hub"):
        assert getattr(doctor_storage, name) in checks


def test_packed_weights_that_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("TILE_CACHE_DIR")
    assert "0 models" in one(doctor_storage.packed(config(tmp_path))).text
    tile_space.folder().mkdir(parents=True)
    (tile_space.folder() / "digest-1.tiles").write_bytes(bytes(3000))
    found = one(doctor_storage.packed(config(tmp_path, packed_space=5000)))
    assert (found.level, found.figures) == (Level.OK, {"models": 1, "held": 3000, "most": 5000})
    assert str(tile_space.folder()) in found.text
    assert "--packed-space 0" in one(doctor_storage.packed(config(tmp_path, packed_space=0))).text


def test_a_user_without_a_folder_for_packed_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("TILE_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    found = one(doctor_storage.packed(config(tmp_path)))
    assert (found.level, "has no home folder" in found.text) == (Level.FAULT, True)
