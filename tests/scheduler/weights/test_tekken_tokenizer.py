"""Tokenizers of checkpoints with Mistral's file."""

from __future__ import annotations

from pathlib import Path

import pytest
from tekken_kit import TEMPLATE, save_tekken
from tiny_models import make_tokenizer
from transformers import PreTrainedTokenizerFast

from scheduler.weights.tekken_tokenizer import read_usual
from server.torchless import read_tokenizer


def test_the_file_alone_is_a_tokenizer_with_the_template_beside_it(tmp_path: Path) -> None:
    save_tekken(tmp_path, TEMPLATE)
    made = read_usual(str(tmp_path))
    assert isinstance(made, PreTrainedTokenizerFast)
    assert made.chat_template == TEMPLATE
    assert made.encode("Hi[AUDIO]", add_special_tokens=False) == [40 + ord("H"), 40 + ord("i"), 24]


def test_a_tokenizer_of_the_usual_kind_is_taken_instead(tmp_path: Path) -> None:
    make_tokenizer().save_pretrained(tmp_path)
    save_tekken(tmp_path)
    assert read_usual(str(tmp_path)).get_vocab() == make_tokenizer().get_vocab()


@pytest.mark.wide
def test_the_server_reads_the_same(tmp_path: Path) -> None:
    save_tekken(tmp_path, TEMPLATE)
    made = read_tokenizer(str(tmp_path))
    assert made.chat_template == TEMPLATE
    assert made.get_vocab() == read_usual(str(tmp_path)).get_vocab()
