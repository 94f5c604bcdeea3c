"""What stands for media in a prompt. The model's processor, which the engine runs, says by what text the mark of one
is replaced, and which media ids stand in place of the placeholders that this text has as tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from cache.media_ids import is_first
from scheduler.model_facts import MediaMarks, ModelFacts
from server.errors import bad_request
from server.log.logged_message import LoggedMessage


class Expansion(NamedTuple):
    """Of one picture: the text in place of its mark, and the media ids of its rows."""

    text: str
    ids: array[int]


Expander = Callable[[Sequence[str]], Mapping[str, Expansion]]  # of digests; blocks until the engine has answered


class Encoder(Protocol):
    """What of a tokenizer is needed here."""

    def encode(self, text: str, *, special: bool) -> list[int]: ...


_expander: ContextVar[Expander | None] = ContextVar("expander", default=None)


def expand_with(expander: Expander) -> None:
    """Prompts that are built from here on in this context ask ``expander`` for their media."""
    _expander.set(expander)


@dataclass(frozen=True)
class PromptMedia:
    """The media of a conversation. ``marks``: how prompts of this model name them; None if there are none."""

    marks: MediaMarks | None = None
    expansions: Mapping[str, Expansion] | None = None

    def encode(self, tokens: Encoder, text: str, messages: Iterable[LoggedMessage]) -> list[int]:
        """The token ids of a rendered text, with media ids in place of the placeholders of the media of
        ``messages``, which are in it. Raises a 400 if the template does not show all of them, or if a text has the
        model's own marks.
        """
        media = [self._expansion(one.digest) for message in messages for one in message.media]
        if not media or self.marks is None:
            return tokens.encode(text, special=False)
        before, *behind = text.split(self.marks.mark)
        if len(behind) != len(media):
            message = "The model's chat template does not take media in these messages."
            raise bad_request(message, "messages", "invalid_media")
        parts = (part for one, rest in zip(media, behind, strict=True) for part in (one.text, rest))
        ids = tokens.encode("".join([before, *parts]), special=False)
        rows = [row for one in media for row in one.ids]
        if ids.count(self.marks.placeholder) != len(rows):
            raise _as_error()
        numbers = iter(rows)
        return [next(numbers) if token == self.marks.placeholder else token for token in ids]

    def know(self, ids: Iterable[int]) -> bool:
        """Whether all media ids are of these media, as they are processed now."""
        known = {one.ids[0] for one in (self.expansions or {}).values()}
        return all(token in known for token in ids if is_first(token))

    def _expansion(self, digest: str) -> Expansion:
        assert self.expansions is not None
        return self.expansions[digest]


NO_MEDIA = PromptMedia()
NAMES = {"image": "pictures", "audio": "sounds"}


def media_of(facts: ModelFacts, messages: Sequence[LoggedMessage]) -> PromptMedia:
    """The media of a conversation. Blocking. Raises a 400 if the model takes none, if one cannot be used, or if a
    text has the model's own marks.
    """
    digests = digests_of(messages)
    if not digests:
        return NO_MEDIA
    expander, marks = _expander.get(), facts.media_marks
    kinds = {one.kind for message in messages for one in message.media}
    if marks is None or expander is None or not kinds.issubset(facts.media):
        lacking = " and ".join(NAMES[kind] for kind in sorted(kinds - {*facts.media} or kinds))
        raise bad_request(f"This model does not take {lacking}.", "messages", "unsupported_value")
    if any(marks.mark in message.content for message in messages):
        raise _as_error()
    return PromptMedia(marks, expander(digests))


def digests_of(messages: Iterable[LoggedMessage]) -> list[str]:
    """The digests of all media in messages, each once."""
    return [*dict.fromkeys(one.digest for message in messages for one in message.media)]


def _as_error() -> Exception:
    message = "A text of the conversation has the characters with which this model marks pictures or sounds."
    return bad_request(message, "messages", "invalid_value")
