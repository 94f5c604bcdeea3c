"""Loading and unloading adapters: at start, and as the server asks for it between steps."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Sequence
from pathlib import Path

from cache.pages.session import common_prefix
from cache.pages.timeline_key import MARKED, TimelineKey
from scheduler.adapter_messages import AdapterLoaded, LoadAdapter, UnloadAdapter
from scheduler.adapters.adapter import AdapterUse
from scheduler.adapters.adapter_checkpoint import BadAdapter
from scheduler.adapters.adapter_set import AdapterSet
from scheduler.engine_config import AdapterSource
from scheduler.model.loader import LoadedModel, LoadFailed

log = logging.getLogger("warmturn.engine")


def refuse_adapters(loaded: LoadedModel, ranks: int) -> str:
    """Why a model takes no adapters; empty if it does."""
    if ranks > 1:
        return "adapters are not served with --tensor-parallel"
    return "adapters are not served for encoder-decoder models" if loaded.start else ""


def load_adapters(adapters: AdapterSet, sources: Sequence[AdapterSource]) -> None:
    """Load adapters at start. Raises ``LoadFailed`` for one that is needed."""
    for source in sources:
        try:
            adapters.load(source.name, Path(source.folder))
        except BadAdapter as error:
            if source.needed:
                raise LoadFailed(f"the adapter {source.name} cannot be used: {error}") from None
            log.error("the adapter %s is not served any more: %s", source.name, error)


class AdapterCommands:
    """Executes commands about adapters between steps, and collects the answers."""

    def __init__(self, adapters: AdapterSet | None) -> None:
        self._adapters = adapters
        self._answers: list[AdapterLoaded] = []

    def take(self) -> list[AdapterLoaded]:
        """The answers since the last call."""
        answers, self._answers = self._answers, []
        return answers

    def load(self, request: LoadAdapter) -> None:
        """Load an adapter; steps wait for it."""
        try:
            if self._adapters is None:
                raise BadAdapter("this model takes no adapters")
            answer = AdapterLoaded(request.request, self._adapters.load(request.name, Path(request.folder)).facts)
        except BadAdapter as error:
            answer = AdapterLoaded(request.request, error=str(error))
        except Exception as error:  # out of memory, or a file like no other
            log.error("an adapter could not be loaded", exc_info=error)
            answer = AdapterLoaded(request.request, error="it could not be loaded")
        self._answers.append(answer)

    def unload(self, request: UnloadAdapter) -> None:
        if self._adapters is not None:
            self._adapters.unload(request.name)

    def key_of(self, known: array[int], ids: array[int]) -> TimelineKey | None:
        """The loaded adapter with which a timeline of ``ids`` was computed that the cache knows as ``known``; None: no
        token of it.
        """
        begin = common_prefix(known, ids)
        marked = known[begin : min(begin + MARKED, len(ids))]
        uses = (AdapterUse(adapter, begin) for adapter in self._adapters or ())
        same = (use for use in uses if use.mark(ids[begin : begin + len(marked)], begin) == marked)
        return next(same, None) if marked else None
