"""Objects that answers of several endpoints share: all of a list, a page of it, and what a deletion answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Literal, TypeVar

import msgspec

T = TypeVar("T")


class DataList(msgspec.Struct, Generic[T], frozen=True, tag_field="object", tag="list"):
    """All objects."""

    data: Sequence[T]


class DataPage(msgspec.Struct, Generic[T], frozen=True, tag_field="object", tag="list"):
    """Some objects, and the ids of the first and the last; those of an empty page are null, or in lists of items ""."""

    data: Sequence[T]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedObject(msgspec.Struct, frozen=True):
    """An object that is no more. ``object``: the kind of the answer, as ``session.deleted``."""

    object: str
    id: str
    deleted: Literal[True] = True
