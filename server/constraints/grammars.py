"""Builds llguidance grammars from JSON schemas, regular expressions, choices, Lark and GBNF, as strings for
``Submit.grammar``.

What makes them raises ``ValueError`` with the end of a sentence that begins with the parameter's name, and that
repeats nothing of it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from threading import Lock
from typing import Any

from scheduler.grammar_limits import GRAMMAR_LIMITS, GRAMMAR_STACK
from server.constraints.enforceable import prepare
from server.constraints.json_schema import close_schema
from server.constraints.patterns import bridge_surrogates, check_pattern, doubtful, with_literals
from server.workers import Workers, WorkTimedOut

MAX_LARK = 20_000  # characters
MAX_RULES = 500  # their compiling takes a time that is worse than square
MAX_CHOICES = 1000
MAX_CHOICE_CHARS = 100_000  # in all
MAX_TIMES = 10_000  # of a repeat in a Lark grammar
REMEMBERED = 512  # grammars that were found valid
THREADS = 2  # that compile, and as many in their places where they hang
PATIENCE = 5.0  # seconds for one

# Between the tokens of JSON: a space, or a new line with its indentation. Any amount would let a model go on for ever.
WHITESPACE = r"\x20|\x0A[\x20\x09]{0,40}"
# What a grammar forces is otherwise looked ahead at once, however long it is: a{1000000}.
HEAD = '%llguidance {"no_forcing": true}\n'


def llguidance() -> Any:
    """The library, imported with the first grammar: most servers never have one, and it takes 5 MB."""
    import llguidance

    return llguidance


def json_schema_grammar(schema: Mapping[str, Any]) -> str:
    """JSON that is valid under ``schema`` (parsed JSON), with its properties in their order."""
    return str(llguidance().LLMatcher.grammar_from_json_schema(quote(set_layout(prepare(schema)))))


def regex_grammar(pattern: str) -> str:
    """Text that matches ``pattern`` as a whole (the syntax of Rust's regex, without look-around)."""
    check_pattern(pattern)
    rule: str = json.loads(llguidance().LLMatcher.grammar_from_regex(bridge_surrogates(pattern)))["grammars"][0][
        "lark_grammar"
    ]
    return HEAD + rule


def is_named(text: str, special: bool) -> bool:
    """Whether a grammar has to name an added token by its id: llguidance takes tokens in angle brackets for special
    ones, whatever the tokenizer says, and special ones match no text.
    """
    return special or (text.startswith("<") and text.endswith(">"))


def choice_grammar(choices: Sequence[str]) -> str:
    """One of these texts. Raises ValueError."""
    if not 1 <= len(choices) <= MAX_CHOICES or not all(choices):
        raise ValueError(f"must have 1 to {MAX_CHOICES} strings that are not empty")
    if sum(map(len, choices)) > MAX_CHOICE_CHARS:
        raise ValueError(f"can have at most {MAX_CHOICE_CHARS} characters in all")
    return HEAD + "start: CHOICE\nCHOICE: " + " | ".join(quote(choice) for choice in dict.fromkeys(choices))


_TIMES = re.compile(r"[{~,.]\s*([0-9]+)(?=[},\s.]|\Z)")


_GBNF = re.compile(r"^[ \t]*[A-Za-z][A-Za-z0-9_-]*[ \t]*::=", re.MULTILINE)  # how a rule begins


def lark_grammar(text: str) -> str:
    """A grammar in llguidance's variant of Lark, or in llama.cpp's GBNF. Its schemas (``%json``) are bounded like any
    other. Raises ValueError for what no grammar is, or one that is too large."""
    if len(text) > MAX_LARK:
        raise ValueError(f"can have at most {MAX_LARK} characters")
    if _GBNF.search(text):
        text = from_gbnf(text)
    if text.lstrip().startswith("{"):
        raise ValueError("must be a grammar in Lark's syntax")
    if "%llguidance" in text or "%import" in text:
        raise ValueError("cannot set options or import anything")
    if any(len(times) > 9 or int(times) > MAX_TIMES for times in _TIMES.findall(text)):
        raise ValueError(f"can repeat at most {MAX_TIMES} times")
    rules = made = text
    for found in re.finditer(r"%json\s*", text):
        try:
            schema, end = json.JSONDecoder().raw_decode(text, found.end())
        except (ValueError, RecursionError):
            raise ValueError("must have plain JSON after %json") from None
        enforced = prepare(schema)
        rules = rules.replace(text[found.start() : end], "")
        if enforced != schema:
            made = made.replace(text[found.start() : end], f"%json {quote(enforced)}")
    if rules.count(":") > MAX_RULES:
        raise ValueError(f"can have at most {MAX_RULES} rules")
    return HEAD + with_literals(made, bridge_surrogates)


class EmptyGrammar(ValueError):
    """The grammar compiles, but no text matches it."""


def from_gbnf(text: str) -> str:
    """A grammar of llama.cpp's as Lark. Raises ValueError."""
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return str(gbnf_to_lark(text)).removeprefix("%llguidance {}")
    except Exception:  # it is for a command line: IndexError, RecursionError and errors of its own, in their words
        raise ValueError("is not valid GBNF") from None


class GrammarCheck:
    """Tells whether grammars compile, without the model's tokenizer. For several threads.

    ``special`` are the texts of the special tokens that a grammar may name. Remembers what it has found valid.
    """

    def __init__(self, special: Collection[str] = ()) -> None:
        self._special = special
        self._valid: OrderedDict[bytes, None] = OrderedDict()
        self._lock = Lock()

    def validate(self, grammar: str) -> None:
        """Blocking: milliseconds as a rule, on a thread with ``GRAMMAR_STACK``. Raises ``ValueError``."""
        key = hashlib.blake2b(grammar.encode(), digest_size=16).digest()
        with self._lock:
            if key in self._valid:
                self._valid.move_to_end(key)
                return
        self._begin(grammar)
        for literal in doubtful(grammar) if grammar.startswith(HEAD) else ():
            try:
                self._begin(f"{HEAD}start: {literal}")
            except EmptyGrammar:
                raise ValueError("has a regular expression that matches no text") from None
        with self._lock:
            self._valid[key] = None
            if len(self._valid) > REMEMBERED:
                self._valid.popitem(last=False)

    def _begin(self, grammar: str) -> None:
        """Raises ValueError where it does not compile or, as ``EmptyGrammar``, where no text begins as it wants."""
        matcher = llguidance().LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
        if matcher.is_error():
            raise ValueError(_describe_error(matcher.get_error()))
        matcher.compute_bitmask()
        if matcher.is_error():
            raise (
                EmptyGrammar("matches no text")
                if "NoExtension" in matcher.get_error()
                else ValueError("is too complex")
            )

    @property
    def special_ids(self) -> dict[str, int]:
        """The ids that the special tokens have here, for a grammar that names them by their ids."""
        return {text: 257 + place for place, text in enumerate(self._special)}

    async def run(self, make: Callable[[], str]) -> str:
        """The grammar that ``make`` returns, validated on another thread. Raises ``ValueError``, also if it takes too
        long, and NoWorkerFree (``server.workers``).
        """

        def work() -> str:
            grammar = make()
            self.validate(grammar)
            return grammar

        try:
            return await self._workers.run(work)
        except WorkTimedOut:
            raise ValueError("takes too long to compile") from None

    @cached_property
    def _workers(self) -> Workers:
        return Workers(THREADS, THREADS, PATIENCE, GRAMMAR_STACK)

    @cached_property
    def _limits(self) -> Any:
        return llguidance().LLParserLimits(precompute_large_lexemes=False, verbose_errors=False, **GRAMMAR_LIMITS)

    @cached_property
    def _tokenizer(self) -> Any:
        library = llguidance()
        return library.LLTokenizer(library.TokenizerWrapper(_Bytes(self._special)))


class _Bytes:
    """A vocabulary of all bytes, an end and ``special`` tokens, for ``TokenizerWrapper``."""

    def __init__(self, special: Collection[str]) -> None:
        self.tokens = [bytes([byte]) for byte in range(256)] + [b"<end>", *(text.encode() for text in special)]
        self.special_token_ids = list(range(256, len(self.tokens)))
        self.eos_token_id = 256
        self.bos_token_id = None

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


# What llguidance's messages begin with or hold, and how that is said without repeating what the client sent.
SENTENCES = {
    "Unsatisfiable schema": "can be met by no value",
    "Unable to determine if regex is empty": "combines patterns in a way that cannot be enforced",
    "oneOf constraints are not supported": "uses oneOf with schemas that may overlap, which this server cannot "
    "enforce: use anyOf",
    "min/maxProperties only supported": "uses minProperties or maxProperties together with properties that are not "
    "required, which this server cannot enforce",
    "are not disjoint": "uses patternProperties that overlap, which this server cannot enforce",
    "Unimplemented keys": "uses a keyword that this server cannot enforce",
    "look-around": "uses look-around in a regular expression, which this server does not know",
    "lookarounds": "uses look-around or word boundaries in a regular expression, which this server does not know",
    "regex parse error": "holds a regular expression that is not understood",
    "invalid regex": "holds a regular expression that is not understood",
    "unknown special token": "names a special token that this model does not have",
    "too large": "is too complex",
    "fuel": "is too complex",
    "too many": "is too complex",
}
_PLACE = re.compile(r"at (\d{1,6})\((\d{1,6})\)|\A(\d{1,6})\((\d{1,6})\)")


def _describe_error(error: str) -> str:
    sentence = next((told for sign, told in SENTENCES.items() if sign in error), None)
    if sentence is not None:
        return sentence
    place = _PLACE.search(error)
    if place is None:
        return "is not valid, or not supported by this server"
    # HEAD is the first line.
    return f"is not understood: line {int(place[1] or place[3]) - 1}, column {place[2] or place[4]}"


def quote(value: object) -> str:
    """As JSON, which is also how Lark writes strings: only printable ASCII."""
    return json.dumps(value).replace("\x7f", "\\u007f")


def set_layout(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A schema with how its JSON may be laid out, and no more properties than it names, where it leaves that open."""
    return {**close_schema({**schema}), "x-guidance": {"whitespace_pattern": WHITESPACE}}


def argument_schema(parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    """The schema of a tool's arguments, which are an object whatever it says."""
    return prepare({"type": "object", **(parameters or {})})


def atoms(delimiter: str, special: Mapping[str, int]) -> list[str]:
    """A delimiter as Lark: special tokens by their ids, the rest as strings."""
    if not delimiter:
        return []
    names = sorted((name for name in special if name and name in delimiter), key=len, reverse=True)
    parts = re.split("(" + "|".join(map(re.escape, names)) + ")", delimiter) if names else [delimiter]
    return [f"<[{special[part]}]>" if part in special else quote(part) for part in parts if part]
