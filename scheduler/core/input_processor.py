"""``InputProcessor``: makes a turn of a request, or says why it is refused."""

from __future__ import annotations

import logging
from array import array
from functools import partial

from cache.media_ids import MEDIA, count_media
from cache.pages.timeline_key import MARKED
from cache.pages.timeline_media import TimelineMedia
from scheduler.adapters.adapter import AdapterUse
from scheduler.adapters.adapter_set import AdapterSet
from scheduler.core.text import TextStream, Vocabulary
from scheduler.core.thinking import ThinkingState
from scheduler.core.turn import Turn
from scheduler.core.turn_limits import Limits
from scheduler.media.media_store import MediaStore, NotTogether, UnknownMedium
from scheduler.protocol import Refused, Submit, unpack_ids

log = logging.getLogger("warmturn.engine")


class InputProcessor:
    """Checks requests against ``limits`` and gives their turns what they decode and see. Queues nothing."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        limits: Limits,
        media_store: MediaStore | None,
        adapters: AdapterSet | None = None,
    ) -> None:
        """``media_store``: None if the model takes none. ``adapters``: None if turns may name none."""
        self._vocabulary = vocabulary
        self._limits = limits
        self._media_store = media_store
        self._adapters = adapters

    def make_turn(self, request: Submit) -> Turn | Refused:
        ids = unpack_ids(request.prompt)
        refused = self._limits.refuse(request, ids)
        if refused is not None:
            return refused
        if request.salt and request.session is not None:  # forgetting the session would not find its KV
            return Refused(request.turn, "invalid_prompt", "A turn of a session has no salt.")
        if request.adapter and (self._adapters is None or self._adapters.find(request.adapter) is None):
            return Refused(request.turn, "model_not_found", "This adapter is not loaded any more.")
        use = self._use(request, ids)
        if use is not None and use.begin is not None and count_media(ids[use.begin : use.begin + MARKED]):
            return Refused(request.turn, "invalid_prompt", "What an adapter computes begins with no picture or sound.")
        if max(ids) >= MEDIA:
            media = self._place_media(request, ids)
            return media if isinstance(media, Refused) else self._turn(request, ids, use, media)
        return self._turn(request, ids, use)

    def _turn(
        self, request: Submit, ids: array[int], use: AdapterUse | None, media: TimelineMedia | None = None
    ) -> Turn:
        text = TextStream(self._vocabulary, self._limits.start or ids, request.stopping.stop, request.special)
        turn = Turn(request, text, self._limits.start, media, use)
        if request.thinking is not None:
            spell = partial(self._vocabulary.spell_shown, special=request.special)
            turn.thinking = ThinkingState(request.thinking, spell)
        return turn

    def _use(self, request: Submit, ids: array[int]) -> AdapterUse | None:
        adapter = self._adapters.find(request.adapter) if self._adapters is not None and request.adapter else None
        return None if adapter is None else adapter.use(ids)

    def _place_media(self, request: Submit, ids: array[int]) -> TimelineMedia | Refused:
        """Where the media of a prompt with media ids stand."""
        assert self._media_store is not None
        try:
            return self._media_store.place(request.tenant, ids, request.media)
        except UnknownMedium:
            return Refused(
                request.turn, "unknown_media", "A picture or sound of the prompt is not in memory; try again."
            )
        except NotTogether as refusal:
            return Refused(request.turn, "invalid_prompt", str(refusal))
        except Exception as error:  # whatever the model's own code for positions raises
            log.error("the positions of a prompt with pictures or sounds could not be computed", exc_info=error)
            return Refused(request.turn, "invalid_prompt", "The model cannot take pictures or sounds in these places.")
