"""Request schemas of embeddings, reranking and scores. Strict: each field is honoured or refused by name."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, PlainValidator, WithJsonSchema, model_validator

from server.schemas.field_types import INT32
from server.schemas.strict import Harmless, Strict, wrong

MAX_INPUTS = 2048  # of a request, as OpenAI has it
MAX_PAIRS = 10_000  # documents of a request, as Cohere has it
NAME = 128  # characters of a prompt's name

TEXT = {"type": "string"}
ID = {"type": "integer", "minimum": 0, "maximum": INT32}


def embedded(value: object) -> list[str] | list[list[int]]:
    """``input`` as a list with an entry for each vector. Raises ValueError."""
    given = [value] if isinstance(value, str) else value
    if not isinstance(given, list) or not given:
        raise ValueError("must be a text, token ids, or a list of one of both that is not empty")
    if isinstance(given[0], int):
        given = [given]
    if len(given) > MAX_INPUTS:
        raise ValueError(f"can have at most {MAX_INPUTS} entries")
    if isinstance(given[0], str):
        if not all(isinstance(one, str) for one in given):
            raise ValueError("must have texts only, as its first entry is one")
    elif not all(isinstance(one, list) and one and all(is_token_id(i) for i in one) for one in given):
        raise ValueError("must have token ids: whole numbers that are not negative")
    return given


def is_token_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= INT32


def texts(value: object) -> list[str]:
    """One text or several, as a list. Raises ValueError."""
    given = [value] if isinstance(value, str) else value
    if not isinstance(given, list) or not given or not all(isinstance(one, str) for one in given):
        raise ValueError("must be a text, or a list of texts that is not empty")
    if len(given) > MAX_PAIRS:
        raise ValueError(f"can have at most {MAX_PAIRS} texts")
    return given


def documents(value: object) -> list[str]:
    """Documents, each a text or an object with a ``text``, whose other fields do not count. Raises ValueError."""
    if not isinstance(value, list) or not value:
        raise ValueError("must be a list of documents that is not empty")
    return texts([one.get("text") if isinstance(one, dict) else one for one in value])


Inputs = Annotated[
    list[str] | list[list[int]],
    PlainValidator(embedded),
    WithJsonSchema(
        {
            "anyOf": [
                TEXT,
                {"type": "array", "items": TEXT, "minItems": 1, "maxItems": MAX_INPUTS},
                {"type": "array", "items": ID, "minItems": 1},
                {
                    "type": "array",
                    "items": {"type": "array", "items": ID, "minItems": 1},
                    "minItems": 1,
                    "maxItems": MAX_INPUTS,
                },
            ]
        }
    ),
]
Texts = Annotated[
    list[str],
    PlainValidator(texts),
    WithJsonSchema({"anyOf": [TEXT, {"type": "array", "items": TEXT, "minItems": 1, "maxItems": MAX_PAIRS}]}),
]
Documents = Annotated[
    list[str],
    PlainValidator(documents),
    WithJsonSchema(
        {
            "type": "array",
            "items": {"anyOf": [TEXT, {"type": "object", "properties": {"text": TEXT}, "required": ["text"]}]},
            "minItems": 1,
            "maxItems": MAX_PAIRS,
        }
    ),
]


class Pooling(Strict):
    """The fields that all of them share. Inputs that are longer than the model takes are cut, and the answer tells so;
    with ``truncate: false`` they are refused. ``truncate_prompt_tokens`` is vLLM's: to how many tokens they are cut,
    -1: as many as the model takes.
    """

    IDLE: ClassVar[frozenset[str]] = frozenset({"user"})
    LATER: ClassVar[Harmless] = {
        "add_special_tokens": (True,),
        "cache_salt": (),
        "embedding_types": (["float"],),
        "priority": (0,),
        "truncation_side": ("right",),
        "activation": (True,),
        "use_activation": (True,),
    }
    model: str = Field("", max_length=512)
    user: str = Field("", max_length=512)
    truncate: bool = True
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=INT32)] | None = None

    @model_validator(mode="after")
    def cuts_to_something(self) -> Self:
        """Zero tokens would be none."""
        if self.truncate_prompt_tokens == 0:
            raise wrong("truncate_prompt_tokens", "must be -1 or at least 1")
        return self

    def limit(self, most: int) -> int:
        """To how many tokens an input is cut, where the model takes ``most``."""
        asked = self.truncate_prompt_tokens
        return most if asked is None or asked < 0 else min(asked, most)


class EmbeddingRequest(Pooling):
    """``POST /v1/embeddings``. ``prompt_name``, or ``input_type``: the prompt of the checkpoint that is put before each
    text, by its name.
    """

    input: Inputs
    dimensions: Annotated[int, Field(ge=1, le=INT32)] | None = None
    encoding_format: Literal["float", "base64"] = "float"
    prompt_name: Annotated[str, Field(max_length=NAME)] | None = None
    input_type: Annotated[str, Field(max_length=NAME)] | None = None

    @model_validator(mode="after")
    def names_one_prompt(self) -> Self:
        """Both names of the field agree, and token ids have no prompt."""
        if self.prompt_name is not None and self.input_type not in (None, self.prompt_name):
            raise wrong("input_type", "differs from prompt_name")
        if self.named_prompt is not None and not isinstance(self.input[0], str):
            raise wrong("prompt_name" if self.prompt_name is not None else "input_type", "is not for token ids")
        return self

    @property
    def named_prompt(self) -> str | None:
        """The name of the prompt; None: the model's default."""
        return self.prompt_name if self.prompt_name is not None else self.input_type


class RerankRequest(Pooling):
    """``POST /v1/rerank``, as Jina and Cohere have it. ``max_tokens_per_doc``: of how many tokens of a document the
    model is told; ``top_n``: how many results are told, the best first; 0: all.
    """

    query: str
    documents: Documents
    top_n: Annotated[int, Field(ge=0, le=INT32)] | None = None
    return_documents: bool = True
    max_tokens_per_doc: Annotated[int, Field(ge=1, le=INT32)] | None = None

    @property
    def pairs(self) -> list[tuple[str, str]]:
        return [(self.query, text) for text in self.documents]


class ScoreRequest(Pooling):
    """``POST /v1/score``, as vLLM has it: one text with each of several, or as many pairs. ``queries`` and
    ``documents`` are other names of ``text_1`` and ``text_2``.
    """

    text_1: Texts | None = None
    text_2: Texts | None = None
    queries: Texts | None = None
    documents: Texts | None = None

    @model_validator(mode="after")
    def has_pairs(self) -> Self:
        """Each side once, and both of one length unless one of them is a single text."""
        for name, other in (("text_1", "queries"), ("text_2", "documents")):
            if (getattr(self, name) is None) == (getattr(self, other) is None):
                raise wrong(name, f"or {other} is required, and not both")
        first, second = self._sides
        if len(first) not in (1, len(second)):
            raise wrong("text_1" if self.text_1 is not None else "queries", "is one text, or as many as the other side")
        return self

    @property
    def _sides(self) -> tuple[list[str], list[str]]:
        return self.text_1 or self.queries or [], self.text_2 or self.documents or []

    @property
    def pairs(self) -> list[tuple[str, str]]:
        first, second = self._sides
        return [*zip(first * len(second) if len(first) == 1 else first, second, strict=True)]
