"""An exception as one line."""

from __future__ import annotations

import pytest

from cache.error_line import first_line


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ("one\ntwo", "one"),
        ("what is wrong:\n    TypeError: three\nfour", "what is wrong: TypeError: three"),
        ("at the end:", "at the end:"),
        ("", "ValueError"),
    ],
)
def test_the_line_that_says_what_is_wrong(message: str, told: str) -> None:
    assert first_line(ValueError(message)) == told
    assert first_line(ValueError(message), 3) == (told[:3] if message else told)
