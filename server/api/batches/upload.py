"""Receives a file over HTTP: a multipart form whose file goes to disk as it comes."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request

from scheduler.disk_floor import floor as disk_floor
from server.api.batches.schemas import FileForm
from server.api.sessions.transfers import FULL, read_chunks
from server.errors import ApiError, bad_request
from server.http.multipart import FormPart, check_form, declared_size, read_parts
from server.schemas.strict import validate

MOST_BYTES = 200 * 2**20  # of a file, as with OpenAI
LONGEST_FIELD = 4096  # bytes of another field
LONGEST_NAME = 255  # characters of a file's name that are kept


@contextmanager
def room_on_disk() -> Iterator[None]:
    """Raises a 507 in place of an OSError that says that the disk is full or failing."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        message = "There is no room on the server's disk for this now."
        raise ApiError(507, message, code="insufficient_storage", headers={"retry-after": "10"}) from None


async def receive_file(request: Request, path: Path) -> tuple[FileForm, str, int]:
    """Write the form's file to the new file ``path``, durably; its other fields, its name and its bytes. Raises a 400
    for a wrong form, a 413, a 415, a 507, a 408, and ClientLeft.
    """
    content_type = check_form(request)
    if declared_size(request) > MOST_BYTES + 2**16:
        raise too_large()
    fields: dict[str, bytearray] = {}
    name, size, part = None, 0, None
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb", buffering=0) as file:
        async for found in read_parts(content_type, read_chunks(request)):
            if isinstance(found, FormPart):
                part = found
                if part.name in fields or (part.name == "file" and name is not None):
                    raise bad_request("The form has a field twice.")
                if part.name != "file":
                    fields[part.name] = bytearray()
                elif part.filename is None:
                    raise bad_request("file must be a file.", "file", "invalid_value")
                else:
                    name = part.filename[:LONGEST_NAME]
                continue
            assert part is not None
            if part.name == "file":
                size += len(found)
                if size > MOST_BYTES:
                    raise too_large()
                await run_in_threadpool(append, file.fileno(), path, found)
            elif len(fields[part.name]) + len(found) > LONGEST_FIELD:
                raise bad_request("A field of the form is too long.")
            else:
                fields[part.name] += found
        await run_in_threadpool(os.fsync, file.fileno())
    form = validate(FileForm, as_object(fields))
    if name is None:
        raise bad_request("file is required.", "file", "missing_required_parameter")
    return form, name, size


def append(descriptor: int, path: Path, data: bytes) -> None:
    """Write to a file as long as the disk keeps its floor. Blocking. Raises OSError."""
    disk = shutil.disk_usage(path.parent)
    if disk.free - len(data) < disk_floor(disk.total):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def as_object(fields: dict[str, bytearray]) -> dict[str, object]:
    """The fields of a form as a JSON object: ``name[key]`` is a key of an object. Raises a 400."""
    made: dict[str, object] = {}
    for name, value in fields.items():
        text = value.decode(errors="replace")
        outer, bracket, inner = name.partition("[")
        if not bracket:
            made[name] = text
            continue
        there = made.setdefault(outer, {})
        if not isinstance(there, dict):
            raise bad_request("The form has a field twice.")
        there[inner.removesuffix("]")] = text
    return made


def too_large() -> ApiError:
    return ApiError(413, f"The file is larger than {MOST_BYTES} bytes.", param="file", code="request_too_large")
