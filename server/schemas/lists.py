"""Lists of objects, as OpenAI's API has them: all of a list, or a page of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

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
