"""Capsules: the file format of an exported session, with its writer and its reader.

It is a ZIP archive that any tool opens: nothing compressed, members in one order, all sizes in 64 bits, nothing else.

    capsule.json    who the session is, and the size and SHA-256 of every other member
    turns.json      its log
    media/...       the bytes of its pictures and sounds, by their digest; absent where there are none
    kv/000000.kv    its cache, as the engine wrote it; absent where there is none
    ...

A reader takes exactly what ``Capsule`` writes: each header is written again from what it says and compared.
"""

from __future__ import annotations

import hashlib
import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import msgspec

from server.errors import ApiError, bad_request
from server.log.portable import PortableLog
from server.media.media_limits import MAX_BYTES

T = TypeVar("T")

FORMAT = 1
FORMAT_WITH_MEDIA = 2
MEDIA_TYPE = "application/zip"
FACTS = "capsule.json"
TURNS = "turns.json"
CHUNK = 1 << 20  # bytes read at once
MAX_FACTS = 16 << 20  # bytes of capsule.json
MAX_TURNS = 64 << 20  # bytes of turns.json
MAX_MEMBERS = 50_000

LOCAL = struct.Struct("<4sHHHHHLLLHH")
CENTRAL = struct.Struct("<4sHHHHHHLLLHHHHHLL")
END64 = struct.Struct("<4sQHHLLQQQQ")
LOCATOR = struct.Struct("<4sLQL")
END = struct.Struct("<4sHHHHLLH")
VERSION = 45  # of the ZIP format: the first with 64-bit sizes
UNIX = 3 << 8
NEW_YEAR_1980 = 0x21
ELSEWHERE = 0xFFFFFFFF  # "see the 64-bit field"


class MemberFacts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What capsule.json says about another member. ``sha256`` is hexadecimal."""

    name: str
    size: int
    sha256: str


class SessionFacts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Properties of the session that are not in its log."""

    id: str
    metadata: dict[str, str]
    ttl_seconds: int | None


class CapsuleFacts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """capsule.json. ``fingerprint`` is that of the tokenizer; the cache's files have ``kv_tokens`` of the session's
    ``tokens``.
    """

    format: int
    warmturn: str
    model: str
    fingerprint: str
    session: SessionFacts
    turns: int
    tokens: int
    kv_tokens: int
    members: list[MemberFacts]


@dataclass(frozen=True)
class Member:
    """A member to write: bytes, or a file that must not change until it has been read."""

    name: str
    size: int
    crc: int
    source: bytes | Path

    def header(self) -> bytes:
        """The local header before its bytes."""
        name, extra = self.name.encode(), struct.pack("<HHQQ", 1, 16, self.size, self.size)
        head = LOCAL.pack(
            b"PK\3\4", VERSION, 0, 0, 0, NEW_YEAR_1980, self.crc, ELSEWHERE, ELSEWHERE, len(name), len(extra)
        )
        return head + name + extra

    def entry(self, offset: int) -> bytes:
        """Its entry in the central directory."""
        name, extra = self.name.encode(), struct.pack("<HHQQQ", 1, 24, self.size, self.size, offset)
        sizes = ELSEWHERE, ELSEWHERE, len(name), len(extra)
        head = CENTRAL.pack(
            b"PK\1\2",
            UNIX | VERSION,
            VERSION,
            0,
            0,
            0,
            NEW_YEAR_1980,
            self.crc,
            *sizes,
            0,
            0,
            0,
            0o600 << 16,
            ELSEWHERE,
        )
        return head + name + extra

    def chunks(self) -> Iterator[bytes]:
        """Its bytes. Raises OSError, also if the file's size has changed."""
        if isinstance(self.source, bytes):
            yield self.source
            return
        left = self.size
        with self.source.open("rb", buffering=0) as file:
            while data := file.read(min(CHUNK, left)):
                left -= len(data)
                yield data
        if left:
            raise OSError("a file of this capsule was cut short")


def directory(members: list[Member]) -> bytes:
    """The central directory at the end of the archive."""
    offset = 0
    entries = bytearray()
    for member in members:
        entries += member.entry(offset)
        offset += len(member.header()) + member.size
    count = len(members)
    end64 = END64.pack(b"PK\6\6", END64.size - 12, UNIX | VERSION, VERSION, 0, 0, count, count, len(entries), offset)
    locator = LOCATOR.pack(b"PK\6\7", 0, offset + len(entries), 1)
    return bytes(entries) + end64 + locator + END.pack(b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, ELSEWHERE, ELSEWHERE, 0)


class Capsule:
    """An archive ready to be sent: ``length`` bytes of ``chunks``."""

    def __init__(self, members: list[Member]) -> None:
        self._members = members
        self._end = directory(members)
        self.length = sum(len(m.header()) + m.size for m in members) + len(self._end)

    def chunks(self) -> Iterator[bytes]:
        """The bytes, at most ``CHUNK`` of a file at once. Blocking; raises OSError."""
        for member in self._members:
            yield member.header()
            yield from member.chunks()
        yield self._end


def pack(
    *,
    model: str,
    version: str,
    session: SessionFacts,
    log: PortableLog,
    kv: Path | None,
    kv_tokens: int,
    media: Path | None = None,
) -> Capsule:
    """The capsule of a session whose cache is the files in the folder ``kv``, if there is one, and whose media are the
    files in the folder ``media``.

    Blocking: reads every file once, for its checksums. Raises OSError.
    """
    turns = msgspec.json.encode(log)
    members = [Member(TURNS, len(turns), zlib.crc32(turns), turns)]
    listed = [MemberFacts(TURNS, len(turns), hashlib.sha256(turns).hexdigest())]
    files = [(f"media/{path.name}", path) for path in sorted(media.iterdir())] if media is not None else []
    format = FORMAT_WITH_MEDIA if files else FORMAT
    for number, path in enumerate(sorted(kv.iterdir()) if kv is not None else ()):
        files.append((f"kv/{number:06}.kv", path))
    for name, path in files:
        size, crc, sha256 = checksums(path)
        members.append(Member(name, size, crc, path))
        listed.append(MemberFacts(name, size, sha256))
    facts = CapsuleFacts(
        format, version, model, log.fingerprint, session, len(log.turns), len(log.tokens), kv_tokens, listed
    )
    first = msgspec.json.encode(facts)
    return Capsule([Member(FACTS, len(first), zlib.crc32(first), first), *members])


def checksums(path: Path) -> tuple[int, int, str]:
    """A file's size, CRC-32 and SHA-256."""
    size, crc, sha256 = 0, 0, hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while data := file.read(CHUNK):
            size += len(data)
            crc = zlib.crc32(data, crc)
            sha256.update(data)
    return size, crc, sha256.hexdigest()


# --- reading ------------------------------------------------------------------------------------------------


def unpack(path: Path, folder: Path) -> tuple[CapsuleFacts, PortableLog]:
    """What a capsule says and the log in it; its cache is put into the new ``folder`` as 000000.kv, 000001.kv..., and
    its media into the new folder ``media`` beside it, by their digest.

    Blocking. Raises a 400 (invalid_capsule) for anything that ``Capsule`` would not have written, before more is
    read or allocated than the file really holds, and OSError.
    """
    folder.mkdir(mode=0o700)
    (folder.parent / "media").mkdir(mode=0o700)
    with path.open("rb") as file:
        return CapsuleReader(file, path.stat().st_size).read(folder)


class CapsuleReader:
    """Reads an archive of ``size`` bytes from its first byte to its last, once."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file = file
        self._left = size
        self._members: list[Member] = []

    def read(self, folder: Path) -> tuple[CapsuleFacts, PortableLog]:
        """See ``unpack``."""
        facts = self._json(CapsuleFacts, self._member(FACTS, MAX_FACTS))
        if facts.format not in (FORMAT, FORMAT_WITH_MEDIA):
            raise doubtful(f"has format {facts.format}, and this server reads formats {FORMAT} and {FORMAT_WITH_MEDIA}")
        if not 1 <= len(facts.members) < MAX_MEMBERS:
            raise doubtful("does not have the files of a capsule")
        log = self._json(PortableLog, self._member(TURNS, MAX_TURNS), facts.members[0])
        if (log.fingerprint, len(log.turns)) != (facts.fingerprint, facts.turns):
            raise doubtful("does not match its log")
        digests = sorted(log.digests)
        if bool(digests) != (facts.format == FORMAT_WITH_MEDIA) or len(facts.members) <= len(digests):
            raise doubtful("does not have the files of a capsule")
        for digest, told in zip(digests, facts.members[1:], strict=False):
            member = self._member(f"media/{digest}", MAX_BYTES)
            self._copy(member, told, folder.parent / "media" / digest)
            if told.sha256 != digest:
                raise doubtful("is damaged")
        for number, told in enumerate(facts.members[1 + len(digests) :]):
            member = self._member(f"kv/{number:06}.kv", self._left)
            self._copy(member, told, folder / f"{number:06}.kv")
        rest = directory(self._members)
        if len(rest) != self._left or self._take(len(rest)) != rest:
            raise doubtful("does not have the end of a capsule")
        return facts, log

    def _take(self, size: int) -> bytes:
        if size > self._left:
            raise doubtful("is cut short")
        data = self._file.read(size)
        self._left -= len(data)
        if len(data) != size:
            raise doubtful("is cut short")
        return data

    def _member(self, name: str, limit: int) -> Member:
        """The header of the next member, which must be this one and hold no more than ``limit`` bytes."""
        raw = self._take(LOCAL.size + len(name) + 20)
        size: int = struct.unpack_from("<Q", raw, len(raw) - 16)[0]
        member = Member(name, size, LOCAL.unpack_from(raw)[6], b"")
        if raw != member.header():
            raise doubtful("does not have the files of a capsule")
        if size > min(limit, self._left):
            raise doubtful("has a file that is too large")
        self._members.append(member)
        return member

    def _json(self, kind: type[T], member: Member, told: MemberFacts | None = None) -> T:
        data = self._take(member.size)
        check(member, told, zlib.crc32(data), hashlib.sha256(data).hexdigest())
        try:
            return msgspec.json.decode(data, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise doubtful("has invalid JSON") from None

    def _copy(self, member: Member, told: MemberFacts, path: Path) -> None:
        crc, sha256, left = 0, hashlib.sha256(), member.size
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb", buffering=0) as file:
            while left:
                data = self._take(min(CHUNK, left))
                left -= len(data)
                crc = zlib.crc32(data, crc)
                sha256.update(data)
                write_all(file, data)
        check(member, told, crc, sha256.hexdigest())


def write_all(file: Any, data: bytes) -> None:
    """An unbuffered write that is complete. Raises OSError."""
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


def check(member: Member, told: MemberFacts | None, crc: int, sha256: str) -> None:
    """Compare a member's bytes with what the archive and capsule.json say. Raises a 400 for damage."""
    said = None if told is None else (told.name, told.size, told.sha256)
    if crc != member.crc or said not in (None, (member.name, member.size, sha256)):
        raise doubtful("is damaged")


def doubtful(why: str) -> ApiError:
    """The 400 for a body that is not a valid capsule."""
    return bad_request(f"The capsule {why}.", code="invalid_capsule")
