"""Structs of the answers about embeddings and scores."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import UNSET, UnsetType


class PoolingUsage(msgspec.Struct, frozen=True):
    """Tokens of a request: all of them were computed."""

    prompt_tokens: int
    total_tokens: int


class CutInput(msgspec.Struct, frozen=True):
    """An input that was longer than the model takes: of its ``tokens`` the first ``kept`` ones were used, those around
    a text included. ``index``: its place in the request; null for the query of a ranking.
    """

    index: int | None
    tokens: int
    kept: int


class EmbeddingObject(msgspec.Struct, frozen=True):
    """The vector of an input: numbers, or their bytes (float32, little-endian) in base64."""

    index: int
    embedding: list[float] | str
    object: str = "embedding"


class EmbeddingList(msgspec.Struct, frozen=True):
    """The answer of ``/v1/embeddings``. ``truncated``: the inputs that were cut, if there are any."""

    data: Sequence[EmbeddingObject]
    model: str
    usage: PoolingUsage
    object: str = "list"
    truncated: Sequence[CutInput] | UnsetType = UNSET


class RankedText(msgspec.Struct, frozen=True):
    """A document, as it was sent."""

    text: str


class RankedDocument(msgspec.Struct, frozen=True):
    """A document's score, and its place in the request."""

    index: int
    relevance_score: float
    document: RankedText | UnsetType = UNSET


class Ranking(msgspec.Struct, frozen=True):
    """The answer of ``/v1/rerank``, the best document first."""

    id: str
    model: str
    results: Sequence[RankedDocument]
    usage: PoolingUsage
    truncated: Sequence[CutInput] | UnsetType = UNSET


class ScoreObject(msgspec.Struct, frozen=True):
    """The score of a pair."""

    index: int
    score: float
    object: str = "score"


class ScoreList(msgspec.Struct, frozen=True):
    """The answer of ``/v1/score``."""

    id: str
    created: int
    model: str
    data: Sequence[ScoreObject]
    usage: PoolingUsage
    object: str = "list"
    truncated: Sequence[CutInput] | UnsetType = UNSET
