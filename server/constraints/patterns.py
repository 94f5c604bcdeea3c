"""Checks regular expressions for size, and rewrites what llguidance needs written differently."""

from __future__ import annotations

import re
from collections.abc import Callable

MAX_PATTERN = 2000  # characters
MAX_REPEATED = 10_000  # copies of what a pattern repeats

_REPEAT = re.compile(r"\{([0-9]{1,9})(?:(,)([0-9]{0,9}))?\}")
_CLASS = re.compile(r"\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)
# What a pattern is written in: a character by its number, another escape, an operator between classes, a character.
_PIECE = re.compile(
    r"\\[xuU]\{([0-9a-fA-F]{1,8})\}|\\x([0-9a-fA-F]{2})|\\u([0-9a-fA-F]{4})|\\U([0-9a-fA-F]{8})|\\.|&&|--|~~|.",
    re.DOTALL,
)
_BELOW, _ABOVE = 0xD7FF, 0xE000  # the characters next to the surrogates
_BRIDGE = r"\x{D7FF}-\x{E000}"


def check_pattern(pattern: str) -> None:
    """Refuse a regular expression that is too long or repeats too much: {n,m} within {n,m} multiply.
    Raises ValueError.
    """
    if len(pattern) > MAX_PATTERN:
        raise ValueError(f"can have at most {MAX_PATTERN} characters in a regular expression")
    if _copies(pattern) > MAX_REPEATED:
        raise ValueError(f"repeats more than {MAX_REPEATED} copies in a regular expression")


def bridge_surrogates(pattern: str) -> str:
    """The same pattern, written for llguidance: where a class has U+D7FF and U+E000, the range of both is added.
    Without it, llguidance sees the surrogates between as a gap, and ``[^...]`` would match these two characters.
    """
    made: list[str] = []
    levels: list[_Level] = []  # the classes that are open
    for found in _PIECE.finditer(pattern):
        piece = found[0]
        numbers = [number for number in found.groups() if number is not None]
        code = int(numbers[0], 16) if numbers else ord(piece) if len(piece) == 1 else -1
        if levels and len(made) == levels[-1].begins and piece in ("^", "]"):
            levels[-1].begins += piece == "^"
            levels[-1].plain = piece != "^"
            made.append(piece)
            continue
        if piece == "[":
            made.append(piece)
            levels.append(_Level(len(made)))
            continue
        if levels and piece in ("]", "&&", "--", "~~"):
            _bridge(made, levels[-1])
            made.append(piece)
            if piece == "]":
                inner = levels.pop()
                if levels and inner.plain:
                    levels[-1].below |= inner.below
                    levels[-1].above |= inner.above
            else:
                levels[-1] = _Level(len(made), plain=False)
            continue
        if levels:
            levels[-1].below |= code == _BELOW
            levels[-1].above |= code == _ABOVE
        made.append(piece)
    return "".join(made)


class _Level:
    """A class, or an operand in it: where its items begin in what is made, which of the two they have, and whether
    they are all that it is."""

    def __init__(self, begins: int, *, plain: bool = True) -> None:
        self.begins = begins
        self.plain = plain
        self.below = self.above = False


def _bridge(made: list[str], level: _Level) -> None:
    if level.below and level.above:
        if made[level.begins] in ("]", "-"):
            made[level.begins] = "\\" + made[level.begins]
        made.insert(level.begins, _BRIDGE)


def _copies(pattern: str) -> int:
    """How long the pattern gets when its counted repeats are written out; at most."""
    sizes = [0]  # of the open groups
    last = at = 0  # size of what a repeat would apply to
    while at < len(pattern):
        char = pattern[at]
        repeat = _REPEAT.match(pattern, at)
        if repeat is not None:
            times = max(int(repeat[1]), int(repeat[3] or 0), 1)
            sizes[-1] += last * (times - 1)
            last *= times
            at = repeat.end()
        elif char == "(":
            sizes.append(0)
            at, last = at + 1, 0
        elif char == ")" and len(sizes) > 1:
            last = sizes.pop()
            sizes[-1] += last
            at += 1
        elif char in "|*+?":
            at += 1
        else:
            found = _CLASS.match(pattern, at) if char == "[" else None
            at = found.end() if found is not None else at + (2 if char == "\\" else 1)
            last = 1
            sizes[-1] += 1
    return sum(sizes)


# A grammar in Lark: strings and comments, in which nothing is a pattern, and patterns.
_LARK = re.compile(r'"(?:\\.|[^"\\])*"|(?://|\#)[^\n]*|(/(?:\\.|[^/\\])+/[a-z]*)', re.DOTALL)
_AROUND = re.compile(r"\\.|\(\?<?[=!]", re.DOTALL)  # what is not escaped, and looks ahead or behind
_SUBTRACTS = re.compile(r"\[\^|&&|--|\\[pP]")  # what may leave a class nothing


def with_literals(grammar: str, change: Callable[[str], str]) -> str:
    """A grammar in Lark whose patterns, each from ``/`` to ``/`` and its flags, are changed."""
    return _LARK.sub(lambda found: found[0] if found[1] is None else change(found[1]), grammar)


def doubtful(grammar: str) -> list[str]:
    """The patterns of a Lark grammar that may match no text, as written there."""
    literals = dict.fromkeys(found[1] for found in _LARK.finditer(grammar) if found[1] is not None)
    return [literal for literal in literals if _SUBTRACTS.search(literal)]


def split_conjunction(pattern: str) -> list[str]:
    """The patterns that together say what one says that begins with ``^`` and look-aheads, as ``^(?=.*x)[a-z]+$``; that
    pattern alone where it does not, or where they cannot be told apart. Of negative look-aheads those are known that
    forbid a text of one class only, as ``(?!^[-+.]*$)``, or to begin with words, as ``(?!con|nul$)``.
    """
    if not pattern.startswith("^"):
        return [pattern]
    found, rest = [], pattern[1:]
    while rest.startswith(("(?=", "(?!")):
        end = _group_end(rest)
        if end == len(rest):
            return [pattern]
        inner = rest[3:end]
        ahead = [f"^(?:{inner})"] if rest[2] == "=" else _forbid(inner)
        if not ahead or looks_around(inner):
            return [pattern]
        found += ahead
        rest = rest[end + 1 :]
    return [f"^{rest}", *found] if found and not _has_alternatives(rest) and not _REPEATED.match(rest) else [pattern]


_LITERAL = re.compile(r"(?:[^\\^$.|?*+()\[\]{}]|\\[^0-9A-Za-z])+\Z", re.DOTALL)  # characters, escaped or plain
_TOKEN = re.compile(rf"\\.|{_CLASS.pattern}|.", re.DOTALL)
_REPEATED = re.compile(r"[*+?{]")
_ONE_CLASS = re.compile(r"\^?(\[\^?(?:\\.|[^\]\[\\&~])+\]|\\[sSdDwW])\*\$\Z", re.DOTALL)


def _group_end(pattern: str) -> int:
    """Where the group ends that begins the pattern; its length if nowhere."""
    depth = 0
    for token in _TOKEN.finditer(pattern):
        depth += (token[0] == "(") - (token[0] == ")")
        if depth == 0:
            return token.start()
    return len(pattern)


def _has_alternatives(pattern: str) -> bool:
    """Whether it is alternatives, outside of all groups."""
    depth = 0
    for token in _TOKEN.finditer(pattern):
        depth += (token[0] == "(") - (token[0] == ")")
        if depth == 0 and token[0] == "|":
            return True
    return False


def _forbid(inner: str) -> list[str]:
    """Patterns that hold together for the texts at whose beginning ``inner`` does not match; none for an ``inner`` that
    is neither one class, repeated up to the end, nor words.
    """
    if (found := _ONE_CLASS.match(inner)) is not None:
        return [] if "--" in found[1] else [_any_other(found[1])]
    words = [_word(word) for word in inner.removeprefix("^").split("|")]
    return [_not_begun(*word) for word in words if word is not None] if None not in words else []


def _any_other(atom: str) -> str:
    """A pattern for texts that have a character beside the class ``atom``."""
    if atom.startswith("\\"):
        return "\\" + atom[1].swapcase()
    return f"[{atom[2:]}" if atom.startswith("[^") else f"[^{atom[1:]}"


def _word(pattern: str) -> tuple[str, bool] | None:
    """The one text that a pattern matches, and whether the text has to end there; None if there is not one."""
    ends = pattern.endswith("$") and not pattern.endswith("\\$")
    pieces = _LITERAL.match(pattern.removesuffix("$") if ends else pattern)
    return None if pieces is None else (re.sub(r"\\(.)", r"\1", pieces[0]), ends)


def _not_begun(word: str, ends: bool) -> str:
    """A pattern for the texts that do not begin with ``word``; or with ``ends``, that are not ``word``."""
    shorter, other = [], []
    for at, character in enumerate(word):
        before = "".join(map(_number_character, word[:at]))
        shorter.append(before)
        other.append(f"{before}[^{_number_character(character)}]")
    if ends:
        other.append("".join(map(_number_character, word)) + "(?s:.)")
    return f"^(?:(?:{'|'.join(other)})(?s:.)*|{'|'.join(shorter)})$"


def _number_character(character: str) -> str:
    """A character in a pattern, by its number."""
    return rf"\x{{{ord(character):x}}}"


def looks_around(pattern: str) -> bool:
    """Whether a pattern has look-around or word boundaries."""
    found = _AROUND.findall(pattern)
    return any(piece.startswith("(") or piece in (r"\b", r"\B") for piece in found)
