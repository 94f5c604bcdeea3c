"""A real PostgreSQL server for tests, from what the system has installed; in a temporary folder, on a Unix socket."""

from __future__ import annotations

import itertools
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg

PROGRAMS = ("initdb", "pg_ctl", "postgres")
SETTINGS = "-c listen_addresses='' -c fsync=off -c full_page_writes=off -c shared_buffers=16MB -c max_connections=30"


def installed() -> Path | None:
    """The folder of PostgreSQL's programs, the newest version's; None where there is none."""
    folders = [*sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)]
    folders += [Path(folder) for folder in os.environ.get("PATH", "").split(os.pathsep)]
    return next((f for f in folders if all(os.access(f / program, os.X_OK) for program in PROGRAMS)), None)


ROOM = 8 << 30  # bytes


class PostgresServer:
    """One running server. It refuses to run as root, so root's tests run it as nobody."""

    def __init__(self, programs: Path, folder: Path) -> None:
        self._programs = programs
        self._folder = folder
        self._numbers = itertools.count(1)
        self._user: int | None = None
        self._group: int | None = None
        if os.geteuid() == 0:
            nobody = pwd.getpwnam("nobody")
            self._user, self._group = nobody.pw_uid, nobody.pw_gid
            os.chown(folder, nobody.pw_uid, nobody.pw_gid)
        self._run("initdb", "--username=warm", "--auth=trust", "--encoding=UTF8", "--no-locale", "--no-sync")
        self.start()

    def start(self) -> None:
        """Start, and wait until it answers."""
        self._run("pg_ctl", "start", "--wait", "-l", str(self._folder / "log"), "-o", f"{SETTINGS} -k {self._folder}")

    def stop(self) -> None:
        """Stop at once: connections are cut."""
        self._run("pg_ctl", "stop", "--wait", "--mode=immediate")

    def new_database(self) -> str:
        """The URL of a database with nothing in it."""
        name = f"log{next(self._numbers)}"
        with psycopg.connect(self._url("postgres"), autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}".encode())
        return self._url(name)

    def _url(self, database: str) -> str:
        return f"postgresql://warm@/{database}?host={self._folder}"

    def _run(self, program: str, *arguments: str) -> None:
        ran = subprocess.run(
            [self._programs / program, "-D", self._folder / "data", *arguments],
            cwd=self._folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # not a pipe: the server would inherit it
            stderr=subprocess.PIPE if program == "initdb" else subprocess.DEVNULL,
            user=self._user,
            group=self._group,
            extra_groups=[] if self._user is not None else None,
        )
        assert ran.returncode == 0, f"{program}: {ran.stderr!r}"


def _memory() -> Path | None:
    """A folder in memory where there is room: a server's hundreds of databases have 100,000 files."""
    folder = Path("/dev/shm")
    free = shutil.disk_usage(folder).free if os.access(folder, os.W_OK) else 0
    return folder if free > ROOM else None


@contextmanager
def postgres_server(programs: Path) -> Iterator[PostgresServer]:
    """A server that is gone afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="pg-", dir=_memory()))  # short: the path of a socket has 107 bytes
    try:
        server = PostgresServer(programs, folder)
        try:
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
