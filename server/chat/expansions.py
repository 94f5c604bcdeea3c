"""What stands for media in a prompt. The model's processor, which the engine runs, says by what text the mark of one
is replaced, and which media ids stand in place of the placeholders that this text has as tokens.
"""

from __future__ import annotations

import re
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from cache.media_ids import MEDIA, is_first
from scheduler.model_facts import MediaMarks, ModelFacts
from server.errors import bad_request
from server.log.logged_message import LoggedMessage


class Expansion(NamedTuple):
    """Of one picture: the text in place of its mark, and the media ids of its rows."""

    text: str
    ids: array[int]


Expander = Callable[[Mapping[str, str]], Mapping[str, Expansion]]  # of kinds by digest; blocks until it is answered


class Encoder(Protocol):
    """What of a tokenizer is needed here."""

    def encode(self, text: str, *, special: bool) -> list[int]: ...


_expander: ContextVar[Expander | None] = ContextVar("expander", default=None)


def expand_with(expander: Expander) -> None:
    """Prompts that are built from here on in this context ask ``expander`` for their media."""
    _expander.set(expander)


@dataclass(frozen=True)
class PromptMedia:
    """The media of a conversation. ``marks``: how prompts of this model name those of each kind; none if there are
    none.
    """

    marks: Mapping[str, MediaMarks] = field(default_factory=dict)
    expansions: Mapping[str, Expansion] | None = None

    def encode(self, tokens: Encoder, text: str, messages: Iterable[LoggedMessage]) -> list[int]:
        """The token ids of a rendered text, with media ids in place of the placeholders of the media of
        ``messages``, which are in it. Raises a 400 if the template does not show all of them, or if a text has the
        model's own marks.
        """
        media = [one for message in messages for one in message.media]
        if not media or not self.marks:
            return tokens.encode(text, special=False)
        kinds = {marks.mark: kind for kind, marks in self.marks.items()}
        before, *shown = re.split(f"({'|'.join(map(re.escape, kinds))})", text)
        if [kinds[mark] for mark in shown[::2]] != [one.kind for one in media]:
            message = "The model's chat template does not take media in these messages."
            raise bad_request(message, "messages", "invalid_media")
        expanded = [self._expansion(one.digest) for one in media]
        parts = (part for one, rest in zip(expanded, shown[1::2], strict=True) for part in (one.text, rest))
        ids = tokens.encode("".join([before, *parts]), special=False)
        rows = [row for one in expanded for row in one.ids]
        placeholders = {marks.placeholder for marks in self.marks.values()}
        if sum(token in placeholders for token in ids) != len(rows):
            raise _as_error()
        numbers = iter(rows)
        return [next(numbers) if token in placeholders else token for token in ids]

    def know(self, ids: Iterable[int]) -> bool:
        """Whether all media ids are of these media, as they are processed now."""
        known = {one.ids[0] for one in (self.expansions or {}).values()}
        return all(token in known for token in ids if is_first(token))

    def _expansion(self, digest: str) -> Expansion:
        assert self.expansions is not None
        return self.expansions[digest]


NO_MEDIA = PromptMedia()
NAMES = {"image": "pictures", "audio": "sounds", "video": "videos"}


def media_of(facts: ModelFacts, messages: Sequence[LoggedMessage]) -> PromptMedia:
    """The media of a conversation. Blocking. Raises a 400 if the model takes none, if one cannot be used, or if a
    text has the model's own marks.
    """
    kinds = {one.digest: one.kind for message in messages for one in message.media}
    if not kinds:
        return NO_MEDIA
    expander = _expander.get()
    marks = {one.kind: one for one in facts.marks}
    lacking = sorted({*kinds.values()} - ({*facts.media} & marks.keys()))
    if lacking or expander is None:
        told = " and ".join(NAMES[kind] for kind in lacking or sorted({*kinds.values()}))
        raise bad_request(f"This model does not take {told}.", "messages", "unsupported_value")
    _check_together(facts, [one.kind for message in messages for one in message.media])
    if any(one.mark in message.content for message in messages for one in marks.values()):
        raise _as_error()
    return PromptMedia(marks, expander(kinds))


def _check_together(facts: ModelFacts, kinds: Sequence[str]) -> None:
    """Raises a 400 for media of these kinds that the model does not take in one conversation."""
    if facts.media_apart and len({*kinds}) > 1:
        told = " or ".join(NAMES[kind] for kind in sorted({*kinds}))
        raise bad_request(f"This model takes {told} in one conversation, not both.", "messages", "unsupported_value")
    for marks in facts.marks:
        if marks.single and kinds.count(marks.kind) > 1:
            told = NAMES[marks.kind].removesuffix("s")
            raise bad_request(f"This model takes one {told} in a conversation.", "messages", "unsupported_value")


def count_rows(ids: Iterable[int], kinds: Sequence[str]) -> Counter[str]:
    """How many of ``ids`` are rows of media of each kind; the media have these ``kinds``, in their order."""
    rows: list[int] = []
    for token in ids:
        if is_first(token) or (token >= MEDIA and not rows):
            rows.append(0)
        if token >= MEDIA:
            rows[-1] += 1
    if len(rows) != len(kinds):
        return Counter({kinds[0]: sum(rows)})
    found: Counter[str] = Counter()
    for kind, count in zip(kinds, rows, strict=True):
        found[kind] += count
    return found


def digests_of(messages: Iterable[LoggedMessage]) -> list[str]:
    """The digests of all media in messages, each once."""
    return [*dict.fromkeys(one.digest for message in messages for one in message.media)]


def _as_error() -> Exception:
    message = "A text of the conversation has the characters with which this model marks pictures or sounds."
    return bad_request(message, "messages", "invalid_value")
