"""What is asked about sessions rather than of the model: forget, pin, inspect, export, import."""

from __future__ import annotations

from itertools import takewhile
from pathlib import Path

from cache.pages.session import SessionCache, common_prefix
from cache.segments.chain import Owner
from cache.store import SessionStore
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
    TierHolding,
    unpack_ids,
)


class SessionCommands:
    """Answers between steps; what needs the disk when that is done: ``take`` the answers after each step."""

    def __init__(self, store: SessionStore, fingerprint: str) -> None:
        self._store = store
        self._fingerprint = fingerprint
        self._answers: list[FromEngine] = []

    def take(self) -> list[FromEngine]:
        """The answers since the last call."""
        answers, self._answers = self._answers, []
        return answers

    def forget(self, request: Forget) -> None:
        """Drop a session from every tier. Its turn has been ended."""

        def told() -> None:
            self._answers.append(Forgotten(request.tenant, request.session, request.life))

        self._store.forget(request.tenant, request.session)
        if self._store.archive is None:
            told()
        else:
            self._store.archive.forget(Owner(request.tenant, request.session, True), told)

    def pin(self, request: Pin) -> None:
        """Evict a session last."""
        self._store.pin(request.tenant, request.session, request.until)

    def inspect(self, request: Inspect) -> None:
        """Where the KV of a session lies."""
        store, owner = self._store, Owner(request.tenant, request.session, True)
        session = store.find(request.tenant, request.session)
        tiers: dict[str, TierHolding] = {}
        if session is not None and session.length:
            pages = len(session.pages)
            cold = len(store.pool.cold(session.pages))
            for tier, count in (("device", pages - cold), ("host", cold)):
                if count:
                    tokens = session.length - (cold if tier == "device" else pages - cold) * store.pool.page_size
                    states = session.state_bytes if (tier == "device") is session.warm else 0
                    tiers[tier] = TierHolding(max(tokens, 0), count * store.pool.page_bytes + states)
        tiers |= self._below(owner, session)
        self._answers.append(Inspected(request.request, tiers, session is not None and session.running))

    def _below(self, owner: Owner, session: SessionCache | None) -> dict[str, TierHolding]:
        """What the tiers below memory hold of the timeline that memory has, or of any where it has none."""
        archive = self._store.archive
        head = archive.disk.head(owner) if archive is not None else None
        if archive is None or head is None:
            return {}
        present = head.tip.stop if session is None else common_prefix(head.tip.timeline()[0], session.token_ids)
        copied = list(takewhile(lambda segment: segment.remote, head.tip.chain()))
        tiers = {"disk": TierHolding(present, archive.disk.bytes_of(owner))}
        if copied:
            tiers["remote"] = TierHolding(min(present, copied[-1].stop), sum(segment.nbytes for segment in copied))
        return {tier: held for tier, held in tiers.items() if held.tokens}

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
