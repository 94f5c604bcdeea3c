"""The lines of a batch's input, and the lines of results that are written for them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from cache.durable_files import sync_path

MOST_LINES = 50_000
LONGEST_LINE = 16 * 2**20  # bytes
LONGEST_ID = 256  # characters of a custom_id
CODES = {  # of errors of a line -> what is said of it
    "invalid_json_line": "This line is no JSON object with custom_id, method, url and body.",
    "line_too_long": f"This line is longer than {LONGEST_LINE} bytes.",
    "invalid_custom_id": f"custom_id must have 1 to {LONGEST_ID} characters.",
    "duplicate_custom_id": "An earlier line has the same custom_id.",
    "invalid_method": "method must be POST.",
    "invalid_url": "url must be the batch's endpoint.",
    "invalid_stream": "body.stream and body.background must be absent or false in a batch.",
    "batch_expired": "This request could not be executed before the completion window expired.",
}


class RequestLine(msgspec.Struct, frozen=True):
    """One line of the input. ``body`` is the request's JSON as it stands there."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class PlainBody(msgspec.Struct, frozen=True):
    """What a batch itself has to know of a request's body."""

    model: object = ""
    stream: object = None
    background: object = None

    @property
    def model_name(self) -> str:
        """The model that it names; "" for none."""
        return self.model if isinstance(self.model, str) else ""


class BatchTask(NamedTuple):
    """A line that is to be run: its number from 1, its place in the file, and its id."""

    number: int
    start: int
    length: int
    custom_id: str


class BadLine(NamedTuple):
    """A line that cannot be run, and the code of its error."""

    number: int
    custom_id: str | None
    code: str


def read_lines(path: Path, endpoint: str) -> Iterator[BatchTask | BadLine]:
    """The lines of an input that are not blank. Raises OSError."""
    seen: set[str] = set()
    start = number = 0
    with path.open("rb") as file:
        while data := file.readline(LONGEST_LINE + 1):
            length = len(data)
            while not data.endswith(b"\n") and (more := file.readline(LONGEST_LINE)):
                length, data = length + len(more), more
            if length > LONGEST_LINE + 1 or data.strip():
                number += 1
                if length > LONGEST_LINE:
                    yield BadLine(number, None, "line_too_long")
                else:
                    yield check_line(data, number, start, endpoint, seen)
            start += length


def check_line(data: bytes, number: int, start: int, endpoint: str, seen: set[str]) -> BatchTask | BadLine:
    """A line of the input. ``seen`` has the ids of earlier lines, and gets its own."""
    try:
        line = msgspec.json.decode(data, type=RequestLine)
        body = msgspec.json.decode(line.body, type=PlainBody)
        line.custom_id.encode()
    except (msgspec.DecodeError, UnicodeError):  # a lone surrogate cannot be written into a result
        return BadLine(number, None, "invalid_json_line")
    if not 0 < len(line.custom_id) <= LONGEST_ID:
        return BadLine(number, None, "invalid_custom_id")
    if line.custom_id in seen:
        return BadLine(number, line.custom_id, "duplicate_custom_id")
    seen.add(line.custom_id)
    if line.method != "POST":
        return BadLine(number, line.custom_id, "invalid_method")
    if line.url != endpoint:
        return BadLine(number, line.custom_id, "invalid_url")
    if body.stream not in (None, False) or body.background not in (None, False):
        return BadLine(number, line.custom_id, "invalid_stream")
    return BatchTask(number, start, len(data), line.custom_id)


def body_of(path: Path, task: BatchTask) -> bytes:
    """The body of a request. Raises OSError."""
    with path.open("rb") as file:
        file.seek(task.start)
        return bytes(msgspec.json.decode(file.read(task.length), type=RequestLine).body)


# --- results --------------------------------------------------------------------------------------------------


class LineError(msgspec.Struct, frozen=True):
    """Why a line was not run."""

    code: str
    message: str


class LineResponse(msgspec.Struct, frozen=True):
    """What the endpoint has answered."""

    status_code: int
    request_id: str
    body: msgspec.Raw


class ResultLine(msgspec.Struct, frozen=True):
    """A line of the output or error file. Its id ends with the number of the line that it is the result of."""

    id: str
    custom_id: str | None
    response: LineResponse | None
    error: LineError | None


class ResultId(msgspec.Struct, frozen=True):
    """As much of a result as tells of which line it is."""

    id: str

    @property
    def number(self) -> int:
        return int(self.id.rpartition("_")[2])


def result_id(batch: str, number: int) -> str:
    return f"batch_req_{batch.removeprefix('batch_')}_{number}"


def failed_line(batch: str, number: int, custom_id: str | None, code: str) -> bytes:
    """The result of a line that was not run."""
    return encode_result(ResultLine(result_id(batch, number), custom_id, None, LineError(code, CODES[code])))


def encode_result(result: ResultLine) -> bytes:
    return msgspec.json.encode(result) + b"\n"


class ResultJournal:
    """Results of a batch that are appended one by one, each durable when ``append`` returns. ``done`` has the numbers
    of the lines whose results are in it. A line that a crash has cut off is dropped.
    """

    def __init__(self, path: Path) -> None:
        """Open the journal, or begin it. Raises OSError."""
        self.path = path
        self.done: set[int] = set()
        self._file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+b", buffering=0)
        whole = 0
        with path.open("rb") as written:
            for line in written:
                try:
                    if not line.endswith(b"\n"):
                        break
                    self.done.add(msgspec.json.decode(line, type=ResultId).number)
                except (msgspec.DecodeError, ValueError):
                    break
                whole += len(line)
        self._file.truncate(whole)
        self._file.seek(whole)
        sync_path(path.parent)

    def append(self, lines: Sequence[bytes], numbers: Sequence[int]) -> None:
        """Add results. Raises OSError; then none of them is in it."""
        end = self._file.tell()
        try:
            data = memoryview(b"".join(lines))
            while data:
                data = data[self._file.write(data) :]
            os.fsync(self._file.fileno())
        except OSError:
            self._file.truncate(end)
            self._file.seek(end)
            raise
        self.done.update(numbers)

    def close(self) -> None:
        self._file.close()
