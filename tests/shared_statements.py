"""All engines of SQLAlchemy in this process share what they compile: a test's log is new, its statements are not."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sql
from sqlalchemy.engine.default import DefaultDialect
from sqlalchemy.util import LRUCache

SHARED: LRUCache[Any, Any] = LRUCache(4000)


def share_statements() -> None:
    """From now on; dialects of one class count as one, as here they are of databases of one version."""
    begin = sql.Engine.__init__

    def begin_sharing(engine: sql.Engine, *args: Any, **kwargs: Any) -> None:
        begin(engine, *args, **kwargs)
        engine._compiled_cache = SHARED

    sql.Engine.__init__ = begin_sharing  # type: ignore[method-assign,assignment]
    DefaultDialect.__hash__ = lambda one: hash(type(one))  # type: ignore[method-assign,assignment]
    DefaultDialect.__eq__ = lambda one, other: type(one) is type(other)  # type: ignore[method-assign]
