"""``TokenizerParts``: a tokenizer as the engine hands it to the server, which needs no class of transformers for it."""

from __future__ import annotations

from typing import Any

import msgspec


class AddedToken(msgspec.Struct, frozen=True):
    """A token that was added to the vocabulary."""

    id: int
    text: str
    special: bool

    def __str__(self) -> str:
        return self.text


class TokenizerParts(msgspec.Struct, frozen=True):
    """``backend`` is the text of a tokenizer.json. ``special_tokens`` are those that have names (bos_token...), which
    chat templates read by these. ``response_template`` says how replies are parsed, if the checkpoint has one.
    """

    backend: str
    chat_template: str | dict[str, str] | None
    special_tokens: dict[str, str]
    special_ids: tuple[int, ...]
    added: tuple[AddedToken, ...]
    response_template: dict[str, Any] | None = None
