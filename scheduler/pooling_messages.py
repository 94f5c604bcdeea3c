"""Messages about embeddings and scores between server and engine, of ``scheduler.protocol``."""

from __future__ import annotations

import msgspec


class PoolInput(msgspec.Struct, frozen=True):
    """The tokens of a text, or of a pair of texts: ``ids`` are int32 (see ``pack_ids``). ``types``: a byte for each,
    which text of the pair it is of; empty: all are of the first. ``skip``: so many tokens at the beginning are of a
    prompt that pooling leaves out.
    """

    ids: bytes
    types: bytes = b""
    skip: int = 0


class Pool(msgspec.Struct, frozen=True, tag=True):
    """Embed or score these inputs. Answered by ``Pooled``, unless a ``Cancel`` with this ``request`` comes before.
    ``spare``: nobody waits for them: others go first.
    """

    request: str
    tenant: str
    inputs: tuple[PoolInput, ...]
    spare: bool = False


class Pooled(msgspec.Struct, frozen=True, tag=True):
    """The answer to ``Pool``: ``vectors`` are float32, little-endian, as many for each input as the model gives.
    ``code``: of the refusal, as in ``Refused``, or ``engine_error``; then there are none, and ``error`` says why, one
    line for people.
    """

    request: str
    vectors: bytes = b""
    code: str = ""
    error: str = ""
