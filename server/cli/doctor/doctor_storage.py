"""Checks of port, data dir, disk, session log, remote tier and the Hugging Face hub."""

from __future__ import annotations

import os
import secrets
import shutil
import sqlite3
import stat
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import IO, Any

import httpx
import sqlalchemy as sql

from scheduler.disk_floor import floor as disk_floor
from scheduler.extras import install_command
from scheduler.tile_space import allowed, kept
from scheduler.tile_space import folder as tile_folder
from server.cli.doctor.findings import Finding, fault, ok, size, warning
from server.config.doctor_options import DoctorConfig
from server.config.usage_error import UsageError
from server.log import data_dir
from server.log.database import CHECKED_BYTES, Database, LogUnavailable
from server.log.recovery.mending import file_of
from server.log.tables import FORMAT, log_format
from server.serve import is_loopback, listening

ANSWER_SECONDS = 5.0
WRITTEN = 64 * 2**20  # bytes that measure a disk, or so many as fit in the seconds
WRITE_SECONDS = 5.0
SYNCS = 20
SLOW_SYNC = 0.05  # seconds: a turn waits for one under --durability power
SLOW_DISK = 50e6  # bytes a second
SLOW_DATABASE = 0.05
FLEETING = {"tmpfs", "ramfs", "overlay", "overlayfs"}
NETWORK = {"nfs", "nfs4", "cifs", "smb3", "9p", "fuse.sshfs", "glusterfs", "ceph", "lustre"}


def running_version(config: DoctorConfig) -> str | None:
    """The version of the warmturn server that answers at the port; None when none does."""
    host = "127.0.0.1" if config.host in ("0.0.0.0", "::") else config.host
    host = f"[{host}]" if ":" in host else host
    try:
        answer = httpx.get(f"http://{host}:{config.port}/health", timeout=ANSWER_SECONDS)
        health = answer.json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError):
        return None
    if not isinstance(health, dict) or not isinstance(health.get("status"), str):
        return None
    return str(health["status"])


def port(config: DoctorConfig) -> Iterator[Finding]:
    """Whether the server could listen, and who would reach it."""
    try:
        with listening(config.host, config.port) as listener:
            inside = is_loopback(listener)
    except UsageError as error:
        if (status := running_version(config)) is not None:
            yield ok("port", f"a server answers at {config.host}, port {config.port}: {status}")
        else:
            yield fault("port", str(error), "stop the program that uses it, or choose another --host or --port")
        return
    told = f"{config.host}, port {config.port}: free"
    if inside or config.has_keys:
        yield ok("port", told + ("; reached from this machine only" if inside else "; behind keys"))
    else:
        yield warning(
            "port",
            told
            + "; everyone who reaches it would be served, under its addresses"
            + (f" and as {', '.join(config.allowed_host)}" if config.allowed_host else ""),
            "set --api-key NAME=KEY",
        )


def data(config: DoctorConfig) -> Iterator[Finding]:
    """The data dir: whose it is, whether it is free, what kind of disk holds it."""
    folder = config.data_dir
    there = existing_part(folder)
    if not os.access(there, os.W_OK | os.X_OK):
        yield fault("data", f"{there} cannot be written to", "chown it to this user, or choose another --data-dir")
        return
    if folder.exists():
        try:
            with data_dir.locked(folder):
                pass
        except UsageError as error:
            if running_version(config) is None or "in use" not in str(error):
                yield fault("data", str(error), "stop the other server, or choose another --data-dir")
                return
        if stat.S_IMODE(folder.stat().st_mode) & 0o077:
            yield warning("data", f"{folder} is open to other users", f"chmod 700 {folder}")
    kind, disk = file_system(there), shutil.disk_usage(there)
    told = f"{folder}{'' if folder.exists() else ' (not made yet)'}: {size(disk.free)} of {size(disk.total)} free"
    figures = {"free": disk.free, "total": disk.total, "file_system": kind}
    floor = int(config.disk_floor) if config.disk_floor is not None else disk_floor(disk.total)
    if kind in NETWORK and config.database is None:
        yield warning(
            "data",
            f"{told}; {kind}, and SQLite may lose a log on a network's file system",
            "choose a local --data-dir, or keep the log in PostgreSQL with --database",
            **figures,
        )
    elif kind in FLEETING:
        yield warning(
            "data",
            f"{told}; {kind}, which ends with the {'container' if 'overlay' in kind else 'machine'}",
            "mount a volume and name it with --data-dir",
            **figures,
        )
    elif disk.free < floor and config.disk_space != 0:
        yield warning(
            "data",
            f"{told}; no KV is written, as {size(floor)} stay free",
            "free some space, or lower --disk-floor",
            **figures,
        )
    else:
        yield ok("data", told, **figures)


def existing_part(folder: Path) -> Path:
    """The folder, or what is there of the way to it."""
    return next(place for place in (folder, *folder.absolute().parents) if place.is_dir())


def file_system(folder: Path) -> str:
    """What kind of file system holds a folder (Linux; empty elsewhere)."""
    place, kind = folder.resolve(), ""
    with suppress(OSError):
        longest = -1
        for line in Path("/proc/mounts").read_text().splitlines():
            _, where, name, *_ = line.split(" ")
            mount = Path(where.replace("\\040", " "))
            if place.is_relative_to(mount) and len(mount.parts) >= longest:
                longest, kind = len(mount.parts), name
    return kind


def disk(config: DoctorConfig) -> Iterator[Finding]:
    """How fast the data dir's disk writes, syncs and reads, on a file that has no name."""
    try:
        with tempfile.TemporaryFile(dir=existing_part(config.data_dir)) as file:
            written, syncs, reads = measure_disk(file)
    except OSError as error:
        yield fault(
            "disk", f"the data dir's disk cannot be written: {error.strerror}", "free some space, or repair the disk"
        )
        return
    told = f"writes {size(written)}/s, reads {size(reads)}/s; a small write is safe after {1000 * syncs:.1f} ms"
    figures = {"write": written, "read": reads, "sync_seconds": syncs}
    if config.durability == "power" and syncs > SLOW_SYNC and config.database is None:
        yield warning("disk", told, "with --durability power every turn waits this long: use a faster disk", **figures)
    elif min(written, reads) < SLOW_DISK and config.disk_space != 0:
        yield warning(
            "disk",
            told,
            "long sessions are loaded slowly, or computed again: use a faster disk, or --disk-space 0",
            **figures,
        )
    else:
        yield ok("disk", told, **figures)


def packed(config: DoctorConfig) -> Iterator[Finding]:
    """The packed weights that are kept between starts."""
    if config.packed_space == 0:
        yield ok("packed", "packed weights are not kept between starts: --packed-space 0")
        return
    files = kept()
    held = sum(one.nbytes for one in files)
    try:
        folder = tile_folder()
        most = allowed(None if config.packed_space is None else int(config.packed_space))
    except OSError as error:
        why = f"the folder of packed weights cannot be read: {error.strerror}"
        yield fault("packed", why, "repair it, or --packed-space 0")
        return
    told = f"packed weights of {len(files)} models are kept for later starts: {size(held)} of {size(most)}; {folder}"
    yield ok("packed", told, models=len(files), held=held, most=most)


def measure_disk(file: IO[bytes]) -> tuple[float, float, float]:
    """Bytes written a second, seconds of a small durable write, bytes read a second from the disk itself."""
    block, number = secrets.token_bytes(2**20), file.fileno()
    began, count = time.perf_counter(), 0
    while count < WRITTEN and time.perf_counter() - began < WRITE_SECONDS:
        count += os.write(number, block)
    os.fsync(number)
    written = count / (time.perf_counter() - began)
    syncs = []
    for _ in range(SYNCS):
        before = time.perf_counter()
        os.write(number, block[:4096])
        os.fsync(number)
        syncs.append(time.perf_counter() - before)
    os.lseek(number, 0, os.SEEK_SET)
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)  # from the disk, not from memory
    before, seen = time.perf_counter(), 0
    while seen < count:
        seen += len(os.read(number, 2**20)) or count
    return written, statistics.median(syncs), count / (time.perf_counter() - before)


def log(config: DoctorConfig) -> Iterator[Finding]:
    """The session log: can it be reached, read, and by this version."""
    try:
        path = config.data_dir / "log.sqlite" if config.database is None else file_of(config.database)
    except LogUnavailable as error:
        yield fault("log", error.message, "--database: postgresql://user@host/name")
        return
    if path is None:
        yield database(config)
    elif not path.exists():
        yield ok("log", "none yet")
    elif path.with_name(f"{path.name}-wal").exists():
        yield ok("log", f"{size(path.stat().st_size)}; in use, or checked at the next start")
    else:
        yield read_closed_log(path)


def read_closed_log(path: Path) -> Finding:
    """A closed SQLite log, read without changing the files beside it."""
    nbytes = path.stat().st_size
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro&immutable=1", uri=True)) as connection:
            version = connection.execute("SELECT version FROM log_format").fetchone()[0]
            whole = nbytes > CHECKED_BYTES or connection.execute("PRAGMA quick_check(1)").fetchone()[0] == "ok"
            count = connection.execute("SELECT count(*) FROM sessions").fetchone()[0]
    except (sqlite3.Error, TypeError) as error:
        return damage_finding(path, str(error))
    if not whole:
        return damage_finding(path, "a page is not what was written")
    if not isinstance(version, int) or version > FORMAT:
        return newer(version)
    told = f"{count} sessions, {size(nbytes)}, format {version}"
    return ok(
        "log", told + ("" if version == FORMAT else f"; brought up to {FORMAT} at the next start"), sessions=count
    )


def damage_finding(path: Path, why: str) -> Finding:
    """A log that the server would salvage, or not start with."""
    return warning(
        "log",
        f"{path.name} is damaged: {why}",
        "restore a backup; otherwise the server sets it aside at start and keeps what can be read",
    )


def newer(version: object) -> Finding:
    """A log that this version does not read."""
    return fault("log", f"format {version}; this version reads 1 to {FORMAT}", "use the version that wrote it")


def database(config: DoctorConfig) -> Finding:
    """The log in a database of its own."""
    assert config.database is not None

    def look(connection: sql.Connection) -> tuple[str, object]:
        name = ".".join(map(str, connection.dialect.server_version_info or ()))
        known = sql.inspect(connection).has_table(log_format.name)
        return name, connection.execute(sql.select(log_format.c.version)).scalar() if known else None

    try:
        there = Database(config.database, config.durability)
        try:
            name, version = there.read(look)
            began = time.perf_counter()
            there.read(lambda connection: connection.execute(sql.select(1)).scalar())
            seconds = time.perf_counter() - began
        finally:
            there.close()
    except LogUnavailable as error:
        return fault("log", error.message, "check that the database runs, its address and its password")
    if isinstance(version, int) and version > FORMAT:
        return newer(version)
    told = f"version {name}, answers in {1000 * seconds:.1f} ms; " + (
        f"a log of format {version}" if version is not None else "no log in it yet"
    )
    if seconds > SLOW_DATABASE:
        return warning("log", told, "every turn makes several requests: use a database that is nearer", seconds=seconds)
    return ok("log", told, seconds=seconds)


def remote(config: DoctorConfig) -> Iterator[Finding]:
    """The remote tier: a small file goes there, comes back and is removed."""
    if config.remote is None:
        return
    from fsspec.core import url_to_fs

    data = secrets.token_bytes(4096)
    began = time.perf_counter()
    try:
        system, root = url_to_fs(config.remote)
        made = not system.exists(root)
        path = f"{root.rstrip('/')}/.{secrets.token_hex(16)}.tmp"
        system.makedirs(root, exist_ok=True)
        try:
            system.pipe_file(path, data)
            same = system.cat_file(path) == data
        finally:
            with suppress(OSError):
                system.rm_file(path)
            if made:
                with suppress(OSError):
                    system.rmdir(root)
    except ImportError as error:
        yield fault("remote", str(error), f"install the extra of that name: {install_command('s3')}, or gcs")
        return
    except Exception as error:  # drivers raise whatever their libraries do; what they say may name keys
        yield fault(
            "remote", f"it cannot be written: {type(error).__name__}", "check the URL, the network and the credentials"
        )
        return
    seconds = time.perf_counter() - began
    if not same:
        yield fault("remote", "the data read differs from the data written", "use another storage")
        return
    yield ok("remote", f"written, read and removed in {1000 * seconds:.0f} ms", seconds=seconds)


def hub(config: DoctorConfig) -> Iterator[Finding]:
    """Where a model of the hub would come from."""
    from huggingface_hub import constants, try_to_load_from_cache

    cache = Path(constants.HF_HUB_CACHE)
    offline = "; HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else ""
    if not config.with_model or Path(config.source).exists():
        free = shutil.disk_usage(existing_part(cache)).free
        yield ok("hub", f"models are kept in {cache}: {size(free)} free{offline}", free=free)
    elif isinstance(try_to_load_from_cache(config.model, "config.json"), str):
        yield ok("hub", f"{config.model} is in {cache}{offline}")
    elif constants.HF_HUB_OFFLINE:
        yield fault(
            "hub", f"{config.model} is not in {cache}{offline}", "download it first with a network, or name a folder"
        )
    else:
        yield ask_hub(constants.ENDPOINT, config.model)


def ask_hub(endpoint: str, model: str) -> Finding:
    """What the hub says about a model that has not been downloaded."""
    token = os.environ.get("HF_TOKEN")
    headers: dict[str, Any] = {"authorization": f"Bearer {token}"} if token else {}
    try:
        answer = httpx.get(
            f"{endpoint}/api/models/{model}", headers=headers, timeout=ANSWER_SECONDS, follow_redirects=True
        )
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return fault(
            "hub",
            f"{model} is not on this machine, and {endpoint} does not answer ({type(error).__name__})",
            "download it on a machine with a network and name its folder",
        )
    if answer.status_code == 200:
        return ok("hub", f"{model} is not on this machine yet and will be downloaded from {endpoint}")
    if answer.status_code in (401, 403):
        return fault("hub", f"{model} does not exist, or needs a token", "set HF_TOKEN to a token that may read it")
    return fault(
        "hub", f"{endpoint} answers {answer.status_code} for {model}", "check its name; MODEL may be a folder too"
    )
