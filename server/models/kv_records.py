"""``KvRecords``: which models have KV in a data dir, also while they are not loaded, and what they forgot."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path

FILE = "models"  # in the data dir

Life = tuple[str, str, int]  # tenant, session, and which session of that name


class KvRecords:
    """The fingerprints of the models that were loaded with this data dir, by their names. A session is forgotten when
    every model that may have KV of it has told so; one that is not loaded tells it after its next load.
    """

    def __init__(
        self, folder: Path, names: Collection[str], on_forgotten: Callable[[str, str, int], None], *, remote: bool
    ) -> None:
        """``folder`` is the data dir, ``names`` are those of the models that are served. ``on_forgotten`` is called
        with tenant, session and life of a session that is forgotten. ``remote``: KV is kept elsewhere too.
        """
        self._path = folder / FILE
        self._kv = folder / "kv"
        self._names = names
        self._on_forgotten = on_forgotten
        self._remote = remote
        self._forgotten_by: defaultdict[Life, set[str]] = defaultdict(set)
        self._fingerprints: dict[str, str] = {}
        with suppress(OSError, ValueError):  # without it, the KV of models that are not loaded may be evicted first
            found = json.loads(self._path.read_text("utf-8"))
            self._fingerprints = {name: value for name, value in found.items() if isinstance(value, str)}

    def record_loaded(self, name: str, fingerprint: str) -> None:
        """A model is loaded: write down that its KV has this fingerprint."""
        if self._fingerprints.get(name) == fingerprint:
            return
        self._fingerprints[name] = fingerprint
        part = self._path.with_name(f"{FILE}.{os.getpid()}.new")
        with suppress(OSError):
            part.write_text(json.dumps(self._fingerprints), "utf-8")
            part.replace(self._path)

    def others(self, name: str) -> list[str]:
        """The fingerprints of the other models that are served."""
        own = self._fingerprints.get(name)
        known = {self._fingerprints[other] for other in self._names if other in self._fingerprints}
        return sorted(known - {own})

    def forgotten(self, name: str, tenant: str, session: str, life: int) -> None:
        """A model has no KV of a session any more."""
        key = (tenant, session, life)
        told = self._forgotten_by[key]
        told.add(name)
        if told >= self._holders():
            del self._forgotten_by[key]
            self._on_forgotten(tenant, session, life)

    def _holders(self) -> set[str]:
        """The models that may have KV of sessions."""
        known = {name: self._fingerprints[name] for name in self._names if name in self._fingerprints}
        return {name for name, fingerprint in known.items() if self._remote or (self._kv / fingerprint).exists()}
