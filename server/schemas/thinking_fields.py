"""Request fields of several servers that limit the reasoning tokens of a reply."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from server.schemas.strict import Strict, wrong

Tokens = Annotated[int, Field(ge=-1, le=2**31 - 1)]


class ThinkingFields(Strict):
    """The fields mean the same: -1 is no limit, 0 no reasoning. ``thinking_token_budget`` is vLLM's,
    ``thinking_budget`` Qwen's, the others are llama.cpp's. Every field is a budget, see ``given_budgets``: other rules
    about reasoning are fields of ``TurnRequest``.
    """

    thinking_token_budget: Tokens | None = None
    thinking_budget: Tokens | None = None
    thinking_budget_tokens: Tokens | None = None
    reasoning_budget: Tokens | None = None
    reasoning_budget_tokens: Tokens | None = None

    @model_validator(mode="after")
    def names_one_budget(self) -> Self:
        """All that are given agree."""
        given = self.given_budgets
        for param, value in [*given.items()][1:]:
            if value != next(iter(given.values())):
                raise wrong(param, f"differs from {next(iter(given))}")
        return self

    @property
    def given_budgets(self) -> dict[str, int]:
        """The budgets that the request has, by field."""
        return {param: value for param in ThinkingFields.model_fields if (value := getattr(self, param)) is not None}

    @property
    def thinking_limit(self) -> tuple[str, int] | None:
        """The field that limits the reasoning, and to how many tokens; -1: no limit. None if there is none."""
        return next(iter(self.given_budgets.items()), None)
