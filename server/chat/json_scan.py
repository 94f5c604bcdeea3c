"""Finds the end of a JSON object or array in text that is still being streamed."""

from __future__ import annotations

import re

STRUCTURE = re.compile(r'["{}\[\]]')
STRING = re.compile(r'["\\]')


class JsonScan:
    """Scans one text from ``at`` on, where an object or array begins (``depth`` 0), or from within it.

    Only brackets and strings count: text that is not valid JSON ends where its brackets close.
    """

    def __init__(self, at: int = 0, depth: int = 0) -> None:
        self.at = at
        self._depth = depth
        self._in_string = False
        self._escaped = False

    def close(self, text: str) -> int | None:
        """The index after the closing bracket; None if it has not come yet. ``text`` may only have grown since the last
        call.
        """
        if self._escaped and self.at < len(text):
            self.at += 1
            self._escaped = False
        while True:
            found = (STRING if self._in_string else STRUCTURE).search(text, self.at)
            if found is None:
                self.at = len(text)
                return None
            mark = found.group()
            if mark == "\\":
                self._escaped = found.end() == len(text)  # what it escapes has not come yet
                self.at = len(text) if self._escaped else found.end() + 1
                continue
            self.at = found.end()
            if mark == '"':
                self._in_string = not self._in_string
            elif mark in "{[":
                self._depth += 1
            else:
                self._depth -= 1
                if self._depth <= 0:
                    return self.at
