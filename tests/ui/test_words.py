"""The words of the page: in every language all of them, and nothing that is not one."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path

import pytest

from server.http.page_script import FOLDER

STRING = r'"((?:[^"\\]|\\.)*)"'
SIMPLE = re.compile(rf"\bt\(\s*{STRING}")
PLURAL = re.compile(rf"\bplural\(\s*[^\"]*?,\s*{STRING},\s*{STRING}")
ENTRY = re.compile(rf"^  {STRING}: {STRING},$", re.MULTILINE)
FORMS = re.compile(rf"^  {STRING}: \{{ (.*) \}},$", re.MULTILINE)
FORM = re.compile(rf"(\w+): {STRING}")
NAMES = re.compile(r"\{(\w+)\}")
LANGUAGES = {"de": {"one", "other"}, "he": {"one", "two", "other"}}
# What people read and what is no word of the page: names, units, and words that are the same everywhere.
BARE = re.compile(r">([A-Z][a-z]+(?: [a-z]+)+)[.…?!]?<|(?:label|aria-label|title|placeholder)=\"([A-Z][^\"]+)\"")


@cache
def sources() -> str:
    return "\n".join(path.read_text() for path in sorted(FOLDER.glob("*.js")) if path.name != "words.js")


def read(text: str) -> str:
    """A string of JavaScript that JSON can read too."""
    found: str = json.loads(f'"{text}"')
    return found


def words() -> tuple[set[str], dict[str, str]]:
    """The texts that stand alone, and those that depend on a number: many -> one."""
    return {read(text) for text in SIMPLE.findall(sources())}, {read(b): read(a) for a, b in PLURAL.findall(sources())}


def test_no_sentence_of_the_page_is_without_its_translation_call() -> None:
    assert BARE.findall(sources()) == []


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_language_has_all_words_with_what_stands_in_them(language: str) -> None:
    file = (FOLDER / "words" / f"{language}.js").read_text()
    simple, plural = words()
    assert len(simple) > 300
    told = {read(key): read(text) for key, text in ENTRY.findall(file)}
    assert (simple - told.keys(), told.keys() - simple) == (set(), set())
    for key, text in told.items():
        assert sorted(NAMES.findall(key)) == sorted(NAMES.findall(text)), key
    forms = {read(key): dict(FORM.findall(body)) for key, body in FORMS.findall(file)}
    assert (plural.keys() - forms.keys(), forms.keys() - plural.keys()) == (set(), set())
    for key, texts in forms.items():
        assert texts.keys() == LANGUAGES[language], key
        assert sorted(NAMES.findall(key)) == sorted(NAMES.findall(texts["other"])), key
        assert all(set(NAMES.findall(text)) <= set(NAMES.findall(key)) for text in texts.values()), key
    assert {path.stem for path in Path(FOLDER / "words").glob("*.js")} == LANGUAGES.keys()
