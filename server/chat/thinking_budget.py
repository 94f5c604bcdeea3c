"""Makes the ``ThinkingBudget`` of a reply from the measured dialect: the marks of reasoning, and the token ids that are
forced where the budget is spent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from scheduler.sampling_params import ThinkingBudget
from server.chat.chat_tokenizer import ChatTokenizer
from server.chat.declared_parser import THOUGHTS
from server.chat.dialect import Dialect

MESSAGE = "Considering the limited time by the user, I have to give the solution based on the thinking directly now."
NEIGHBOURS = ("a", ".", "\n", "<", "1")  # texts behind which another one is encoded, to see what its own tokens are


@dataclass(frozen=True)
class ThinkingDefaults:
    """What requests do not say. ``tokens``: the budget (None: no limit); ``message`` is written before the end of
    reasoning that is cut off ("": nothing).
    """

    tokens: int | None = None
    message: str = MESSAGE


UNLIMITED = ThinkingDefaults()


@dataclass(frozen=True)
class ReasoningSpan:
    """How reasoning stands in a reply: it begins with one of ``openings`` and ends with the first of ``closings``.
    ``anywhere``: at any place, also repeatedly; else at the beginning only. ``before`` and ``behind`` are the texts
    that are written around the closing; ``behind_calls`` is ``behind`` as far as a call of a tool may still follow.
    """

    openings: tuple[str, ...]
    closings: tuple[str, ...]
    anywhere: bool
    before: str
    behind: str
    behind_calls: str

    @classmethod
    def of(cls, dialect: Dialect) -> ReasoningSpan | None:
        """That of a dialect; None if it has no reasoning, or if its marks are not fixed texts."""
        anchors: Sequence[str] = ()
        if dialect.declared is not None:
            fields = [field for name, field in dialect.declared.fields.items() if name in THOUGHTS]
            if len(fields) != 1 or not fields[0].open_literals or not fields[0].close_literals:
                return None
            openings, closings = tuple(fields[0].open_literals), tuple(fields[0].close_literals)
            anchors = dialect.declared.start_anchor_literals or ()
        elif dialect.thought is not None:
            openings, closings = (dialect.thought.opening,), (dialect.thought.closing,)
        else:
            return None
        before, found, behind = (dialect.thought_end or "").partition(closings[0])
        if not found or before.strip():
            before, behind = "\n", "\n\n" if dialect.declared is None else ""
        less = behind
        if behind.strip():  # it leads into the answer
            ends = [behind.find(anchor) + len(anchor) for anchor in anchors if anchor in behind]
            less = behind[: min(ends, default=0)]
        return cls(openings, closings, dialect.declared is not None, before, behind, less)


def measure_budget(tokens: ChatTokenizer, tail: str, limit: int, message: str, *, calls: bool) -> ThinkingBudget | None:
    """The budget of ``limit`` reasoning tokens for a reply to a prompt that ends with ``tail``; None if the model does
    not reason. ``calls``: the reply may call tools. Raises ValueError if the marks of its reasoning are not fixed
    texts. Blocking.
    """
    dialect = tokens.dialect
    span = ReasoningSpan.of(dialect)
    if span is None:
        if dialect.declared is not None and any(name in THOUGHTS for name in dialect.declared.fields):
            raise ValueError("the marks of reasoning are not fixed texts")
        return None
    closing = span.closings[0]
    behind = span.behind_calls if calls else span.behind
    return ThinkingBudget(
        tokens=limit,
        openings=span.openings,
        closings=span.closings,
        anywhere=span.anywhere,
        opened=any(tail.rstrip().endswith(opening.rstrip()) for opening in span.openings),
        message=encode_behind(tokens, "\n\n" + message) if message else (),
        end=encode_behind(tokens, span.before + closing + behind),
        rests=encode_rests(tokens, closing, behind),
        answer=encode_behind(tokens, span.before + closing + span.behind),
    )


def encode_rests(tokens: ChatTokenizer, closing: str, behind: str) -> tuple[tuple[int, ...], ...]:
    """The ids of what is left of ``closing`` and ``behind`` after 1, 2... characters of ``closing``; () if it is one
    token, which a text of other tokens does not begin.
    """
    if not closing.isascii() or len(tokens.encode(closing, special=False)) == 1:
        return ()
    return tuple(encode_behind(tokens, closing[size:] + behind) for size in range(1, len(closing)))


def encode_behind(tokens: ChatTokenizer, text: str) -> tuple[int, ...]:
    """The ids of ``text`` as it stands behind another one: some tokenizers begin every text with a space."""
    ids = tokens.encode(text, special=False)
    for neighbour in NEIGHBOURS:
        head = tokens.encode(neighbour, special=False)
        if tokens.decode([*head, *ids]) == tokens.decode(head) + text:
            return tuple(ids)
        whole = tokens.encode(neighbour + text, special=False)
        rest = whole[len(head) :]
        if whole[: len(head)] == head and tokens.decode(whole) == tokens.decode(head) + text:
            return tuple(rest)
    return tuple(ids)
