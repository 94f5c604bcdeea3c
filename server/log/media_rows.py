"""Media of sessions: the original bytes of pictures and sounds, one copy per tenant, deleted with the last session that
has them. Functions run in the caller's transaction, which is that of the messages that name them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

import sqlalchemy as sql

from server.log.database import LogDamaged
from server.log.log_thread import LogThread
from server.log.logged_message import LoggedMessage
from server.log.stored import SessionRow
from server.log.tables import media, media_refs
from server.log.timeline import SessionMoved

NO_MEDIA: Mapping[str, bytes] = MappingProxyType({})
AT_ONCE = 500  # names in one statement


def name_of(tenant: str, digest: str) -> str:
    """The name of a medium: a tenant's own, whatever others have."""
    return f"{tenant}/{digest}"


def hold_media(
    connection: sql.Connection, row: SessionRow, messages: Sequence[LoggedMessage], data: Mapping[str, bytes]
) -> None:
    """Note that a session has the media of ``messages``, and insert those that its tenant does not have yet from
    ``data`` (bytes by digest). Raises SessionMoved for media that are in neither: the session that had them is gone.
    """
    digests = {name_of(row.tenant, one.digest): one.digest for message in messages for one in message.media}
    for names in chunks([*digests]):
        of_session = media_refs.c.session_id == row.id, media_refs.c.name.in_(names)
        noted = {*connection.execute(sql.select(media_refs.c.name).where(*of_session)).scalars()}
        names = [name for name in names if name not in noted]
        there = {*connection.execute(sql.select(media.c.name).where(media.c.name.in_(names))).scalars()}
        for name in names:
            if name not in there:
                if digests[name] not in data:
                    raise SessionMoved
                connection.execute(sql.insert(media).values(name=name, data=data[digests[name]]))
            connection.execute(sql.insert(media_refs).values(session_id=row.id, name=name))


def drop_media(connection: sql.Connection, row: SessionRow) -> None:
    """A session that is deleted has no media any more; those that no other one has are deleted."""
    of_session = media_refs.c.session_id == row.id
    names = [*connection.execute(sql.select(media_refs.c.name).where(of_session)).scalars()]
    if not names:
        return
    connection.execute(sql.delete(media_refs).where(of_session))
    others = sql.exists().where(media_refs.c.name == media.c.name)
    for some in chunks(names):
        connection.execute(sql.delete(media).where(media.c.name.in_(some), ~others))


def chunks(names: Sequence[str]) -> Iterable[Sequence[str]]:
    """The names, some at a time."""
    return (names[start : start + AT_ONCE] for start in range(0, len(names), AT_ONCE))


class MediaLog:
    """The bytes of media. Methods raise what those of ``SessionLog`` raise."""

    def __init__(self, thread: LogThread) -> None:
        self._thread = thread

    async def get(self, tenant: str, digest: str) -> bytes | None:
        """The bytes of a medium that a session of this tenant has; None if there is none. Raises LogDamaged if they are
        not those of the digest.
        """
        query = sql.select(media.c.data).where(media.c.name == name_of(tenant, digest))
        data = await self._thread.read(lambda connection: connection.execute(query).scalar_one_or_none())
        if data is not None and hashlib.sha256(data).hexdigest() != digest:
            raise LogDamaged("a medium in the session log is damaged")
        return None if data is None else bytes(data)
