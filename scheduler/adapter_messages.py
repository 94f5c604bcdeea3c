"""Messages about adapters between server and engine, of ``scheduler.protocol``."""

from __future__ import annotations

import msgspec

from scheduler.model_facts import AdapterFacts


class LoadAdapter(msgspec.Struct, frozen=True, tag=True):
    """Load the adapter in a ``folder`` under a name, in place of another one of that name, with which running turns go
    on. Answered by ``AdapterLoaded``.
    """

    request: str
    name: str
    folder: str


class UnloadAdapter(msgspec.Struct, frozen=True, tag=True):
    """Forget an adapter; turns that run with it go on. Nothing is answered."""

    name: str


class AdapterLoaded(msgspec.Struct, frozen=True, tag=True):
    """The answer to ``LoadAdapter``. ``error``: why it cannot be used, one line for people; then there are no
    facts.
    """

    request: str
    facts: AdapterFacts | None = None
    error: str = ""
