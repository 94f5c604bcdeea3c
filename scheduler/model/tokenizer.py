"""Takes the model's tokenizer apart for the server."""

from __future__ import annotations

from typing import Any

import msgspec
from transformers import PreTrainedTokenizerFast

from scheduler.tokenizer_parts import AddedToken, TokenizerParts

_METHODS = ("apply_chat_template", "get_chat_template", "convert_ids_to_tokens", "get_vocab")  # that the server has too


def take_apart(tokenizer: Any) -> TokenizerParts | None:
    """The parts of a tokenizer of transformers; None if they would not do what it does: one that is written in Python,
    or that renders chats in a way of its own.
    """
    kind, usual = type(tokenizer), PreTrainedTokenizerFast
    if not issubclass(kind, usual) or any(getattr(kind, name) is not getattr(usual, name) for name in _METHODS):
        return None
    try:
        return msgspec.convert(
            {
                "backend": tokenizer.backend_tokenizer.to_str(),
                "chat_template": getattr(tokenizer, "chat_template", None),
                "special_tokens": tokenizer.special_tokens_map,
                "special_ids": tuple(int(i) for i in tokenizer.all_special_ids),
                "added": tuple(
                    AddedToken(int(i), str(token), bool(token.special))
                    for i, token in tokenizer.added_tokens_decoder.items()
                ),
                "response_template": getattr(tokenizer, "response_template", None),
            },
            TokenizerParts,
        )
    except msgspec.ValidationError:  # a template of a type that is not JSON's
        return None
