"""Reads forms of the type ``multipart/form-data`` (RFC 7578) piece by piece, so that a file need not fit in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator
from email.message import Message
from email.parser import HeaderParser

from starlette.requests import Request

from server.errors import ApiError, bad_request

FORM = "multipart/form-data"
MOST_PARTS = 16
LONGEST_HEAD = 8192  # bytes of the headers of a part
LONGEST_BOUNDARY = 70  # RFC 2046, 5.1.1
NOT_A_FORM = "The body is no valid multipart form."


class FormPart:
    """A field of a form: its ``name``, and for a file its ``filename``, else None."""

    def __init__(self, head: bytes) -> None:
        """Raises a 400 for headers that name no field."""
        headers = HeaderParser().parsestr(head.decode(errors="replace"))
        name = parameter(headers, "name")
        if headers.get_content_disposition() != "form-data" or not name:
            raise bad_request(NOT_A_FORM)
        self.name = name
        self.filename = parameter(headers, "filename")


def check_form(request: Request) -> str:
    """The Content-Type of a request whose body is a form. Raises a 415."""
    content_type = request.headers.get("content-type", "")
    if content_type.partition(";")[0].strip().lower() != FORM:
        raise ApiError(415, f"The body must be a form: Content-Type: {FORM}.")
    return content_type


def declared_size(request: Request) -> int:
    """The bytes of the body that its head tells; 0 if it does not."""
    length = request.headers.get("content-length", "")
    return int(length[:20]) if length.isdecimal() else 0


def parameter(headers: Message, name: str) -> str | None:
    """A parameter of Content-Disposition; None if there is none."""
    found = headers.get_param(name, header="content-disposition")
    return found if isinstance(found, str) else None if found is None else found[2]


def boundary_of(content_type: str) -> bytes:
    """The boundary that a Content-Type names. Raises a 400."""
    headers = Message()
    headers["content-type"] = content_type
    found = headers.get_param("boundary")
    if not isinstance(found, str) or not 0 < len(found) <= LONGEST_BOUNDARY or not found.isascii():
        raise bad_request(NOT_A_FORM)
    return found.encode()


async def read_parts(content_type: str, chunks: AsyncIterator[bytes]) -> AsyncIterator[FormPart | bytes]:
    """Each part of a form, followed by its content in pieces. Raises a 400 for a body that is no form, or is cut
    off.
    """
    delimiter = b"\r\n--" + boundary_of(content_type)
    data, inside, parts, more = bytearray(b"\r\n"), False, 0, True
    while True:
        place = data.find(delimiter)
        if place < 0 or len(data) < place + len(delimiter) + 2:
            kept = len(data) - len(delimiter) - 1 if place < 0 else place
            if inside and kept > 0:
                yield bytes(data[:kept])
                del data[:kept]
            if not more or (not inside and len(data) > LONGEST_HEAD):
                raise bad_request(NOT_A_FORM)
            more = await extend(data, chunks)
            continue
        if inside and place:
            yield bytes(data[:place])
        del data[: place + len(delimiter)]
        if data.startswith(b"--"):
            return
        while (end := data.find(b"\r\n\r\n")) < 0:
            if not more or len(data) > LONGEST_HEAD:
                raise bad_request(NOT_A_FORM)
            more = await extend(data, chunks)
        parts += 1
        if parts > MOST_PARTS or end > LONGEST_HEAD or not data.startswith(b"\r\n"):
            raise bad_request(NOT_A_FORM)
        yield FormPart(bytes(data[2 : end + 4]))
        del data[: end + 4]
        inside = True


async def extend(data: bytearray, chunks: AsyncIterator[bytes]) -> bool:
    """Append a further chunk; False if there is none."""
    chunk = await anext(chunks, None)
    data += chunk or b""
    return chunk is not None
