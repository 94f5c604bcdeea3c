"""Commands on sessions that need no forward: forget, pin, inspect, export, import."""

from __future__ import annotations

from pathlib import Path

from cache.inventory import session_holdings
from cache.known_timelines import timeline_of
from cache.segments.chain import Owner
from cache.store import SessionStore
from scheduler.adapters.adapter_set import AdapterSet
from scheduler.core.adapter_commands import AdapterCommands
from scheduler.core.media_commands import MediaCommands
from scheduler.core.model_drafter import ModelDrafter
from scheduler.media.media_store import MediaStore
from scheduler.protocol import (
    Export,
    Exported,
    Forget,
    Forgotten,
    FromEngine,
    Import,
    Imported,
    Inspect,
    Inspected,
    Pin,
    unpack_ids,
)


class SessionCommands:
    """Executes commands between steps. Answers that need the disk come later: call ``take`` after each step."""

    def __init__(
        self,
        store: SessionStore,
        fingerprint: str,
        drafter: ModelDrafter | None = None,
        media_store: MediaStore | None = None,
        adapters: AdapterSet | None = None,
    ) -> None:
        """``drafter``: of the draft model, which has a cache of its own for each session. ``media_store``: None if the
        model takes none. ``adapters``: None if turns may name none.
        """
        self.adapters = AdapterCommands(adapters)
        self.media = MediaCommands(media_store)
        self._rows = None if media_store is None else media_store.files
        self._store = store
        self.drafter = drafter
        self._fingerprint = fingerprint
        self._answers: list[FromEngine] = []

    def take(self) -> list[FromEngine]:
        """The answers since the last call."""
        if self._rows is not None:
            self._rows.poll()
        answers, self._answers = self._answers, []
        return [*answers, *self.media.take(), *self.adapters.take()]

    def forget(self, request: Forget) -> None:
        """Drop a session from every tier. Its turn has been ended."""

        stores = [self._store] if self.drafter is None else [self._store, self.drafter.store]
        owner = Owner(request.tenant, request.session, True)
        left = len(stores) + (self._rows is not None)

        def told() -> None:
            nonlocal left
            left -= 1
            if not left:
                self._answers.append(Forgotten(request.tenant, request.session, request.life))

        if self.drafter is not None:
            self.drafter.release_ended()
        for store in stores:
            store.forget(request.tenant, request.session)
            if store.archive is None:
                told()
            else:
                store.archive.forget(owner, told)
        if self._rows is not None:
            self._rows.forget(owner, told)

    def pin(self, request: Pin) -> None:
        """Evict a session last."""
        self._store.pin(request.tenant, request.session, request.until)
        if self.drafter is not None:
            self.drafter.store.pin(request.tenant, request.session, request.until)

    def inspect(self, request: Inspect) -> None:
        tiers = session_holdings(self._store, request.tenant, request.session)
        running = self._store.busy(request.tenant, request.session)
        self._answers.append(Inspected(request.request, tiers, running))

    def export(self, request: Export) -> None:
        """Put the files of a session into a folder."""

        def told(files: int, tokens: int) -> None:
            self._answers.append(Exported(request.request, files, tokens))

        session = self._store.find(request.tenant, request.session)
        if self._store.archive is None:
            told(0, 0)
        else:
            owner = Owner(request.tenant, request.session, True)
            ids = None if request.token_ids is None else unpack_ids(request.token_ids)
            if ids and (key := self.adapters.key_of(timeline_of(self._store, *owner[:2]), ids)) is not None:
                ids = key.mark(ids)
            self._store.archive.export(owner, session, ids, Path(request.folder), told)

    def take_in(self, request: Import) -> None:
        """Make the files of a folder the KV of a session."""

        def told(tokens: int, reason: str | None) -> None:
            self._answers.append(Imported(request.request, tokens, reason))

        if self._store.archive is None:
            told(0, "no_disk_tier")
        elif self._store.busy(request.tenant, request.session):
            told(0, "session_busy")
        else:
            self._store.forget(request.tenant, request.session)
            owner = Owner(request.tenant, request.session, True)
            self._store.archive.take(owner, Path(request.folder), self._fingerprint, told)
