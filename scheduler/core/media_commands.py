"""``MediaCommands``: answers the server's questions by what ids a picture or sound is fed, off the engine's loop."""

from __future__ import annotations

import logging
from concurrent.futures import Future, ThreadPoolExecutor

from scheduler.media.media_store import MediaStore, Medium
from scheduler.protocol import Expand, Expanded, ExpandedMedium, MediaItem

log = logging.getLogger("warmturn.engine")

NO_MEDIA = "This model does not take pictures or sounds."


class MediaCommands:
    """Processes media on a thread of its own. Call ``take`` after each step."""

    def __init__(self, media_store: MediaStore | None) -> None:
        """``media_store``: None if the model takes none."""
        self._media_store = media_store
        self._thread = ThreadPoolExecutor(1, "media")
        self._open: list[tuple[Expand, dict[str, Future[Medium]]]] = []

    @property
    def busy(self) -> bool:
        """Whether questions wait for an answer, or files that are to be removed are still there."""
        files = self._media_store.files if self._media_store is not None else None
        return bool(self._open) or (files is not None and files.busy)

    def expand(self, request: Expand) -> None:
        """Process the media that are not known and that came with their bytes."""
        started: dict[str, Future[Medium]] = {}
        store = self._media_store
        for item in request.media if store is not None else ():
            if store is not None and item.data and store.find(request.tenant, item.digest) is None:
                started[item.digest] = self._thread.submit(store.make, item.digest, item.data, item.kind)
        self._open.append((request, started))

    def take(self) -> list[Expanded]:
        """The answers since the last call."""
        ready = [one for one in self._open if all(future.done() for future in one[1].values())]
        self._open = [one for one in self._open if one not in ready]
        return [self._answer(request, started) for request, started in ready]

    def _answer(self, request: Expand, started: dict[str, Future[Medium]]) -> Expanded:
        if self._media_store is None:
            return Expanded(request.request, tuple(refuse(item, NO_MEDIA) for item in request.media))
        made, unknown = [], []
        for item in request.media:
            medium = self._media_store.find(request.tenant, item.digest)
            if medium is None and item.digest in started:
                try:
                    medium = self._media_store.add(request.tenant, item.digest, started[item.digest].result())
                except ValueError as error:
                    made.append(refuse(item, f"{str(error)[:1].upper()}{str(error)[1:]}."))
                    continue
                except Exception:  # whatever a processor raises
                    log.exception("a picture or sound could not be processed")
                    made.append(refuse(item, "It cannot be processed."))
                    continue
            if medium is None:
                unknown.append(item.digest)
            else:
                made.append(ExpandedMedium(item.digest, medium.text, medium.ids.tobytes()))
        return Expanded(request.request, tuple(made), tuple(unknown))

    def close(self) -> None:
        """Let the thread end, and write the rows that are to be written."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self._media_store is not None and self._media_store.files is not None:
            self._media_store.files.close()


def refuse(item: MediaItem, reason: str) -> ExpandedMedium:
    """The answer for a medium that cannot be used."""
    return ExpandedMedium(item.digest, "", b"", reason)
