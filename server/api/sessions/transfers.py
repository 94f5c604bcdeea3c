"""Receives and sends capsules over HTTP, through a temporary folder on disk.

Nothing of a capsule is held in memory beyond a chunk, and nothing stays in the folder when its request is over.
"""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import stat
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from scheduler.disk_floor import floor as disk_floor
from server.api.sessions.capsule import CHUNK, MEDIA_TYPE, Capsule, write_all
from server.config.usage_error import UsageError
from server.errors import ApiError, ClientLeft
from server.http.sse import while_connected

AT_ONCE = 4  # capsules; each may need twice its size on the disk for a while
PIECE = 1 << 16  # bytes that must leave within STALL_SECONDS
STALL_SECONDS = 60.0  # without a byte going through, then the other side is given up
FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EFBIG})


class Transfers:
    """The temporary folder of capsules. ``max_bytes`` is the size of the largest accepted capsule."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        """Create the folder, or empty it of what a killed server left. Raises UsageError."""
        self.max_bytes = max_bytes
        self._folder = folder
        self._open = 0
        try:
            with suppress(FileNotFoundError):
                found = folder.lstat()
                if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
                    raise UsageError(f"--data-dir: {folder.name} in it is no folder of this user")
                shutil.rmtree(folder)
            folder.mkdir(mode=0o700)
        except OSError as error:
            raise UsageError(f"--data-dir: {folder.name} in it cannot be used: {error.strerror}") from None

    @asynccontextmanager
    async def room(self) -> AsyncIterator[Path]:
        """A new empty folder for one capsule, removed at the end. Raises a 429 when too many are under way."""
        if self._open >= AT_ONCE:
            message = f"{AT_ONCE} sessions are being exported or imported already."
            raise ApiError(429, message, code="too_many_transfers", headers={"retry-after": "5"})
        self._open += 1
        try:
            folder = Path(await run_in_threadpool(tempfile.mkdtemp, dir=self._folder))
            try:
                yield folder
            finally:
                await asyncio.shield(run_in_threadpool(discard, folder))
        except OSError as error:
            if error.errno not in FULL:
                raise
            message = "There is no room on the server's disk for this capsule now."
            raise ApiError(507, message, code="insufficient_storage", headers={"retry-after": "10"}) from None
        finally:
            self._open -= 1

    async def receive(self, request: Request, path: Path) -> None:
        """Write a request's body into the new file ``path``.

        Raises a 413 for more than ``max_bytes``, a 507 when the disk would get full, a 408 when nothing comes any
        more, and ClientLeft.
        """
        length = request.headers.get("content-length", "0")
        if length.isdecimal() and int(length[:20]) > self.max_bytes:
            raise self._too_large()
        size = 0
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb", buffering=0) as file:
            async for data in read_chunks(request):
                size += len(data)
                if size > self.max_bytes:
                    raise self._too_large()
                await run_in_threadpool(self._append, file, data)

    def _append(self, file: object, data: bytes) -> None:
        disk = shutil.disk_usage(self._folder)
        if disk.free - len(data) < disk_floor(disk.total):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_all(file, data)

    def _too_large(self) -> ApiError:
        return ApiError(413, f"The capsule is larger than {self.max_bytes} bytes.", code="request_too_large")


def discard(folder: Path) -> None:
    """Remove a folder into which the engine may still be writing; it is renamed first, so that the engine no longer
    finds it.
    """
    with suppress(OSError):
        folder = folder.rename(folder.with_name(f"{folder.name}.gone"))
    shutil.rmtree(folder, ignore_errors=True)


async def read_chunks(request: Request) -> AsyncIterator[bytes]:
    """A body in pieces of about ``CHUNK`` bytes. Raises a 408, or ClientLeft."""
    data = bytearray()
    while True:
        try:
            async with asyncio.timeout(STALL_SECONDS):
                message = await request.receive()
        except TimeoutError:
            raise ApiError(408, "The body was not received completely.", code="request_timeout") from None
        if message["type"] == "http.disconnect":
            raise ClientLeft
        data += message.get("body", b"")
        last = not message.get("more_body", False)
        if len(data) >= CHUNK or (last and data):
            yield bytes(data)
            data.clear()
        if last:
            return


class CapsuleResponse(Response):
    """A capsule as a streamed response. ``close`` is awaited exactly once, however the response ends."""

    media_type = MEDIA_TYPE

    def __init__(self, capsule: Capsule, name: str, close: Callable[[], Awaitable[object]]) -> None:
        self.status_code = 200
        self.background = None
        self._capsule = capsule
        self._close = close
        self.init_headers(
            {"content-length": str(capsule.length), "content-disposition": f'attachment; filename="{name}"'}
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with suppress(ClientLeft):
                await while_connected(receive, self._stream(send))
        finally:
            await self._close()

    async def _stream(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        chunks = self._capsule.chunks()
        while (data := await run_in_threadpool(next, chunks, None)) is not None:
            for start in range(0, len(data), PIECE):  # a slow reader is none that has stopped
                try:
                    async with asyncio.timeout(STALL_SECONDS):
                        body = data[start : start + PIECE]
                        await send({"type": "http.response.body", "body": body, "more_body": True})
                except (TimeoutError, OSError):
                    raise ClientLeft from None
        await send({"type": "http.response.body", "body": b"", "more_body": False})
