"""Regular expressions that are rewritten before they are compiled: the same sets of texts, however they are spelled."""

from __future__ import annotations

import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from server.constraints import grammars
from server.constraints.grammars import GrammarCheck, lark_grammar, regex_grammar
from server.constraints.patterns import bridge_surrogates, doubtful, split_conjunction, with_literals

NEXT = ("\ud7fe", "\ud7ff", "\ue000", "\ue001")


def accepts(grammar: str, text: str) -> bool:
    tokenizer = LLTokenizer(TokenizerWrapper(grammars._Bytes(())))
    matcher = LLMatcher(tokenizer, grammar, log_level=0)
    return bool(matcher.consume_tokens([*text.encode()])) and bool(matcher.is_accepting())


@pytest.mark.parametrize(
    ("pattern", "taken"),
    [
        (r"[^\x{0}-\x{D7FE}\x{E001}-\x{10FFFF}]", (1, 2)),
        (r"[^\x{0}-\x{40}\x{42}-\x{D7FF}\x{E000}-\x{10FFFF}]", ()),
        (r"[^\x{9}\x20-\uD7FF\uE000\x{10000}]", (3,)),
        (r"[^]\u{d7ff}\U0000E000]", (0, 3)),
        (r"[^-\x{D7FF}\x{E000}]", (0, 3)),
        ("[^a\ud7ffb\ue000]", (0, 3)),
        (r"[^[\x{0}-\x{D7FF}][\x{E000}]]", (3,)),
        (r"[[^\x{D7FF}]\x{E000}]", (0, 2, 3)),
        (r"[\x{D7FE}-\x{D7FF}\x{E000}]", (0, 1, 2)),
        (r"[\x{0}-\x{10FFFF}&&[^\x{D7FF}\x{E000}]]", (0, 3)),
        (r"[\x{0}-\x{10FFFF}--\x{D7FF}\x{E000}]", (0, 3)),
    ],
)
def test_classes_beside_the_surrogates(pattern: str, taken: tuple[int, ...]) -> None:
    for place, character in enumerate(NEXT):
        assert accepts(regex_grammar(pattern), character) is (place in taken), character
        assert accepts(lark_grammar(f"start: /{pattern}/"), character) is (place in taken), character


def test_what_holds_neither_or_one_of_them_stays_as_it_is() -> None:
    outside = (r"a[b-d]+\x{D7FF}\x{E000}", r"[\x{D7FF}][^\x{E000}]")
    for pattern in (*outside, "[", "[\\", "[a", "]", "[]", "[^]", "x{2}[[:alpha:]]"):
        assert bridge_surrogates(pattern) == pattern


def test_patterns_are_found_where_they_are_patterns() -> None:
    grammar = 'start: /a/i "/b/" A // /c/\nA: "\\"/d/" | /e\\/[^f]/ # /g/\nB: /[h&&i]/\n'
    assert doubtful(grammar) == [r"/e\/[^f]/", "/[h&&i]/"]
    assert with_literals(grammar, str.upper) == grammar.replace("/a/i", "/A/I").replace(
        r"/e\/[^f]/", r"/E\/[^F]/"
    ).replace("/[h&&i]/", "/[H&&I]/")


@pytest.mark.parametrize("text", [r"[^\s\S]", "[a&&b]", r"a[^\d\D]", r"\P{any}+"])
def test_what_nothing_matches_is_refused(text: str) -> None:
    check = GrammarCheck()
    with pytest.raises(ValueError, match=r"^matches no text$"):
        check.validate(regex_grammar(text))
    with pytest.raises(ValueError, match=r"^has a regular expression that matches no text$"):
        check.validate(lark_grammar(f'start: "x" | A\nA: /{text}/'))
    check.validate(regex_grammar(f"({text})?b"))


ALONE = [
    "(?=a)a",  # may stand anywhere
    "^(?=a)a|b",  # only one of the two looks ahead
    "^(?=a)*b",
    "^(?=a(?!b))a",
    "^(?!ab?c)[a-z]+$",
    "^(?!a|b*)[a-z]+$",
    r"^(?!\d)[a-z]+$",
    "^(?!)a",
    "^(?!a*$)a",
    r"^a(?=b)",
    "^(?=a",
    "^[(?=a)]b",
    "",
]


@pytest.mark.parametrize("pattern", ALONE)
def test_look_aheads_that_stay(pattern: str) -> None:
    assert split_conjunction(pattern) == [pattern]


@pytest.mark.parametrize(
    ("pattern", "together"),
    [
        (r"^(?=.*\d)[a-z)\d]+$", [r"^[a-z)\d]+$", r"^(?:.*\d)"]),
        (r"^(?=[)](\)|b))(?=c)(a|b)$", ["^(a|b)$", r"^(?:[)](\)|b))", "^(?:c)"]),
        (r"^(?!^[-+.]*$)\d*$", [r"^\d*$", "[^-+.]"]),
        (r"^(?!\s*$)", ["^", r"\S"]),
        (r"^(?![^a\]]*$).", ["^.", r"[a\]]"]),
        (r"^(?!a)b", ["^b", r"^(?:(?:[^\x{61}])(?s:.)*|)$"]),
        (r"^(?!\.|a$)b", ["^b", r"^(?:(?:[^\x{2e}])(?s:.)*|)$", r"^(?:(?:[^\x{61}]|\x{61}(?s:.))(?s:.)*|)$"]),
    ],
)
def test_look_aheads_that_begin_a_pattern_are_patterns(pattern: str, together: list[str]) -> None:
    assert split_conjunction(pattern) == together
