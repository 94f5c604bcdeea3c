"""Query parameters of a URL, as strict as bodies."""

from __future__ import annotations

from typing import Any

from pydantic import ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from server.schemas.metadata import Metadata
from server.schemas.strict import Strict


class Query(Strict):
    """Base class of query parameters. All values are text, so they are converted to the fields' types."""

    model_config = ConfigDict(strict=False, extra="forbid", frozen=True, allow_inf_nan=False)


class FilteredQuery(Query):
    """A query that filters by metadata: only objects with all given pairs."""

    metadata: Metadata = Field(default_factory=dict, description="as metadata[key]=value, repeatable")

    @model_validator(mode="before")
    @classmethod
    def brackets(cls, data: object) -> object:
        """``metadata[key]=value`` as a dictionary."""
        if not isinstance(data, dict):
            return data
        plain: dict[str, Any] = {}
        metadata: dict[str, Any] = {}
        for name, value in data.items():
            if name.startswith("metadata[") and name.endswith("]"):
                metadata[name[len("metadata[") : -1]] = value
            elif name == "metadata":
                raise PydanticCustomError("value_error", "must be given as metadata[key]=value", {"field": name})
            else:
                plain[name] = value
        return {**plain, "metadata": metadata} if metadata else plain
