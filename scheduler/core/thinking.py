"""``ThinkingState``: follows a reply's reasoning token by token, and forces its end when its budget is spent."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import AnyStr

from scheduler.sampling_params import ThinkingBudget

MOST_TOKENS = 3  # that a character may still need where its first byte is there


class ThinkingState:
    """Where a reply is: before its reasoning, within it, or behind it. Depends on the reply's tokens only.

    A budget that is spent within a character is exceeded by what the character still needs, at most ``MOST_TOKENS``.
    The marks are searched for in the text of the tokens, as the server's parser does: a model may write one mark with
    different tokens.
    """

    def __init__(self, budget: ThinkingBudget, spell: Callable[[int], bytes]) -> None:
        """``spell`` returns the bytes of a token as the reply's text shows them; empty: it is not shown."""
        self._budget = budget
        self._spell = spell
        self._openings = [_bytes(opening) for opening in budget.openings]
        self._closings = [_bytes(closing) for closing in budget.closings]
        self._tail = b""  # of the text, where a mark may have begun
        self._inside = False
        self._over = False  # there will be no more reasoning
        self._spent = 0  # tokens
        self._forced: list[int] = []
        self._message = 0  # how many of ``_forced`` belong to the message
        self._ends = 0  # how often an end was forced
        self.cut = False  # whether reasoning was cut off: a reply that was closing it by itself was not
        if budget.opened:
            self._enter(b"")

    @property
    def forced(self) -> int | None:
        """The next token, whatever the model draws; None: what it draws."""
        return self._forced[0] if self._forced else None

    @property
    def allows_end(self) -> bool:
        """Whether the next token, or text that it completes, may end the reply: not where it belongs to the message."""
        return self._message == 0

    def accept(self, token: int) -> None:
        """Take the next token of the reply; it is ``forced`` if that is not None."""
        if self._forced:
            del self._forced[0]
            self._message = max(0, self._message - 1)
            if not self._forced:
                self._leave(b"")
        elif not self._over:
            self._tail += self._spell(token)
            if self._inside:
                self._spent += 1
                self._seek_closing()
            else:
                self._seek_opening()

    def _seek_opening(self) -> None:
        """Does the reasoning begin?"""
        if self._budget.anywhere:
            found = find_first(self._tail, self._openings)
            if found is None:
                self._tail = self._tail[-max(map(len, self._openings)) :]
            else:
                self._enter(self._tail[found[1] :])
            return
        said = self._tail.decode(errors="ignore").lstrip().encode()
        for opening in self._openings:
            if said.startswith(opening):
                self._enter(said[len(opening) :])
                return
        self._over = not any(opening.startswith(said) for opening in self._openings)

    def _enter(self, rest: bytes) -> None:
        self._inside, self._tail = True, rest
        self._seek_closing()

    def _seek_closing(self) -> None:
        """Does the reasoning end, or is its budget spent?"""
        found = find_first(self._tail, self._closings)
        if found is not None:
            self._leave(self._tail[found[1] :])
            return
        self._tail = self._tail[-max(MOST_TOKENS, *map(len, self._closings)) :]
        over = self._spent - self._budget.tokens
        if over >= MOST_TOKENS or (over >= 0 and not ends_within_character(self._tail)):
            self._force()

    def _leave(self, rest: bytes) -> None:
        self._inside, self._tail = False, rest
        self._over = not self._budget.anywhere
        if not self._over:
            self._seek_opening()

    def _force(self) -> None:
        """Nothing but the end of the reasoning may come."""
        budget = self._budget
        begun = count_begun(self._tail, self._closings[0])
        rest = budget.rests[begun - 1] if 0 < begun <= len(budget.rests) else ()
        self._ends += 1
        if rest:
            self._forced = [*rest]
            return
        self.cut = True
        if self._ends > 1:
            self._forced = [*(budget.answer or budget.end)]
            return
        message = budget.message if self._spent else ()
        self._forced, self._message = [*message, *budget.end], len(message)


def find_first(text: bytes, marks: Sequence[bytes]) -> tuple[int, int] | None:
    """Where the first of the marks in ``text`` begins and ends; None if there is none."""
    return min(((text.find(mark), text.find(mark) + len(mark)) for mark in marks if mark in text), default=None)


def count_begun(text: AnyStr, mark: AnyStr) -> int:
    """How many bytes or characters at the end of ``text`` are the beginning of ``mark``, but not all of it."""
    return next((size for size in range(min(len(text), len(mark) - 1), 0, -1) if mark.startswith(text[-size:])), 0)


def ends_within_character(text: bytes) -> bool:
    """Whether ``text`` ends with the beginning of a UTF-8 character."""
    return codecs.utf_8_decode(text, "ignore", False)[1] < len(text)


def _bytes(mark: str) -> bytes:
    """A mark as ``Vocabulary.spell`` has it, whatever the tokenizer writes for spaces."""
    return mark.replace("\u2581", " ").encode()
