"""Lists a tenant's sessions in pages, and the family of a session: its ancestors and their forks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import sqlalchemy as sql

from server.log.search_index import Hit, hits, matches
from server.log.session_models import has_model
from server.log.stored import is_unexpired, label, summaries_of
from server.log.tables import labels, message_texts, sessions
from server.log.timeline import SessionSummary, UnknownSession

MOST_RELATIVES = 200  # sessions of a family that are listed
MOST_KEYS = 1000  # of metadata


@dataclass(frozen=True)
class SessionFilter:
    """Selects sessions that have all of ``metadata``, whose id starts with ``prefix``, that were last used at or after
    ``used_after`` and before ``used_before`` (Unix seconds), whose tokens have this ``fingerprint``, of which ``model``
    has written a turn, and that have a message or a title in which words begin with each of ``words``.
    """

    metadata: Mapping[str, str] = field(default_factory=dict)
    prefix: str | None = None
    used_after: int | None = None
    used_before: int | None = None
    fingerprint: str | None = None
    model: str | None = None
    words: Sequence[str] = ()


@dataclass(frozen=True)
class SessionPage:
    """A page of sessions, and whether there are more after it. ``hits``: of a search, by the session's name."""

    items: list[SessionSummary]
    has_more: bool
    hits: Mapping[str, list[Hit]] | None = None


@dataclass(frozen=True)
class SessionFamily:
    """All sessions that were forked, directly or not, from ``root``, and ``root`` itself: parents before their forks,
    older ones first. ``root`` is the oldest ancestor's name, also if that session is deleted. ``has_more``: there are
    more than ``MOST_RELATIVES``.
    """

    root: str
    members: list[SessionSummary]
    has_more: bool


def page(
    connection: sql.Connection,
    tenant: str,
    chosen: SessionFilter,
    *,
    limit: int,
    after: str | None,
    descending: bool,
    now: float,
) -> SessionPage:
    """Up to ``limit`` sessions after the session ``after``, in order of last use. Raises UnknownSession if ``after`` is
    unknown.
    """
    mine = sql.and_(sessions.c.tenant == tenant, is_unexpired(now))
    query = sql.select(sessions).where(mine, *conditions(connection, chosen))
    place = sql.tuple_(sessions.c.used, sessions.c.id)
    if after is not None:
        there = sql.select(sessions.c.used, sessions.c.id).where(mine, sessions.c.session == after)
        found = connection.execute(there).one_or_none()
        if found is None:
            raise UnknownSession
        behind = sql.tuple_(sql.literal(found.used, sql.Double), sql.literal(found.id))
        query = query.where(place < behind if descending else place > behind)
    order = [column.desc() if descending else column.asc() for column in (sessions.c.used, sessions.c.id)]
    rows = connection.execute(query.order_by(*order).limit(limit + 1)).all()
    shown = rows[:limit]
    known = hits(connection, [row.id for row in shown], chosen.words) if chosen.words else {}
    told = {row.session: known.get(row.id, []) for row in shown} if chosen.words else None
    return SessionPage(summaries_of(connection, shown, now), len(rows) > limit, told)


def metadata_keys(connection: sql.Connection, tenant: str, prefix: str, now: float) -> list[tuple[str, int]]:
    """The keys of metadata that begin with ``prefix``, each with the number of sessions that have it."""
    start = json.dumps(prefix)[:-1]
    query = (
        sql.select(labels.c.key, sql.func.count())
        .join(sessions, sessions.c.id == labels.c.session_id)
        .where(sessions.c.tenant == tenant, is_unexpired(now), sql.func.substr(labels.c.key, 1, len(start)) == start)
    )
    rows = connection.execute(query.group_by(labels.c.key).order_by(labels.c.key).limit(MOST_KEYS))
    return [(json.loads(key), count) for key, count in rows]


def find_by_names(connection: sql.Connection, tenant: str, names: Sequence[str], now: float) -> list[SessionSummary]:
    """Those of the sessions with these names that exist, the one used last first."""
    mine = sql.and_(sessions.c.tenant == tenant, sessions.c.session.in_(names), is_unexpired(now))
    rows = connection.execute(sql.select(sessions).where(mine).order_by(sessions.c.used.desc())).all()
    return summaries_of(connection, rows, now)


def conditions(connection: sql.Connection, chosen: SessionFilter) -> list[sql.ColumnElement[bool]]:
    found: list[sql.ColumnElement[bool]] = []
    for key, value in chosen.metadata.items():
        pair = label(key, value)
        having = sql.select(labels.c.session_id).where(labels.c.key == pair["key"], labels.c.value == pair["value"])
        found.append(sessions.c.id.in_(having))
    if chosen.prefix:
        found.append(sql.func.substr(sessions.c.session, 1, len(chosen.prefix)) == chosen.prefix)
    if chosen.used_after is not None:
        found.append(sessions.c.used >= chosen.used_after)
    if chosen.used_before is not None:
        found.append(sessions.c.used < chosen.used_before)
    if chosen.fingerprint is not None:
        found.append(sessions.c.fingerprint == chosen.fingerprint)
    if chosen.model is not None:
        found.append(has_model(chosen.model))
    if chosen.words:
        having = sql.select(message_texts.c.session_id).where(matches(connection, chosen.words))
        found.append(sessions.c.id.in_(having))
    return found


def family(connection: sql.Connection, tenant: str, session: str, now: float) -> SessionFamily:
    """The family of a session. Raises UnknownSession."""
    mine = sql.and_(sessions.c.tenant == tenant, is_unexpired(now))
    passed: list[str] = []  # a parent is a name, which may have been given again: to a fork of a fork
    name: str | None = session
    while name is not None and name not in passed:
        row = connection.execute(sql.select(sessions.c.parent).where(mine, sessions.c.session == name)).one_or_none()
        if row is None and not passed:
            raise UnknownSession
        passed.append(name)
        name = None if row is None else row.parent
    root = passed[-1]
    rows = {
        row.session: row for row in connection.execute(sql.select(sessions).where(mine, sessions.c.session == root))
    }
    parents = [root]
    while parents and len(rows) <= MOST_RELATIVES:
        query = sql.select(sessions).where(mine, sessions.c.parent.in_(parents)).order_by(sessions.c.id)
        forks = [row for row in connection.execute(query.limit(MOST_RELATIVES + 1)) if row.session not in rows]
        rows |= {row.session: row for row in forks}
        parents = [row.session for row in forks]
    members = [*rows.values()][:MOST_RELATIVES]
    return SessionFamily(root, summaries_of(connection, members, now), len(rows) > len(members))
