"""What a reply must look like: ``response_format`` and its extensions, from the wire to a grammar."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from server.errors import bad_request
from server.grammars import (
    GrammarCheck,
    choice_grammar,
    json_object_grammar,
    json_schema_grammar,
    lark_grammar,
    regex_grammar,
)
from server.strict import Strict, wrong

MAX_DESCRIPTION = 16_384  # characters
NAME = r"^[a-zA-Z0-9_-]{1,64}$"
KINDS = ("text", "json_object", "json_schema")
ONE_OF = ("response_format", "regex", "grammar", "choice")


def only_kinds(value: object) -> object:
    """A stranger is told what there is."""
    if value not in KINDS:
        raise ValueError("must be text, json_object or json_schema")
    return value


class TextFormat(Strict):
    """Anything."""

    type: Annotated[Literal["text"], BeforeValidator(only_kinds)]


class ObjectFormat(Strict):
    """Any JSON object."""

    type: Literal["json_object"]


class NamedSchema(Strict):
    """A JSON schema and what it is called. It is obeyed exactly, ``strict`` or not."""

    name: Annotated[str, Field(pattern=NAME)]
    description: Annotated[str, Field(max_length=MAX_DESCRIPTION)] | None = None
    schema_: dict[str, Any] = Field(default_factory=lambda: {"type": "object"}, alias="schema")
    strict: bool = False


class SchemaFormat(Strict):
    """JSON that is valid under a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


def kind_of(value: object) -> str:
    """Which format this is; strangers are refused by the first."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return f"<{kind}>" if kind in KINDS else "<text>"


ResponseFormat = Annotated[
    Annotated[TextFormat, Tag("<text>")]
    | Annotated[ObjectFormat, Tag("<json_object>")]
    | Annotated[SchemaFormat, Tag("<json_schema>")],
    Discriminator(kind_of),
]


class Formatted(Strict):
    """The fields of a request that say what its reply must look like; at most one of them does."""

    response_format: ResponseFormat | None = None
    regex: Annotated[str, Field(min_length=1)] | None = None
    grammar: Annotated[str, Field(min_length=1)] | None = None
    choice: Annotated[list[str], Field(min_length=1, max_length=1000), Field(fail_fast=True)] | None = None

    @model_validator(mode="after")
    def one_format(self) -> Self:
        """Two formats would have to hold together."""
        given = [name for name in ONE_OF if self._asks(name)]
        if len(given) > 1:
            raise wrong(given[1], f"cannot be used together with {given[0]}")
        return self

    def wanted(self) -> tuple[str, Callable[[], str]] | None:
        """The parameter that says what the reply must look like, and what makes its grammar; None: anything goes."""
        match self.response_format:
            case ObjectFormat():
                return "response_format", json_object_grammar
            case SchemaFormat(json_schema=named):
                return "response_format.json_schema.schema", partial(json_schema_grammar, named.schema_)
        if self.regex is not None:
            return "regex", partial(regex_grammar, self.regex)
        if self.grammar is not None:
            return "grammar", partial(lark_grammar, self.grammar)
        if self.choice is not None:
            return "choice", partial(choice_grammar, self.choice)
        return None

    def _asks(self, name: str) -> bool:
        value = getattr(self, name)
        return value is not None and not isinstance(value, TextFormat)


async def format_grammar(body: Formatted, check: GrammarCheck) -> str | None:
    """The grammar of a reply, known to compile; None: anything goes. Raises a 400 that names the parameter."""
    wanted = body.wanted()
    if wanted is None:
        return None
    param, make = wanted
    return await checked(check, param, make)


async def checked(check: GrammarCheck, param: str, make: Callable[[], str]) -> str:
    """What ``make`` (of ``server.grammars``) makes of the parameter ``param``, known to compile. Raises a 400."""
    try:
        return await check.run(make)
    except ValueError as error:
        raise bad_request(f"{param} {error}.", param, "invalid_value") from None
