"""The tables of the log, for SQLAlchemy.

Format 4 is the oldest that is read. Format 5 added the receipts of turns, and leases. Format 6 added an index of stored
chats. Format 7 added media, format 8 the search index, format 9 usage, format 10 links, format 11 vectors. A log of an
older format is upgraded when it is opened, see ``server.log.upgrade``.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sql
from sqlalchemy import Column, Index

from server.log.database import REMEDY, LogDamaged

FORMAT = 11
OLDEST_FORMAT = 4  # that can be brought up to date
MIGRATION_LOCK = 0x7761726D  # of PostgreSQL: one server at a time prepares the tables

ANYONE = ""  # in place of a server: the next one that registers

metadata = sql.MetaData()


def number(name: str, type_: Any = sql.BigInteger, **options: Any) -> Column[Any]:
    """An integer column, 0 in rows of older formats."""
    return Column(name, type_, nullable=False, server_default="0", **options)


log_format = sql.Table("log_format", metadata, Column("version", sql.Integer, nullable=False))

sessions = sql.Table(
    "sessions",
    metadata,
    Column("id", sql.Integer, primary_key=True),  # never used twice, so that a deleted session stays deleted
    Column("tenant", sql.String(128), nullable=False),
    Column("session", sql.String(128), nullable=False),
    Column("created", sql.BigInteger, nullable=False),
    number("used", sql.Double),  # when a row was added
    Column("ttl", sql.BigInteger),
    Column("expires", sql.BigInteger),
    Column("pinned_until", sql.BigInteger),
    Column("parent", sql.String(128)),
    Column("parent_turn", sql.Integer),
    Column("fingerprint", sql.String(128), nullable=False, server_default=""),
    number("rows"),  # the number of the last one
    number("turns"),
    number("tokens"),
    number("messages"),
    sql.UniqueConstraint("tenant", "session"),
    sqlite_autoincrement=True,
)
Index("sessions_used", sessions.c.tenant, sessions.c.used, sessions.c.id)
Index("sessions_expires", sessions.c.expires)

turns = sql.Table(
    "turns",  # rows of every kind, see server.log.timeline.Row
    metadata,
    Column("session_id", sql.ForeignKey("sessions.id"), primary_key=True),
    Column("number", sql.Integer, primary_key=True),  # 1, 2, 3... within the session
    Column("keep_tokens", sql.Integer, nullable=False),
    Column("tokens", sql.LargeBinary, nullable=False),  # int32, see scheduler.protocol.unpack_ids
    Column("keep_messages", sql.Integer, nullable=False),
    Column("messages", sql.Text, nullable=False),  # a JSON array
    Column("fingerprint", sql.String(128), nullable=False),
    Column("finish_reason", sql.String(32), nullable=False),
    Column("created", sql.BigInteger, nullable=False),
    Column("kind", sql.String(16), nullable=False, server_default="turn"),
    number("keep_turns", sql.Integer),
    Column("prompt_tokens", sql.Integer),
    number("cached", sql.Integer),
    Column("checksum", sql.LargeBinary, nullable=False, server_default=""),
    Column("receipt", sql.Text),  # JSON of server.schemas.objects.CacheReceipt; last: rows of format 4 end before it
)

labels = sql.Table(
    "labels",  # metadata, both as JSON strings: PostgreSQL takes no NUL
    metadata,
    Column("session_id", sql.ForeignKey("sessions.id"), primary_key=True),
    Column("key", sql.Text, primary_key=True),
    Column("value", sql.Text, nullable=False),
)
Index("labels_value", labels.c.key, labels.c.value)

message_texts = sql.Table(
    "message_texts",  # what can be searched, see server.log.search_index; all of it can be made from the other tables
    metadata,
    Column("id", sql.BigInteger().with_variant(sql.Integer, "sqlite"), primary_key=True),
    Column("session_id", sql.ForeignKey("sessions.id"), nullable=False),
    Column("message", sql.Integer, nullable=False),
    Column("role", sql.String(16), nullable=False),
    Column("text", sql.Text, nullable=False),
)
# Its shape tells it apart in a salvage.
Index("message_texts_place", message_texts.c.session_id, message_texts.c.message, message_texts.c.role)

retries = sql.Table(
    "retries",  # which row an idempotency key made
    metadata,
    Column("session_id", sql.ForeignKey("sessions.id"), primary_key=True),
    Column("key", sql.String(255), primary_key=True),
    Column("request_hash", sql.String(128), nullable=False),
    Column("number", sql.Integer, nullable=False),
    Column("created", sql.BigInteger, nullable=False),
)
Index("retries_created", retries.c.created)

responses = sql.Table(
    "responses",  # see server.log.response_rows.StoredResponse
    metadata,
    Column("session_id", sql.ForeignKey("sessions.id"), primary_key=True),
    Column("key", sql.String(32), primary_key=True),
    Column("status", sql.String(16), nullable=False),
    Column("server", sql.String(64), nullable=False),  # that runs it, or has
    Column("created", sql.BigInteger, nullable=False),
    Column("row", sql.Integer),
    Column("body", sql.Text, nullable=False),
    Column("inputs", sql.Text, nullable=False),
    Column("events", sql.LargeBinary),
    Column("checksum", sql.LargeBinary, nullable=False),
)
unfinished = sql.text("status IN ('queued', 'in_progress')")  # without parameters: as of the index, or it is not used
running_index = Index("responses_running", responses.c.server, sqlite_where=unfinished)
CHAT_KEY = "chat-"  # how the keys of stored chats begin; those of responses are alphanumeric
stored_chats = sql.text(f"substr(key, 1, {len(CHAT_KEY)}) = '{CHAT_KEY}'")  # the same holds for it
chats_index = Index(
    "responses_chats",
    responses.c.created,
    responses.c.session_id,
    responses.c.row,
    sqlite_where=stored_chats,
)

media = sql.Table(
    "media",  # original bytes of pictures and sounds, one copy per tenant
    metadata,
    Column("name", sql.String(200), primary_key=True),  # tenant/digest: one column, as of leases
    Column("data", sql.LargeBinary, nullable=False),
)
media_refs = sql.Table(
    "media_refs",  # which sessions have it: it goes with the last one
    metadata,
    Column("session_id", sql.ForeignKey("sessions.id"), primary_key=True),
    Column("name", sql.ForeignKey("media.name"), primary_key=True),
)
Index("media_refs_name", media_refs.c.name)

key_usage = sql.Table(
    "key_usage",  # see server.log.usage_rows.Spent
    metadata,
    Column("tenant", sql.String(128), primary_key=True),
    Column("key", sql.String(64), primary_key=True),
    Column("day", sql.String(10), primary_key=True),
    number("requests"),
    number("new"),
    number("reused"),
    number("generated"),
    number("seconds", sql.Double),
)

shares = sql.Table(
    "shares",  # links to branches, see server.log.share_rows; a salvage leaves them out: they lead nowhere then
    metadata,
    Column("digest", sql.String(64), primary_key=True),  # of the secret
    Column("session_id", sql.ForeignKey("sessions.id"), nullable=False),
    Column("turn", sql.Integer, nullable=False),  # the last one that it shows
    Column("mark", sql.String(64), nullable=False),  # the id of that turn
    Column("created", sql.BigInteger, nullable=False),
    Column("expires", sql.BigInteger, nullable=False),
)
Index("shares_session", shares.c.session_id)

session_vectors = sql.Table(
    "session_vectors",  # what is searched by meaning, see server.log.vector_rows; a salvage leaves them out
    metadata,
    Column("session_id", sql.ForeignKey("sessions.id"), primary_key=True),
    Column("model", sql.String(128), nullable=False),  # the fingerprint of the model that made it
    Column("rows", sql.BigInteger, nullable=False),  # of the session, when it was made
    Column("vector", sql.LargeBinary, nullable=False),  # float32, little-endian; empty: nothing was said
)

servers = sql.Table(
    "servers",  # each with a cache of its own, of which it has to forget what is deleted
    metadata,
    Column("id", sql.String(64), primary_key=True),
    Column("seen", sql.BigInteger, nullable=False),
)

tombstones = sql.Table(
    "tombstones",  # deleted sessions of which the engine of a server may still hold something
    metadata,
    Column("server", sql.String(64), primary_key=True),
    Column("tenant", sql.String(128), primary_key=True),
    Column("session", sql.String(128), primary_key=True),
    number("life"),  # the id that its row had, in ``sessions``: names are used again
)

leases = sql.Table(
    "leases",  # sessions that a server holds now, see server.log.leases
    metadata,
    Column("id", sql.BigInteger().with_variant(sql.Integer, "sqlite"), primary_key=True),  # the fencing number
    Column("name", sql.String(257), nullable=False, unique=True),  # one column: its shape tells it apart in a salvage
    Column("server", sql.String(64), nullable=False),
    Column("unwanted", sql.String(32)),  # the key of a response that its server is to end
    sqlite_autoincrement=True,
)

heartbeats = sql.Table(
    "heartbeats",  # the last signs of life of servers that share the log
    metadata,
    Column("server", sql.String(64), primary_key=True),
    Column("beat", sql.Double, nullable=False),  # seconds by the clock of the database
)

ballast = sql.Table("ballast", metadata, Column("data", sql.LargeBinary, nullable=False))  # empty: see try_to_write


def define_for_postgresql() -> None:
    """Have the same partial indexes on PostgreSQL. SQLAlchemy loads all of its dialect for it, 3 MB that a log in a
    file does not need.
    """
    running_index.dialect_kwargs["postgresql_where"] = unfinished
    chats_index.dialect_kwargs["postgresql_where"] = stored_chats


def damage_error() -> LogDamaged:
    """The error for tables that have another schema."""
    return LogDamaged(f"the session log cannot be opened: its tables are damaged: {REMEDY}")
