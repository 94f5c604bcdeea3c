"""``MediaEncoder``: has the pictures that running turns wait for encoded, between steps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch

from cache.segments.chain import Owner
from scheduler.core.turn import Turn
from scheduler.media.media_store import MediaStore, Medium

log = logging.getLogger("warmturn.engine")

TOGETHER = 8  # pictures of one encoder pass


class MediaEncoder:
    """Encodes one picture before a step, so that no reply waits for more. While no turn decodes, pictures of several
    turns that are fed to the encoder in one shape are encoded together, where that was measured to change nothing.
    """

    def __init__(self, store: MediaStore, fail: Callable[[Turn, str], None]) -> None:
        """``fail`` ends a turn with an error."""
        self._store, self._fail = store, fail

    def encode_next(self, fed: Sequence[Turn], decodes: bool) -> None:
        """Encode what the first of the turns that are ``fed`` next lacks. A turn whose medium fails is ended.
        ``decodes``: a reply is being generated.
        """
        waiting = [(turn, medium) for turn in fed if (medium := self._missing(turn)) is not None]
        if not waiting:
            return
        first = waiting[0][1]
        sight = first.sight
        alike = [pair for pair in waiting if pair[1].sight is sight and pair[1].shapes == first.shapes]
        chosen = waiting[:1] if decodes or not sight.together else alike[:TOGETHER]
        before = self._store.seconds
        try:
            self._store.encode(list(dict.fromkeys(medium for _, medium in chosen)))
        except Exception as error:  # out of memory, or a bug in a model
            log.error("a picture or sound could not be encoded", exc_info=error)
            if isinstance(error, torch.AcceleratorError):
                raise
            if len(chosen) > 1:
                sight.together = False  # the next step encodes one
            else:
                self._fail(chosen[0][0], "the model failed on a picture or sound of this request")
            return
        for turn in dict.fromkeys(turn for turn, _ in chosen):
            turn.encoding += self._store.seconds - before
            self.keep(turn)

    def keep(self, turn: Turn) -> None:
        """Have the session of a turn keep its pictures' rows on disk, if it has a name."""
        if turn.media is not None and turn.request.session is not None:
            self._store.keep(Owner(turn.request.tenant, turn.request.session, True), turn.media)

    @staticmethod
    def _missing(turn: Turn) -> Medium | None:
        """The first picture that a turn waits for."""
        if turn.media is None or turn.session is None:
            return None
        missing = turn.media.first_missing(turn.session.length)
        if missing is None:
            return None
        assert isinstance(missing.medium, Medium)
        return missing.medium
