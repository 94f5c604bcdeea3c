"""Output formats of a reply: ``response_format`` and vLLM's structured outputs, and the grammar for each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Discriminator, Field, Tag, WithJsonSchema, model_validator

from server.constraints.grammars import (
    GrammarCheck,
    choice_grammar,
    json_schema_grammar,
    lark_grammar,
    regex_grammar,
)
from server.errors import ApiError, bad_request
from server.schemas.json_body import parse
from server.schemas.strict import Harmless, Strict, wrong

MAX_DESCRIPTION = 262_144  # characters
NAME = r"^[a-zA-Z0-9_-]{1,64}$"
ANY_OBJECT = {"type": "object"}
KINDS = ("text", "json_object", "json_schema")
MAKERS: dict[str, Callable[[Any], str]] = {
    "json": json_schema_grammar,
    "regex": regex_grammar,
    "grammar": lark_grammar,
    "choice": choice_grammar,
}


def only_kinds(value: object) -> object:
    """Raises ``ValueError`` that names the known types."""
    if value not in KINDS:
        raise ValueError("must be text, json_object or json_schema")
    return value


class TextFormat(Strict):
    """Any text."""

    type: Annotated[Literal["text"], BeforeValidator(only_kinds)]


class ObjectFormat(Strict):
    """Any JSON object."""

    type: Literal["json_object"]


class NamedSchema(Strict):
    """A JSON schema and its name. It is always enforced exactly, ``strict`` or not."""

    name: Annotated[str, Field(pattern=NAME)]
    description: Annotated[str, Field(max_length=MAX_DESCRIPTION)] | None = None
    schema_: dict[str, Any] = Field(default_factory=lambda: {"type": "object"}, alias="schema")
    strict: bool = False


class SchemaFormat(Strict):
    """JSON that is valid under a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


def kind_of(value: object) -> str:
    """The format's type; unknown ones are validated, and so refused, as text."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return f"<{kind}>" if kind in KINDS else "<text>"


ResponseFormat = Annotated[
    Annotated[TextFormat, Tag("<text>")]
    | Annotated[ObjectFormat, Tag("<json_object>")]
    | Annotated[SchemaFormat, Tag("<json_schema>")],
    Discriminator(kind_of),
]


def schema(value: object) -> object:
    """A JSON schema, given as an object or as JSON text. Raises ValueError for anything else."""
    if isinstance(value, str):
        try:
            return parse(value.encode())
        except (ApiError, UnicodeEncodeError):
            raise ValueError("must be a JSON schema, or one as text") from None
    return value


Schema = Annotated[
    dict[str, Any], BeforeValidator(schema), WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "string"}]})
]
Pattern = Annotated[str, Field(min_length=1)]
Choices = Annotated[list[str], Field(min_length=1, max_length=1000), Field(fail_fast=True)]


class StructuredOutputs(Strict):
    """vLLM's name for a format: exactly one of these. Schemas allow no more properties than they name, as is."""

    LATER: ClassVar[Harmless] = {
        "structural_tag": (),
        "whitespace_pattern": (),
        "disable_any_whitespace": (False,),
        "disable_fallback": (False, True),  # there is nothing to fall back on
        "disable_additional_properties": (False, True),
    }
    json_: Schema | None = Field(None, alias="json")
    json_object: bool = False
    regex: Pattern | None = None
    grammar: Pattern | None = None
    choice: Choices | None = None

    @model_validator(mode="after")
    def one_format(self) -> Self:
        """One, and not none."""
        given = [name for name, value in self.by_kind().items() if value is not False]
        if len(given) != 1:
            raise wrong(given[1] if given else "json", "or another format must be given, and only one")
        return self

    def by_kind(self) -> dict[str, Any]:
        """The fields that are formats, by the names of their kinds."""
        values = {"json": self.json_, "regex": self.regex, "grammar": self.grammar, "choice": self.choice}
        return {**{kind: value for kind, value in values.items() if value is not None}, "json_object": self.json_object}


@dataclass(frozen=True)
class Wanted:
    """The format of a reply: the parameter that sets it, one of ``MAKERS``, and that one's argument."""

    param: str
    kind: str
    value: Any

    def grammar(self) -> str:
        """The format as a grammar. Raises ValueError."""
        return MAKERS[self.kind](self.value)


class Formatted(Strict):
    """The fields of a request that set the format of its reply; at most one may be set. ``structured_outputs`` and
    those that begin with ``guided_`` are vLLM's.
    """

    response_format: ResponseFormat | None = None
    regex: Pattern | None = None
    grammar: Pattern | None = None
    choice: Choices | None = None
    guided_json: Schema | None = None
    guided_regex: Pattern | None = None
    guided_grammar: Pattern | None = None
    guided_choice: Choices | None = None
    structured_outputs: StructuredOutputs | None = None

    @model_validator(mode="after")
    def one_format(self) -> Self:
        """Two formats would have to hold together."""
        given = self._formats()
        if len(given) > 1:
            first, second = (one.param.partition(".")[0] for one in given[:2])
            raise wrong(second, f"cannot be used together with {first}")
        return self

    def wanted_format(self) -> Wanted | None:
        """The format of the reply; None: any text."""
        return next(iter(self._formats()), None)

    def _formats(self) -> list[Wanted]:
        found: list[Wanted] = []
        if self.model_fields_set.isdisjoint(Formatted.model_fields):
            return found
        match self.response_format:
            case ObjectFormat():
                found.append(Wanted("response_format", "json", ANY_OBJECT))
            case SchemaFormat(json_schema=named):
                found.append(Wanted("response_format.json_schema.schema", "json", named.schema_))
        for prefix, kinds in (("", ("regex", "grammar", "choice")), ("guided_", tuple(MAKERS))):
            values = [(kind, getattr(self, prefix + kind)) for kind in kinds]
            found += [Wanted(prefix + kind, kind, value) for kind, value in values if value is not None]
        if self.structured_outputs is not None:
            (kind, value), *_ = [pair for pair in self.structured_outputs.by_kind().items() if pair[1] is not False]
            what = ("json", ANY_OBJECT) if kind == "json_object" else (kind, value)
            found.append(Wanted(f"structured_outputs.{kind}", *what))
        return found


async def format_grammar(body: Formatted, check: GrammarCheck) -> str | None:
    """The grammar of a reply, checked to compile; None: no grammar. Raises a 400 that names the parameter."""
    wanted = body.wanted_format()
    if wanted is None:
        return None
    return await check_grammar(check, wanted.param, wanted.grammar)


async def check_grammar(check: GrammarCheck, param: str, make: Callable[[], str]) -> str:
    """The grammar that ``make`` (of ``constraints.grammars``) returns, checked to compile. Raises a 400 that names
    ``param``.
    """
    try:
        return await check.run(make)
    except ValueError as error:
        raise bad_request(f"{param} {error}.", param, "invalid_value") from None
