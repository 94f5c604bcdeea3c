"""The lines of a batch: which can be run, and what a crash leaves of the results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from server.batches import batch_lines
from server.batches.batch_lines import BadLine, BatchTask, ResultJournal, body_of, failed_line, read_lines

ENDPOINT = "/v1/completions"


def line(custom_id: object = "a", method: str = "POST", url: str = ENDPOINT, **body: Any) -> bytes:
    return json.dumps({"custom_id": custom_id, "method": method, "url": url, "body": {"prompt": "x", **body}}).encode()


def read(path: Path, *lines: bytes) -> list[BatchTask | BadLine]:
    path.write_bytes(b"\n".join(lines))
    return [*read_lines(path, ENDPOINT)]


@pytest.mark.parametrize(
    ("bad", "code"),
    [
        (b"{", "invalid_json_line"),
        (b"[]", "invalid_json_line"),
        (b"\xff", "invalid_json_line"),
        (b'{"custom_id": "b"}', "invalid_json_line"),
        (b'{"custom_id": "b", "method": "POST", "url": "/v1/completions", "body": []}', "invalid_json_line"),
        (b'{"custom_id": "b", "method": "POST", "url": "/v1/completions", "body": {}} {}', "invalid_json_line"),
        (rb'{"custom_id": "\ud800", "method": "POST", "url": "/v1/completions", "body": {}}', "invalid_json_line"),
        (line(7), "invalid_json_line"),
        (line(""), "invalid_custom_id"),
        (line("x" * 257), "invalid_custom_id"),
        (line("a"), "duplicate_custom_id"),
        (line("b", method="GET"), "invalid_method"),
        (line("b", url="/v1/responses"), "invalid_url"),
        (line("b", stream=True), "invalid_stream"),
        (line("b", background=True), "invalid_stream"),
    ],
)
def test_a_bad_line_has_a_code_and_the_others_are_run(tmp_path: Path, bad: bytes, code: str) -> None:
    first, found, last = read(tmp_path / "f", line(), bad, b"  \r", line("c", stream=False))
    assert isinstance(found, BadLine)
    assert (found.number, found.code) == (2, code)
    result = msgspec.json.decode(failed_line("batch_1", 2, found.custom_id, code))
    assert result["error"]["code"] == code
    assert result["response"] is None
    assert result["custom_id"] == found.custom_id
    assert isinstance(first, BatchTask)
    assert isinstance(last, BatchTask)
    assert (first.number, first.custom_id, last.number, last.custom_id) == (1, "a", 3, "c")
    assert json.loads(body_of(tmp_path / "f", last)) == {"prompt": "x", "stream": False}


def test_a_line_that_is_too_long_is_left_out_and_not_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_lines, "LONGEST_LINE", 200)
    found = read(tmp_path / "f", line(), b'"' + b"x" * 1000 + b'"', line("b"))
    assert [type(one) for one in found] == [BatchTask, BadLine, BatchTask]
    assert found[1] == BadLine(2, None, "line_too_long")
    assert json.loads(body_of(tmp_path / "f", found[2])) == {"prompt": "x"}  # type: ignore[arg-type]


@pytest.mark.parametrize("torn", [b"", b'{"id": "batch_req_1_3", "cust', b"\x00" * 100, b'{"id": "x"}\n'])
def test_a_journal_keeps_whole_results_and_drops_what_a_crash_has_cut_off(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "journal"
    journal = ResultJournal(path)
    journal.append([failed_line("batch_1", number, "a", "invalid_url") for number in (1, 2)], [1, 2])
    journal.close()
    whole = path.read_bytes()
    with path.open("ab") as file:
        file.write(torn)
    journal = ResultJournal(path)
    assert journal.done == {1, 2}
    assert path.read_bytes() == whole
    journal.append([failed_line("batch_1", 3, None, "invalid_url")], [3])
    journal.close()
    journal = ResultJournal(path)
    journal.close()
    assert journal.done == {1, 2, 3}
