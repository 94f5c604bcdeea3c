"""The licence that a model's card or file names."""

from __future__ import annotations

from pathlib import Path

import pytest

from scheduler.model.licence import licence_of

CARDS = {
    "---\nlicense: apache-2.0\n---\n\n# A model\n": "apache-2.0",
    "---\nlicense: other\nlicense_name: our own\nlicense_link: LICENSE\n---\n": "our own",
    "# A model\n\nlicense: none\n": "",
    "---\nlicense: [a, b]\n---\n": "",
    "---\nlicense: {\n---\n": "",
    "": "",
}


@pytest.mark.parametrize(("card", "name"), CARDS.items())
def test_a_card_names_it_or_nothing_does(tmp_path: Path, card: str, name: str) -> None:
    assert licence_of(str(tmp_path)) == ""
    (tmp_path / "README.md").write_text(card)
    assert licence_of(str(tmp_path)) == name


def test_the_demo_has_one() -> None:
    assert licence_of("server/demo") == "apache-2.0"


def test_a_file_that_is_no_gguf_names_none(tmp_path: Path) -> None:
    (path := tmp_path / "m.gguf").write_bytes(b"none")
    assert licence_of(str(path)) == ""
