"""Reads a form with a sound in it into memory."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import TypeVar

from starlette.requests import Request

from server.api.audio.schemas import LISTS, TranslationForm
from server.api.sessions.transfers import read_chunks
from server.errors import ApiError, bad_request
from server.http.body_memory import BodyMemory
from server.http.multipart import FormPart, check_form, declared_size, read_parts
from server.media.media_limits import MAX_FILE
from server.schemas import strict
from server.schemas.strict import validate

F = TypeVar("F", bound=TranslationForm)
LONGEST_FIELD = 32 * 1024  # bytes of another field


async def receive_sound(request: Request, schema: type[F]) -> tuple[F, bytes]:
    """The form's fields and its file. Raises a 400 for a wrong form, a 413, a 415, a 408, and ClientLeft."""
    content_type = check_form(request)
    if declared_size(request) > MAX_FILE + 2**16:
        raise too_large()
    bodies: BodyMemory = request.app.state.bodies
    async with AsyncExitStack() as held:
        await held.enter_async_context(bodies.hold(declared_size(request) or MAX_FILE))
        fields, data = await read_fields(request, content_type)
    strict.ignore_unknown(request.app.state.ignore_unknown)
    form = validate(schema, fields)
    if data is None:
        raise bad_request("file is required.", "file", "missing_required_parameter")
    if not data:
        raise bad_request("file is empty.", "file", "invalid_media")
    return form, data


async def read_fields(request: Request, content_type: str) -> tuple[dict[str, object], bytes | None]:
    """The fields as text, those of ``LISTS`` as lists of it; and the bytes of the file, if there is one.
    Raises a 400 or a 413.
    """
    values: list[tuple[str, bytearray]] = []
    data: bytearray | None = None
    part: FormPart | None = None
    async for found in read_parts(content_type, read_chunks(request)):
        if isinstance(found, FormPart):
            part = found
            if part.name != "file":
                values.append((part.name, bytearray()))
            elif part.filename is None or data is not None:
                raise bad_request("file must be one file.", "file", "invalid_value")
            else:
                data = bytearray()
            continue
        assert part is not None
        kept = data if part.name == "file" else values[-1][1]
        assert kept is not None
        kept += found
        if len(kept) > (MAX_FILE if part.name == "file" else LONGEST_FIELD):
            raise too_large() if part.name == "file" else bad_request("A field of the form is too long.")
    return as_fields(values), None if data is None else bytes(data)


def as_fields(values: list[tuple[str, bytearray]]) -> dict[str, object]:
    """Fields by name. Raises a 400 for one that is there twice and is no list."""
    made: dict[str, object] = {}
    for name, value in values:
        text, bare = value.decode(errors="replace"), name.removesuffix("[]")
        if bare in LISTS:
            there = made.setdefault(bare, [])
            assert isinstance(there, list)
            there.append(text)
        elif name in made:
            raise bad_request("The form has a field twice.")
        else:
            made[name] = text
    return made


def too_large() -> ApiError:
    return ApiError(413, f"The file is larger than {MAX_FILE} bytes.", param="file", code="request_too_large")
