"""Constraints: compiling grammars on a background thread, and the mask of tokens that a grammar allows next."""

from __future__ import annotations

import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from copy import copy
from typing import Any

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from scheduler.core.text import Vocabulary
from scheduler.grammar_limits import GRAMMAR_LIMITS, GRAMMAR_STACK

log = logging.getLogger("warmturn.engine")

_KEPT = 64  # compiled grammars
_KEPT_BYTES = 1 << 20  # of their text: compiled they take up to 50 times that
_WORD = 32  # tokens in a word of a mask

Mask = npt.NDArray[np.uint32]


class GrammarError(Exception):
    """The grammar cannot be compiled, or allows no continuation. The message contains none of its text."""


class Constraint:
    """The grammar of one turn, in the state after its reply so far. ``matcher`` is used by this turn only. ``words``:
    of a mask.
    """

    def __init__(self, matcher: LLMatcher, words: int) -> None:
        self.matcher = matcher
        self.words = words

    def compute_mask(self, unwanted: Sequence[int] = ()) -> Mask:
        """The tokens that may come next: one bit per token, lowest first, ``[words]`` uint32. End-of-sequence ids are
        allowed only if the grammar is complete.

        ``unwanted`` tokens are left out unless no others remain. Errors of the grammar are raised by the next
        ``accept``.
        """
        mask = np.zeros(self.words, np.uint32)
        self.matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if unwanted:
            left = mask.copy()
            for token in unwanted:
                if token < len(left) * _WORD:
                    left[token // _WORD] &= ~np.uint32(1 << token % _WORD)
            if left.any():
                return left
        return mask

    def forced_tokens(self) -> list[int]:
        """The tokens that come next if the grammar leaves no choice of text; others may spell the same text."""
        return list(self.matcher.compute_ff_tokens())

    def accept(self, token: int) -> bool:
        """Take the next ``token``; return whether the grammar now allows only the end. Raises ``GrammarError``."""
        if not self.matcher.consume_token(token) or self.matcher.is_error():
            raise GrammarError("The grammar allows no continuation of the reply so far, or is too complex.")
        return bool(self.matcher.is_stopped())


class Grammars:
    """Compiles grammars for one vocabulary on a background thread, and caches some.

    A grammar that is requested several times is compiled once: each turn gets a copy.
    """

    def __init__(self, make_tokenizer: Callable[[], LLTokenizer]) -> None:
        """``make_tokenizer`` is called once, before the first compile: see ``grammar_tokenizer``."""
        self._make_tokenizer = make_tokenizer
        self._tokenizer: LLTokenizer | None = None
        self._unavailable = ""  # there is no tokenizer
        self._limits = LLParserLimits(precompute_large_lexemes=False, verbose_errors=False, **GRAMMAR_LIMITS)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        usual = threading.stack_size(GRAMMAR_STACK)
        self._pool.submit(int).result()  # the thread is there now
        threading.stack_size(usual)
        self._kept: OrderedDict[str, Future[LLMatcher]] = OrderedDict()
        self._bytes = 0
        self._users: Counter[Future[LLMatcher]] = Counter()

    def prepare(self) -> None:
        """Create the tokenizer now: that holds the interpreter's lock, which would delay the first turn with a
        grammar.
        """
        if self._tokenizer is not None or self._unavailable:
            return
        try:
            self._tokenizer = self._make_tokenizer()
        except Exception as error:  # any error of a tokenizer: its model is served without grammars
            self._unavailable = "This model's tokenizer does not go with grammars."
            log.warning("no grammars: %s", error)

    def submit(self, grammar: str) -> Future[LLMatcher]:
        """A future of the compiled grammar, which must be copied and not used; its exception is ``GrammarError``. The
        caller must call ``release`` once, when it has the result or no longer needs it.
        """
        found = self._kept.get(grammar)
        if found is None:
            found = self._kept[grammar] = self._pool.submit(self._compile, grammar)
            self._bytes += len(grammar)
            while len(self._kept) > 1 and (len(self._kept) > _KEPT or self._bytes > _KEPT_BYTES):
                self._bytes -= len(self._kept.popitem(last=False)[0])
        self._kept.move_to_end(grammar)
        self._users[found] += 1
        return found

    def release(self, grammar: str, asked: Future[LLMatcher]) -> None:
        """One caller of ``submit`` no longer waits. A compilation for which nobody waits is cancelled if it has not
        begun.
        """
        self._users[asked] -= 1
        if self._users[asked]:
            return
        del self._users[asked]
        if asked.cancel() and self._kept.get(grammar) is asked:
            del self._kept[grammar]
            self._bytes -= len(grammar)

    def constraint(self, compiled: LLMatcher) -> Constraint:
        """For one turn, of what ``submit`` has given."""
        assert self._tokenizer is not None
        return Constraint(compiled.deep_copy(), -(-self._tokenizer.vocab_size // _WORD))

    def _compile(self, grammar: str) -> LLMatcher:
        self.prepare()
        if self._tokenizer is None:
            raise GrammarError(self._unavailable)
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
        if matcher.is_error():
            raise GrammarError("The grammar cannot be compiled.")
        return matcher


def grammar_tokenizer(tokenizer: Any, ends: Sequence[int], width: int) -> LLTokenizer:
    """A tokenizer of transformers as grammars need it: ``width`` logits, ``ends`` are the ids that end a reply. Raises
    ``GrammarError`` where the text of a reply is not what its tokens say one by one.
    """
    count = max(width, len(tokenizer))
    eos = list(ends) or [count]  # no logit has it: then a reply ends only where its grammar has to
    count += not ends
    fast = getattr(tokenizer, "backend_tokenizer", None)
    if fast is not None:
        plain = copy(fast)
        plain.no_padding()
        plain.no_truncation()
        with suppress(ValueError):  # it does not know this kind of decoder
            return LLTokenizer(plain.to_str(), n_vocab=count, eos_token=eos)
    return LLTokenizer(TokenizerWrapper(TokenBytes(tokenizer, eos, count)), n_vocab=count, eos_token=eos)


class TokenBytes:
    """What ``TokenizerWrapper`` asks for, of any tokenizer: the bytes of each id, and ids of bytes.

    Raises ``GrammarError`` where the bytes of tokens, joined, are not the text that they decode to.
    """

    def __init__(self, tokenizer: Any, ends: Sequence[int], count: int) -> None:
        vocabulary = Vocabulary(tokenizer)
        self.tokens = [vocabulary.spell(token)[1] or b"<[%d]>" % token for token in range(count)]
        special = {*tokenizer.all_special_ids, *ends, *range(len(tokenizer), count)}
        special |= {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
        self.eos_token_id = ends[0]
        self.bos_token_id = None
        self.special_token_ids = sorted(special)
        self._ids = {data: token for token, data in enumerate(self.tokens) if token not in special}
        self._longest = max(map(len, self._ids))
        self._check(vocabulary)

    def __call__(self, text: bytes) -> list[int]:
        """Any ids that spell ``text``: greedily, the longest first."""
        ids = []
        while text:
            size = next((n for n in range(min(self._longest, len(text)), 0, -1) if text[:n] in self._ids), 0)
            if not size:
                break
            ids.append(self._ids[text[:size]])
            text = text[size:]
        return ids

    def _check(self, vocabulary: Vocabulary) -> None:
        whole = [token for data, token in self._ids.items() if b"\xef\xbf\xbd" not in data and _is_text(data)]
        for start in range(0, len(whole), max(1, len(whole) // 64)):
            ids = [whole[start], *whole[start : start + 4]]
            before, said = vocabulary.decode(ids[:1]), vocabulary.decode(ids)
            if said != before + b"".join(self.tokens[token] for token in ids[1:]).decode():
                raise GrammarError("its tokens, one by one, are not the text that they make together")


def _is_text(data: bytes) -> bool:
    try:
        return bool(data.decode())
    except UnicodeDecodeError:
        return False
