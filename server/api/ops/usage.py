"""The route of usage: what the tenant's keys have used on which day, and what the tenant keeps."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Annotated, Self

import msgspec
from fastapi import APIRouter, Query, Request
from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError
from starlette.responses import Response

from server.http.json_response import json_response
from server.log.quota import current_quota
from server.log.usage_rows import DayOfKey, Spent, day_of, today
from server.schemas import query
from server.turns.context import context_of

router = APIRouter()

DAYS = 30  # that are told unless others are asked for
MOST_DAYS = 366


def is_day(text: str) -> str:
    """A day that exists. Raises PydanticCustomError."""
    try:
        day_of(text)
    except ValueError:
        raise PydanticCustomError("value_error", "is no day: write it as 2026-11-25") from None
    return text


Day = Annotated[str, Field(pattern=r"^\d{4}-\d{2}-\d{2}$"), AfterValidator(is_day)]


class UsageQuery(query.Query):
    """``GET /v1/usage``: the days from ``from`` to ``to``, both included, UTC; ``key``: of the key of this id only."""

    first: Day | None = Field(None, alias="from")
    last: Day | None = Field(None, alias="to")
    key: Annotated[str, Field(pattern=r"^[0-9a-f]{0,64}$")] | None = None

    @model_validator(mode="after")
    def in_order(self) -> Self:
        """No more days than are told at once."""
        first, last = self.days
        if not 0 <= (last - first).days < MOST_DAYS:
            message = f"is at most {MOST_DAYS - 1} days after from, and not before it"
            raise PydanticCustomError("value_error", message, {"field": "to"})
        return self

    @property
    def days(self) -> tuple[datetime.date, datetime.date]:
        last = day_of(self.last or today())
        if self.first is not None:
            return day_of(self.first), last
        return datetime.date.fromordinal(max(1, last.toordinal() - DAYS + 1)), last


class UsageCounts(msgspec.Struct, frozen=True):
    """Turns, their tokens and seconds, as ``server.log.usage_rows.Spent``."""

    requests: int
    new_tokens: int
    reused_tokens: int
    generated_tokens: int
    seconds: float


class UsageDay(UsageCounts, frozen=True, kw_only=True):
    """The usage of one key on one day. ``key`` is its id; null where no key is needed."""

    object: str = "usage.day"
    day: str
    key: str | None


class Kept(msgspec.Struct, frozen=True):
    """What the tenant keeps, and how much of it the asking key allows; null: any."""

    sessions: int
    bytes: int
    max_sessions: int | None
    max_bytes: int | None


class UsageList(msgspec.Struct, frozen=True):
    """The answer: days in their order, each with its keys, and the sum of them."""

    data: Sequence[UsageDay]
    first: str = msgspec.field(name="from")
    last: str = msgspec.field(name="to")
    total: UsageCounts
    kept: Kept
    object: str = "list"


@router.get("/v1/usage")
async def usage(query: Annotated[UsageQuery, Query()], request: Request) -> Response:
    """What the tenant's API keys have used, by key and day (UTC): turns, prompt tokens that were computed and reused,
    generated tokens, and seconds from each turn's admission to its end. ``kept`` is what the tenant keeps now."""
    log, tenant, quota = context_of(request).log, request.state.tenant, current_quota()
    first, last = (day.isoformat() for day in query.days)
    found = await log.usage.days(tenant, first, last)
    days = [(place, spent) for place, spent in found if query.key in (None, place.key)]
    total = Spent()
    for _, spent in days:
        total = total.plus(spent)
    kept = Kept(await log.holdings.sessions(tenant), await log.holdings.bytes(tenant), quota.sessions, quota.bytes)
    return json_response(
        UsageList([day_object(*day) for day in days], first, last, UsageCounts(*round_seconds(total)), kept)
    )


def day_object(place: DayOfKey, spent: Spent) -> UsageDay:
    return UsageDay(*round_seconds(spent), day=place.day, key=place.key or None)


def round_seconds(spent: Spent) -> Spent:
    """With seconds as people read them."""
    return spent._replace(seconds=round(spent.seconds, 3))
