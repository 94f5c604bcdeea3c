"""``Strict``: the base class of request schemas. Unknown fields are refused by name; ``null`` means absent.

Where the server is told to ignore unknown fields, these are left out, and their names are kept for the receipt.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from contextvars import ContextVar
from functools import cache
from typing import ClassVar, TypeVar

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic.warnings import UnsupportedFieldAttributeWarning
from pydantic_core import PydanticCustomError

# FastAPI ignores it while it makes a route; what it has deferred is built after that.
warnings.filterwarnings("ignore", category=UnsupportedFieldAttributeWarning)

Harmless = Mapping[str, tuple[object, ...]]

TELLABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}\Z")  # names that are told, as in errors
MOST_TOLD = 32
_ignored: ContextVar[dict[str, None] | None] = ContextVar("ignored", default=None)


def ignore_unknown(wanted: bool) -> None:
    """Set whether unknown fields of this task's request are ignored instead of refused."""
    _ignored.set({} if wanted else None)


def ignored_fields() -> list[str]:
    """The unknown fields of this task's request that were ignored."""
    return [*(_ignored.get() or ())]


def leave_out(name: str) -> None:
    """Note an unknown field if they are ignored; raises if they are refused."""
    names = _ignored.get()
    if names is None:
        raise PydanticCustomError("unknown", "is unknown", {"field": name})
    if TELLABLE.match(name) and len(names) < MOST_TOLD:
        names[name] = None


class Strict(BaseModel):
    """A JSON object of known fields. ``LATER``: unsupported fields -> values that are accepted because they have no
    effect. ``IDLE``: fields that are taken with any value of their type, because none of them changes the reply.
    ``NULLS``: fields for which null is a value.
    """

    # A validator is built when it is first used: most servers are asked for few of the APIs, and all take 10 MB.
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False, defer_build=True)
    LATER: ClassVar[Harmless] = {}
    IDLE: ClassVar[frozenset[str]] = frozenset()
    NULLS: ClassVar[frozenset[str]] = frozenset()

    @model_validator(mode="before")
    @classmethod
    def only_known(cls, data: object) -> object:
        """Drop nulls and harmless values; refuse the first field that is not served yet, or unknown (``leave_out``)."""
        if not isinstance(data, dict):
            return data
        kept = {}
        known = known_fields(cls)
        for name, value in data.items():
            if value is None and name not in cls.NULLS and (name in known or name in cls.LATER):
                continue
            if name in known:
                kept[name] = value
            elif name not in cls.LATER:
                leave_out(name)
            elif not any(type(value) is type(harmless) and value == harmless for harmless in cls.LATER[name]):
                raise PydanticCustomError("unsupported", "is not supported by this server yet", {"field": name})
        return kept


@cache
def known_fields(model: type[BaseModel]) -> frozenset[str]:
    """The names of a model's fields, as clients write them."""
    return frozenset(field.alias or name for name, field in model.model_fields.items())


def wrong(field: str, message: str) -> PydanticCustomError:
    """An error about one field, for checks that need the whole object."""
    return PydanticCustomError("value_error", message, {"field": field})


def missing_field_error(field: str) -> PydanticCustomError:
    """The error for a field that other fields require."""
    return PydanticCustomError("missing", "is required", {"field": field})


M = TypeVar("M", bound=BaseModel)


def validate(model: type[M], fields: Mapping[str, object]) -> M:
    """``fields`` validated as ``model``. Errors are reported as for the body that was sent.
    Raises RequestValidationError.
    """
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        raise RequestValidationError([{**first, "loc": ("body", *first["loc"])}]) from None
