"""Request schemas of sessions, bodies and queries, as strict as those of ``server.schemas.requests``."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from server.log.identity import check_id
from server.log.search_index import words_of
from server.media.media import PlacedMedia
from server.schemas.field_types import INT32
from server.schemas.messages import MAX_MESSAGES, Content, Messages, plain_content
from server.schemas.metadata import Metadata
from server.schemas.query import FilteredQuery, Query
from server.schemas.strict import Strict

MAX_TTL = 10 * 365 * 86_400  # seconds
MAX_PIN = 7 * 86_400
MAX_TIME = 2**53  # Unix seconds that every JSON reader can hold


SessionId = Annotated[str, AfterValidator(check_id)]
Ttl = Annotated[int, Field(ge=1, le=MAX_TTL)]
PinSeconds = Annotated[int, Field(ge=0, le=MAX_PIN)]
Count = Annotated[int, Field(ge=0, le=INT32)]


class CreateSession(Strict):
    """``POST /v1/sessions``."""

    id: SessionId | None = None
    messages: Messages = Field(default_factory=list, max_length=MAX_MESSAGES)
    metadata: Metadata = Field(default_factory=dict)
    ttl_seconds: Ttl | None = None
    pin_seconds: PinSeconds = 0


class UpdateSession(Strict):
    """``POST /v1/sessions/{id}``. What is absent stays; ``ttl_seconds`` null: no end; ``pin_seconds`` 0: no pin."""

    NULLS = frozenset({"ttl_seconds"})
    metadata: Metadata | None = None
    ttl_seconds: Ttl | None = None
    pin_seconds: PinSeconds | None = None

    @property
    def sets_ttl(self) -> bool:
        """Whether the body speaks of ``ttl_seconds`` at all."""
        return "ttl_seconds" in self.model_fields_set


class ForkSession(Strict):
    """``POST /v1/sessions/{id}/fork``. ``turn`` is the last one that is copied; absent: all."""

    id: SessionId | None = None
    turn: Count | None = None


class RewindSession(Strict):
    """``POST /v1/sessions/{id}/rewind``: to the end of a turn, or to so many tokens."""

    turn: Count | None = None
    tokens: Count | None = None

    @model_validator(mode="after")
    def one_of_both(self) -> Self:
        """Exactly one place."""
        if (self.turn is None) == (self.tokens is None):
            raise PydanticCustomError("value_error", "or tokens is required, and not both", {"field": "turn"})
        return self


class EditMessage(Strict):
    """``PUT /v1/sessions/{id}/messages/{index}``."""

    content: Content

    @property
    def plain(self) -> tuple[str, list[PlacedMedia]]:
        """The new content as the log takes it: its text, and the media placed in it."""
        return plain_content(self.content)


def has_words(query: str) -> str:
    """A query with a word that can be searched for."""
    if not words_of(query):
        raise PydanticCustomError("value_error", "has no word to search for")
    return query


class ListSessions(FilteredQuery):
    """``GET /v1/sessions``: a page of those used last, filtered. Times are Unix seconds; ``after`` is a session id;
    ``query`` has the beginnings of words that one message, or the title, must all have.
    """

    limit: int = Field(20, ge=1, le=100)
    after: SessionId | None = None
    order: Literal["asc", "desc"] = "desc"
    prefix: Annotated[str, Field(pattern=r"^[A-Za-z0-9._:@-]{0,128}$")] | None = None
    used_after: Annotated[int, Field(ge=0, le=MAX_TIME)] | None = None
    used_before: Annotated[int, Field(ge=0, le=MAX_TIME)] | None = None
    fingerprint: Annotated[str, Field(max_length=128)] | None = None
    model: Annotated[str, Field(max_length=256)] | None = None
    query: Annotated[str, Field(max_length=200), AfterValidator(has_words)] | None = None


class MetadataKeys(Query):
    """``GET /v1/metadata_keys``: those that begin with ``prefix``."""

    prefix: Annotated[str, Field(max_length=64)] = ""


class RunningTurnQuery(Query):
    """``GET /v1/sessions/{id}/running``. ``stream``: the events of the turn instead of its description."""

    stream: bool = False


class ExportSession(Query):
    """``GET /v1/sessions/{id}/export``. ``kv`` false: the log alone."""

    kv: bool = True


class ImportSession(Query):
    """``POST /v1/sessions/import``. ``id``: another one than the capsule's."""

    id: SessionId | None = None
