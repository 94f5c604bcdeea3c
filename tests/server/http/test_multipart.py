"""Multipart forms: read piece by piece, however the pieces are cut; what is no form is a 400."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from server.errors import ApiError
from server.http.multipart import LONGEST_HEAD, MOST_PARTS, FormPart, read_parts

TYPE = "multipart/form-data; boundary=xyz"
FORM = (
    b'preamble\r\n--xyz\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch'
    b'\r\n--xyz\r\ncontent-disposition: form-data; name="file"; filename="a b\xc3\xa4.jsonl"\r\n'
    b"Content-Type: application/octet-stream\r\n\r\n1\r\n--xy\r\n2\r\n-"
    b'\r\n--xyz\r\nContent-Disposition: form-data; name="empty"\r\n\r\n\r\n--xyz--\r\nepilogue'
)


def read(data: bytes, size: int = 1 << 20, content_type: str = TYPE) -> list[tuple[str, str | None, bytes]]:
    """The parts of a form that comes in pieces of ``size`` bytes: name, file name, content."""

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(data), size):
            yield data[start : start + size]

    async def all_parts() -> list[tuple[str, str | None, bytes]]:
        found: list[tuple[str, str | None, bytes]] = []
        async for part in read_parts(content_type, pieces()):
            if isinstance(part, FormPart):
                found.append((part.name, part.filename, b""))
            else:
                found[-1] = (*found[-1][:2], found[-1][2] + part)
        return found

    return asyncio.run(all_parts())


@pytest.mark.parametrize("size", [1, 2, 3, 7, 50, 10_000])
def test_a_form_is_the_same_however_it_is_cut(size: int) -> None:
    assert read(FORM, size) == [
        ("purpose", None, b"batch"),
        ("file", "a bä.jsonl", b"1\r\n--xy\r\n2\r\n-"),
        ("empty", None, b""),
    ]


def test_a_large_file_is_not_collected() -> None:
    head = b'--xyz\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n'
    data = bytes(range(256)) * 4096
    ((_, _, found),) = read(head + data + b"\r\n--xyz--", 65_536)
    assert found == data


@pytest.mark.parametrize(
    ("data", "content_type"),
    [
        (b"", TYPE),
        (b"no form at all", TYPE),
        (FORM[:-30], TYPE),
        (FORM[:60], TYPE),
        (b"--xyz\r\n\r\nx\r\n--xyz--", TYPE),
        (b"--xyz\r\nContent-Disposition: attachment; name=a\r\n\r\nx\r\n--xyz--", TYPE),
        (b"--xyz\r\nContent-Disposition: form-data\r\n\r\nx\r\n--xyz--", TYPE),
        (b"--xyzContent-Disposition: form-data; name=a\r\n\r\nx\r\n--xyz--", TYPE),
        (b"--xyz\r\n" + b"a" * 2 * LONGEST_HEAD, TYPE),
        (b"x" * 2 * LONGEST_HEAD, TYPE),
        (b"--xyz\r\nContent-Disposition: form-data; name=a\r\n\r\nx\r\n" * (MOST_PARTS + 1) + b"--xyz--", TYPE),
        (FORM, "multipart/form-data"),
        (FORM, "multipart/form-data; boundary="),
        (FORM, f"multipart/form-data; boundary={'x' * 71}"),
        (FORM, "multipart/form-data; boundary=other"),
    ],
)
def test_what_is_no_form_is_a_400(data: bytes, content_type: str) -> None:
    for size in (5, 1 << 20):
        with pytest.raises(ApiError) as caught:
            read(data, size, content_type)
        assert caught.value.status_code == 400
