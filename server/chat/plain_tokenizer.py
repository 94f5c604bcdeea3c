"""``PlainTokenizer``: the tokenizer that the engine has read, without transformers, which takes 25 MB and half a second
to import. It has those methods of transformers' tokenizers that ``ChatTokenizer`` uses, and they return the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer

from scheduler.tokenizer_parts import TokenizerParts
from server.chat.template_language import render_chat


class PlainTokenizer:
    """See the module. Raises ValueError if the parts are no tokenizer."""

    is_fast = True

    def __init__(self, parts: TokenizerParts) -> None:
        try:
            self.backend_tokenizer = Tokenizer.from_str(parts.backend)
        except Exception as error:  # the library raises plain exceptions
            raise ValueError(f"not a tokenizer.json: {error}") from None
        self.chat_template = parts.chat_template
        self.response_template = parts.response_template
        self.special_tokens_map = parts.special_tokens
        self.all_special_ids = parts.special_ids
        self.added_tokens_decoder = {token.id: token for token in parts.added}
        for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
            setattr(self, name, parts.special_tokens.get(name))

    def get_vocab(self) -> dict[str, int]:
        """Token to id, added tokens included."""
        vocabulary: dict[str, int] = self.backend_tokenizer.get_vocab(with_added_tokens=True)
        return vocabulary

    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str | None]:
        """The vocabulary's entries; None for ids outside it."""
        return [self.backend_tokenizer.id_to_token(int(i)) for i in ids]

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        tokenize: bool = False,
        **variables: Any,
    ) -> str:
        """The text of a chat. Raises whatever the template raises, ValueError if there is none."""
        assert not tokenize
        template = self.chat_template
        if isinstance(template, dict):
            template = template.get("tool_use" if tools is not None and "tool_use" in template else "default")
        if template is None:
            raise ValueError("there is no chat template")
        return render_chat(template, messages, tools, add_generation_prompt, {**self.special_tokens_map, **variables})
