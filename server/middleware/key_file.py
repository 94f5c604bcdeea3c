"""The key file: tenants, the digests of their API keys, and the limits of each. `warmturn keys` writes it, and a
running server reads it again when it changes.

A key is made of 32 random bytes, so its plain SHA-256 can be stored: nothing can be guessed from it.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec

from cache.durable_files import replace_file

logger = logging.getLogger("warmturn.http")

PREFIX = "wt-"
ID_DIGITS = 12  # of a key's digest: its id
LOOK_SECONDS = 1.0  # between two looks at whether the file has changed


class KeyFileError(Exception):
    """The file cannot be read or written; the text is one line without its path."""


class KeyEntry(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A key: its ``tenant``, its digest in hexadecimal digits, when it was made (Unix seconds), and its limits; None:
    no limit. Tokens are those that are computed: new ones of prompts, and generated ones. ``models``: the names of the
    models that it may use. ``max_sessions`` and ``max_bytes``: what its tenant may keep, see ``server.log.quota``.
    """

    tenant: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
    sha256: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}$")]
    created: int = 0
    requests_per_minute: Annotated[int, msgspec.Meta(ge=1)] | None = None
    tokens_per_minute: Annotated[int, msgspec.Meta(ge=1)] | None = None
    models: tuple[str, ...] | None = None
    max_sessions: Annotated[int, msgspec.Meta(ge=0)] | None = None
    max_bytes: Annotated[int, msgspec.Meta(ge=0)] | None = None

    @property
    def allowed(self) -> frozenset[str] | None:
        """The models that the key may use, by their names; None: all."""
        return None if self.models is None else frozenset(self.models)

    @property
    def id(self) -> str:
        """The beginning of the digest, by which people name the key."""
        return id_of(self.sha256)


class KeyList(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of the file."""

    keys: list[KeyEntry] = []


def id_of(sha256: str) -> str:
    return sha256[:ID_DIGITS]


def new_key(
    tenant: str,
    requests_per_minute: int | None,
    tokens_per_minute: int | None,
    models: Sequence[str] = (),
    max_sessions: int | None = None,
    max_bytes: int | None = None,
) -> tuple[str, KeyEntry]:
    """A new key, which is kept nowhere, and its entry. Without ``models`` it may use all."""
    key = PREFIX + secrets.token_urlsafe(32)
    digest = hashlib.sha256(key.encode()).hexdigest()
    limits = requests_per_minute, tokens_per_minute, tuple(models) or None, max_sessions, max_bytes
    return key, KeyEntry(tenant, digest, int(time.time()), *limits)


def read_keys(path: Path) -> list[KeyEntry]:
    """The entries of a file. Raises KeyFileError."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=KeyList).keys
    except OSError as error:
        raise KeyFileError(f"cannot be read: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise KeyFileError(f"is no key file: {error}") from None


def write_keys(path: Path, entries: Sequence[KeyEntry]) -> None:
    """Replace the file, readable for its owner only: after a crash it is the old one or the new one. Raises
    KeyFileError.
    """
    data = msgspec.json.format(msgspec.json.encode(KeyList([*entries])), indent=2) + b"\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, data)
    except OSError as error:
        raise KeyFileError(f"cannot be written: {error.strerror}") from None


class KeyFile:
    """A key file that is read again when it changes. While it cannot be read, what was read last holds."""

    def __init__(self, path: Path) -> None:
        """Raises KeyFileError."""
        self._path = path
        self._seen = self._stamp()
        self._looked = time.monotonic()
        self.entries = read_keys(path)

    def has_changed(self) -> bool:
        """Whether ``entries`` are new. Looks at the file once a second at most."""
        now = time.monotonic()
        if now - self._looked < LOOK_SECONDS:
            return False
        self._looked = now
        stamp = self._stamp()
        if stamp is None or stamp == self._seen:
            return False
        self._seen = stamp
        try:
            self.entries = read_keys(self._path)
        except KeyFileError as error:
            logger.warning("the key file %s; the keys that were read before hold", error)
            return False
        logger.info("the key file was read again: %d keys", len(self.entries))
        return True

    def _stamp(self) -> tuple[int, int, int] | None:
        try:
            status = self._path.stat()
        except OSError:
            return None
        return status.st_mtime_ns, status.st_size, status.st_ino
