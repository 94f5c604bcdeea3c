"""Incremental decoding of token ids to text, with stop strings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from scheduler.core.thinking import count_begun

_REPLACEMENT = "\ufffd"  # what decoders give for bytes that are no character yet
_CONTEXT = 6  # tokens of the prompt that decide how the first one is spelled (leading spaces)
_LONGEST = 8  # tokens that one character may take, generously


class Vocabulary:
    """The tokenizer as the engine uses it: ids to text, and an id to its bytes."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        fast = getattr(tokenizer, "backend_tokenizer", None)
        self._byte_level = fast is not None and "ByteLevel" in repr(fast.decoder)
        self._bytes: dict[int, bytes] = {}
        self._any: Callable[..., str] = self._slow if fast is None else fast.decode
        self._single: dict[tuple[int, bool], str] = {}  # texts of tokens on their own, by whether special ones have any

    def decode(self, ids: Sequence[int], special: bool = False) -> str:
        """The text of ``ids``; ``special`` tokens have none unless wanted."""
        if len(ids) != 1:
            return self._any(ids, skip_special_tokens=not special)
        key = ids[0], special
        if key not in self._single:
            self._single[key] = self._any(ids, skip_special_tokens=not special)
        return self._single[key]

    def _slow(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        text: str = self._tokenizer.decode(
            list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return text

    def spell(self, token: int) -> tuple[str, bytes]:
        """A token's text and its own bytes; the text of half a character holds U+FFFD."""
        if token not in self._bytes:
            self._bytes[token] = self._spell(token)
        data = self._bytes[token]
        return data.decode("utf-8", errors="replace"), data

    def spell_shown(self, token: int, special: bool) -> bytes:
        """A token's bytes if a text shows it, else none: ``special`` tokens are shown if wanted."""
        return self.spell(token)[1] if self.decode([token], special) else b""

    def _spell(self, token: int) -> bytes:
        piece = self._tokenizer.convert_ids_to_tokens(token)
        if piece is None:  # the logits are wider than the vocabulary
            return b""
        if piece.startswith("<0x") and len(piece) == 6:
            return bytes([int(piece[3:5], 16)])
        if self._byte_level and all(char in _BYTES for char in piece):
            return bytes(_BYTES[char] for char in piece)
        return str(piece).replace("\u2581", " ").encode()


def _byte_alphabet() -> dict[str, int]:
    """Byte-level BPE's spelling of bytes: printable ones stand for themselves, the rest from U+0100 on (GPT-2)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(rest)}


_BYTES = _byte_alphabet()


class TextStream:
    """The text of one turn. ``push`` each token that is to be shown, then ``flush`` once. ``special``: special tokens
    have text.

    Invariant: what ``push`` and ``flush`` returned, joined, is the decoded text before the stop string, if one was met.
    """

    def __init__(
        self, vocabulary: Vocabulary, prompt: Sequence[int], stop: tuple[str, ...] = (), special: bool = False
    ) -> None:
        self._decode = partial(vocabulary.decode, special=True) if special else vocabulary.decode
        self._ids = list(prompt[-_CONTEXT:])  # context, then tokens whose text is not complete
        # Context must begin with a character: byte tokens that lack one's beginning spoil all that follow them.
        while self._decode(self._ids).startswith(_REPLACEMENT):
            del self._ids[0]
        self._context = len(self._ids)
        self._shown = self._decode(self._ids)
        self._stop = stop
        self._held = ""
        self.stopped: str | None = None  # the stop string that was met

    def push(self, token: int, *, may_stop: bool = True) -> str:
        """Text that can be shown now; ``stopped`` is set once a stop string is complete. Text that was pushed without
        ``may_stop``, or before that, is not part of a stop string.
        """
        self._ids.append(token)
        return self._release(self._decode_new(final=False), may_stop)

    def flush(self) -> str:
        """What was held back, at the end of the turn."""
        if self.stopped is not None:
            return ""
        text = self._held + self._decode_new(final=True)
        self._held = ""
        return text

    def _decode_new(self, *, final: bool) -> str:
        end = len(self._ids)
        text = self._decode(self._ids)
        if text.endswith(_REPLACEMENT) and not final:
            if end - self._context <= _LONGEST:
                return ""
            end -= _LONGEST // 2  # no character takes so many tokens: all but the last few will never be one
            text = self._decode(self._ids[:end])
        if len(text) <= len(self._shown):
            return ""
        new = text[len(self._shown) :]
        self._ids = self._ids[self._context :]
        self._context = end - self._context
        self._shown = self._decode(self._ids[: self._context])
        return new

    def _release(self, new: str, may_stop: bool) -> str:
        text = self._held + new
        if not self._stop or not may_stop:
            self._held = ""
            return text
        found = min(((text.find(s), s) for s in self._stop if s in text), default=None)
        if found is not None:
            self.stopped = found[1]
            self._held = ""
            return text[: found[0]]
        hold = max((count_begun(text, s) for s in self._stop), default=0)
        self._held = text[len(text) - hold :]
        return text[: len(text) - hold]
