"""The tokenizer and its chat template: text to token ids and back, off the event loop."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ParamSpec, Self, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class TemplateRefused(Exception):
    """The chat template does not take these messages. ``message`` is for the client."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class Tokens:
    """A tokenizer of transformers, made safe for several threads.

    The methods block; ``run`` calls them (or anything made of them) on a small pool, so that a long prompt costs
    the event loop nothing.
    """

    def __init__(self, tokenizer: Any, workers: int = 4) -> None:
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer if getattr(tokenizer, "is_fast", False) else None
        if self._backend is not None:
            # What a tokenizer.json may carry would cut or fill prompts without a word.
            self._backend.no_truncation()
            self._backend.no_padding()
        self._lock = threading.Lock()  # tokenizers in pure Python keep state between calls
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="tokens")
        self._template = template_source(tokenizer)
        self.special_ids = frozenset(int(i) for i in tokenizer.all_special_ids)
        self._digest = digest(tokenizer, self._backend, self._template)

    @classmethod
    def load(cls, model: str) -> Self:
        """The tokenizer of a hub id or folder. Slow (imports transformers); raises what transformers raises."""
        from transformers import AutoTokenizer

        path = Path(model)
        if path.suffix == ".gguf":  # transformers wants a file named beside its folder
            return cls(AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name))
        return cls(AutoTokenizer.from_pretrained(model))

    @property
    def has_template(self) -> bool:
        """Whether chats can be rendered at all."""
        return self._template is not None

    def fingerprint(self, vocab_size: int) -> str:
        """What gives token ids their meaning, as 32 hexadecimal digits: tokenizer, chat template, and how many ids the
        model has. Models that share these go on with each other's sessions; their KV has a fingerprint of its own."""
        return hashlib.blake2b(f"{self._digest} {vocab_size}".encode(), digest_size=16).hexdigest()

    def encode(self, text: str, *, special: bool) -> list[int]:
        """Token ids of ``text``; with ``special`` also those that the tokenizer puts around a text (BOS)."""
        if self._backend is not None:
            ids: list[int] = self._backend.encode(text, add_special_tokens=special).ids
            return ids
        with self._lock:
            return list(self._tokenizer.encode(text, add_special_tokens=special))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, special tokens included. Ids beyond the vocabulary give no text."""
        if self._backend is not None:
            text: str = self._backend.decode(list(ids), skip_special_tokens=False)
            return text
        with self._lock:
            return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def render(self, messages: Sequence[dict[str, Any]], *, generation_prompt: bool) -> str:
        """The chat template applied to messages with a role and a text. Raises TemplateRefused."""
        if self._template is None:
            raise TemplateRefused("This model has no chat template: use /v1/completions instead.")
        developer = "developer" if "developer" in self._template else "system"
        named = [{**m, "role": developer} if m["role"] == "developer" else m for m in messages]
        try:
            text = self._tokenizer.apply_chat_template(named, tokenize=False, add_generation_prompt=generation_prompt)
        except Exception as error:  # templates are programs of others: whatever they raise, the messages did it
            raise TemplateRefused(refusal(error)) from error
        return str(text)

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a blocking function on the pool."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, lambda: function(*args, **kwargs))

    def close(self) -> None:
        """Let the pool's threads end."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def digest(tokenizer: Any, backend: Any, template: str | None) -> str:
    """All that a tokenizer and its template are made of."""
    if backend is not None:
        made = backend.to_str()
    else:
        made = repr((type(tokenizer).__name__, sorted(tokenizer.get_vocab().items()), tokenizer.special_tokens_map))
    return hashlib.blake2b(repr((made, template)).encode(), digest_size=16).hexdigest()


def template_source(tokenizer: Any) -> str | None:
    """The Jinja source that ``apply_chat_template`` uses by default; None when there is none."""
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, dict):
        template = template.get("default")
    return template if isinstance(template, str) and template else None


def refusal(error: Exception) -> str:
    """One sentence about a template's exception. Only what its author wrote with raise_exception is quoted."""
    said = str(error).strip() if type(error).__name__ == "TemplateError" else ""
    if said and len(said) <= 200 and said.isprintable():
        return f"The model's chat template does not take these messages: {said}"
    return "The model's chat template does not take these messages."
