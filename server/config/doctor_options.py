"""The options of `warmturn doctor`."""

from __future__ import annotations

from pydantic import Field

from server.config.serve_options import DEMO, ServeConfig


class DoctorConfig(ServeConfig):
    """All that `warmturn serve` is told, and how to answer."""

    model: str = Field(
        default=DEMO,
        min_length=1,
        description="hub id or folder of a model to load and measure; demo: the bundled one",
        json_schema_extra={"metavar": "MODEL", "positional": True, "default": "none: only the machine is checked"},
    )
    as_json: bool = Field(
        default=False, description="print the findings as JSON", json_schema_extra={"flag": "--json", "default": "no"}
    )

    @property
    def with_model(self) -> bool:
        """Whether a model was named, by the argument or in the environment."""
        return "model" in self.model_fields_set
