"""The search index: the texts of messages and titles, kept as timelines change, and found by the beginnings of words.
SQLite searches with FTS5, PostgreSQL with its text search. Functions run in the caller's transaction.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import sqlalchemy as sql
from sqlalchemy.exc import DatabaseError

from server.log.database import CHECKED_BYTES, LogUnavailable
from server.log.logged_message import LoggedMessage
from server.log.tables import message_texts
from server.log.timeline import TITLE_SOURCE

INDEXED = frozenset({"user", "assistant"})  # roles; tools' results and instructions are not what people look for
TITLE = -1  # the number of a title among the messages
TITLE_KEY = "title"  # of metadata
PIECE = 50_000  # characters of a row: PostgreSQL's vectors are limited
WORD = re.compile(r"[^\W_]+")
MOST_WORDS = 16
HITS = 3  # of a session that are told
BEFORE, AFTER = 40, 120  # characters around a hit

FTS5 = (
    "CREATE VIRTUAL TABLE message_words USING fts5(text, content='message_texts', content_rowid='id', "
    "tokenize='unicode61 remove_diacritics 0')",
    "CREATE TRIGGER message_texts_added AFTER INSERT ON message_texts BEGIN "
    "INSERT INTO message_words(rowid, text) VALUES (new.id, new.text); END",
    "CREATE TRIGGER message_texts_removed AFTER DELETE ON message_texts BEGIN "
    "INSERT INTO message_words(message_words, rowid, text) VALUES ('delete', old.id, old.text); END",
)
DROPS = (
    "DROP TRIGGER IF EXISTS message_texts_added",
    "DROP TRIGGER IF EXISTS message_texts_removed",
    "DROP TABLE IF EXISTS message_words",
)
CHECK = "INSERT INTO message_words(message_words, rank) VALUES ('integrity-check', 1)"
SECURE_DELETE = "INSERT INTO message_words(message_words, rank) VALUES ('secure-delete', 1)"
MERGE = "INSERT INTO message_words(message_words) VALUES ('optimize')"
HAS_SECURE_DELETE = sqlite3.sqlite_version_info >= (3, 42)
# Punctuation separates words, as in FTS5; PostgreSQL's parser would keep addresses and numbers with it together.
PUNCTUATION = "!\"#$&()*+,-./:;<=>?@[\\]^_`{|}~'"
VECTOR = (
    "to_tsvector('simple', translate(message_texts.text, '"
    + PUNCTUATION.replace("'", "''")
    + f"', '{' ' * len(PUNCTUATION)}'))"
)
GIN = f"CREATE INDEX message_words ON message_texts USING gin ({VECTOR})"


@dataclass(frozen=True)
class Hit:
    """Where a session was found: in message number ``message`` (None: its title) of a role, around ``match``."""

    message: int | None
    role: str
    before: str
    match: str
    after: str


# --- the index ------------------------------------------------------------------------------------------------


def has_index(connection: sql.Connection) -> bool:
    """Whether the database has the index."""
    inspector = sql.inspect(connection)
    if connection.dialect.name == "sqlite":
        return inspector.has_table("message_words")
    return any(index["name"] == "message_words" for index in inspector.get_indexes(message_texts.name))


def create_index(connection: sql.Connection) -> None:
    """Create the index of the table of texts. Raises LogUnavailable where SQLite has no FTS5."""
    if connection.dialect.name != "sqlite":
        connection.exec_driver_sql(GIN)
        return
    options = connection.exec_driver_sql("SELECT sqlite_compileoption_used('ENABLE_FTS5')").scalar_one()
    if not options:
        raise LogUnavailable("the session log cannot be opened: this SQLite was built without FTS5")
    for statement in FTS5:
        connection.exec_driver_sql(statement)
    if HAS_SECURE_DELETE:
        connection.exec_driver_sql(SECURE_DELETE)


def is_sound(connection: sql.Connection) -> bool:
    """Whether the index is that of the texts. Damage of it is not damage of the log, so no checksum tells. A large file
    is not read for that.
    """
    if connection.dialect.name != "sqlite":
        return True
    pages = connection.exec_driver_sql("PRAGMA page_count").scalar_one()
    if pages * connection.exec_driver_sql("PRAGMA page_size").scalar_one() > CHECKED_BYTES:
        return True
    try:
        connection.exec_driver_sql(CHECK)
    except DatabaseError:
        return False
    return True


def empty_index(connection: sql.Connection) -> None:
    """Remove all texts, and make the index anew."""
    for statement in DROPS:
        connection.exec_driver_sql(statement)
    connection.execute(sql.delete(message_texts))
    create_index(connection)


def index_messages(connection: sql.Connection, session_id: int, keep: int, messages: Sequence[LoggedMessage]) -> None:
    """The session's messages from number ``keep`` on are ``messages``."""
    gone = sql.delete(message_texts).where(message_texts.c.session_id == session_id, message_texts.c.message >= keep)
    connection.execute(gone)
    rows = [
        {"session_id": session_id, "message": keep + number, "role": message.role, "text": piece}
        for number, message in enumerate(messages)
        if message.role in INDEXED
        for piece in pieces(message.content)
    ]
    if rows:
        connection.execute(sql.insert(message_texts), rows)


def index_title(connection: sql.Connection, session_id: int, metadata: Mapping[str, str]) -> None:
    """The session's title is that of its metadata."""
    place = sql.and_(message_texts.c.session_id == session_id, message_texts.c.message == TITLE)
    connection.execute(sql.delete(message_texts).where(place))
    if title := metadata.get(TITLE_KEY, ""):
        row = {"session_id": session_id, "message": TITLE, "role": "title", "text": title}
        connection.execute(sql.insert(message_texts).values(row))


def forget_texts(connection: sql.Connection, session_id: int) -> None:
    """Remove all texts of a session, before it is deleted."""
    connection.execute(sql.delete(message_texts).where(message_texts.c.session_id == session_id))


def erase_words(connection: sql.Connection) -> None:
    """Overwrite the words of removed texts in the file, where SQLite did not do it when they were removed. This takes
    about a second for 10,000 sessions.
    """
    if connection.dialect.name == "sqlite" and not HAS_SECURE_DELETE:
        connection.exec_driver_sql(MERGE)  # otherwise they stay until they happen to be merged


def pieces(text: str) -> Iterator[str]:
    """A text in rows, divided between words where it has some. PostgreSQL takes no NUL."""
    rest = text.replace("\0", " ")
    while len(rest) > PIECE:
        at = rest.rfind(" ", PIECE // 2, PIECE) + 1 or PIECE
        yield rest[:at]
        rest = rest[at:]
    if rest.strip():
        yield rest


# --- searching ------------------------------------------------------------------------------------------------


def words_of(query: str) -> list[str]:
    """The words of a query, as many as are searched for."""
    return WORD.findall(query)[:MOST_WORDS]


def matches(connection: sql.Connection, words: Sequence[str]) -> sql.ColumnElement[bool]:
    """SQL condition on the table of texts: it has words that begin with each of ``words``."""
    if connection.dialect.name == "sqlite":
        found = sql.text("SELECT rowid FROM message_words WHERE message_words MATCH :words")
        return message_texts.c.id.in_(
            found.bindparams(words=" ".join(f'"{word}"*' for word in words)).columns(sql.column("rowid"))
        )
    asked = " & ".join(f"{word}:*" for word in words)
    return sql.text(f"{VECTOR} @@ to_tsquery('simple', :words)").bindparams(words=asked)  # type: ignore[return-value]


def hits(connection: sql.Connection, session_ids: Sequence[int], words: Sequence[str]) -> dict[int, list[Hit]]:
    """The hits in sessions, by row id: titles first, then the last messages."""
    texts = message_texts.c
    place = sql.func.row_number().over(
        partition_by=texts.session_id, order_by=[sql.case((texts.message == TITLE, 0), else_=1), texts.message.desc()]
    )
    ranked = (
        sql.select(texts.session_id, texts.message, texts.role, texts.text, place.label("place"))
        .where(texts.session_id.in_(session_ids), matches(connection, words))
        .subquery()
    )
    rows = connection.execute(sql.select(ranked).where(ranked.c.place <= HITS).order_by(ranked.c.place))
    found: dict[int, list[Hit]] = {}
    for row in rows:
        number = None if row.message == TITLE else int(row.message)
        found.setdefault(row.session_id, []).append(Hit(number, row.role, *excerpt(row.text, words)))
    return found


def excerpt(text: str, words: Iterable[str]) -> tuple[str, str, str]:
    """A text around the first of ``words`` in it: what is before, the word, what is after."""
    found = re.search(rf"(?<![^\W_])(?:{'|'.join(map(re.escape, words))})[^\W_]*", text, re.IGNORECASE)
    at, end = found.span() if found else (0, 0)
    start, stop = max(0, at - BEFORE), end + AFTER
    before = ("…" if start else "") + text[start:at]
    after = text[end:stop] + ("…" if stop < len(text) else "")
    return before, text[at:end], after


def first_texts(connection: sql.Connection, session_ids: Iterable[int]) -> dict[int, str]:
    """The beginnings of the first messages of users, by session."""
    texts = message_texts.c
    first = sql.select(sql.func.min(texts.id)).where(texts.session_id.in_([*session_ids]), texts.role == "user")
    chosen = sql.select(texts.session_id, sql.func.substr(texts.text, 1, TITLE_SOURCE).label("text"))
    rows = connection.execute(chosen.where(texts.id.in_(first.group_by(texts.session_id))))
    return {row.session_id: row.text for row in rows}
