"""PostgreSQL connections with a timeout: a server that does not answer is given up."""

from __future__ import annotations

from typing import Any, TypeVar

import psycopg
import sqlalchemy as sql
from psycopg.abc import PQGen

T = TypeVar("T")

STATEMENT_SECONDS = 20  # that the database itself gives a statement
ANSWER_SECONDS = 25.0  # until an answer must have come: later than the database would have told of that
PING_SECONDS = 5.0  # the same for the question whether it is there, which takes it no time


class TimedConnection(psycopg.Connection[Any]):
    """Closes itself and raises OperationalError if an answer takes longer than ``patience`` seconds. Without this, lost
    packets or a dead proxy would block for minutes or forever.
    """

    patience = PING_SECONDS

    def wait(self, gen: PQGen[T], *args: Any, **options: Any) -> T:
        """See psycopg. Raises ``OperationalError`` where no answer comes in time."""
        options.setdefault("timeout", self.patience)
        try:
            return super().wait(gen, *args, **options)
        except psycopg.OperationalError:
            if self.pgconn.status == psycopg.pq.ConnStatus.OK and self.info.transaction_status == ACTIVE:
                self.pgconn.finish()  # the answer may come yet, and would be taken for that of the next question
                raise psycopg.OperationalError("the database does not answer") from None
            raise


ACTIVE = psycopg.pq.TransactionStatus.ACTIVE


def be_patient(engine: sql.Engine) -> None:
    """Make the connections of ``engine`` timed ones, and check them with a ping before each reuse."""

    def connect(_dialect: Any, _record: Any, arguments: Any, options: Any) -> TimedConnection:
        made: TimedConnection = TimedConnection.connect(*arguments, **options)
        return made

    def on_checkout(connection: TimedConnection, *_: Any) -> None:
        connection.patience = ANSWER_SECONDS

    def idle(connection: TimedConnection | None, *_: Any) -> None:
        if connection is not None:  # it is gone
            connection.patience = PING_SECONDS

    sql.event.listen(engine, "do_connect", connect)
    sql.event.listen(engine, "checkout", on_checkout)
    sql.event.listen(engine, "checkin", idle)
