"""From ids to text: whatever the tokenizer, the pieces joined are the whole."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from tiny_models import byte_tokenizer, make_tokenizer
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from scheduler.core.text import TextStream, Vocabulary

SAMPLES = [
    "plain words, and some more of them",
    "  two  spaces   and\ttabs\n\nand lines ",
    "Grüße, naïve café — señor",
    "你好，世界。今天天气很好",
    "😀😀👩‍👩‍👧‍👦🎉🎉🎉🎉🎉🎉 done",
    "mixed 你 and 😀 and é and ascii",
    "नमस्ते दुनिया مرحبا",
    "",
]


def byte_level() -> PreTrainedTokenizerFast:
    """Byte-level BPE with a few merges, so that tokens hold whole words, half characters and both."""
    base = make_tokenizer()
    vocab = {piece: at for piece, at in base.get_vocab().items() if at < 256}
    merges: list[tuple[str, str]] = []
    for first, second in (("an", "d"), ("a", "n"), ("Ġ", "an"), ("ä", "½"), ("ðŁ", "ĺ"), ("ð", "Ł"), ("t", "h")):
        for piece in (first, second, first + second):
            vocab.setdefault(piece, len(vocab))
        merges.append((first, second))
    return PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer(["<|end|>"], vocab, merges))


def sentencepiece() -> PreTrainedTokenizerFast:
    """As Llama 2 has it: words begin with U+2581, what has no piece is spelled in byte tokens."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    for piece in ["▁", *"abcdefghijklmnopqrstuvwxyz,.", "an", "▁an", "▁and", "▁so"]:
        vocab[piece] = len(vocab)
    merges = [("a", "n"), ("▁", "an"), ("▁an", "d"), ("s", "o"), ("▁", "so")]
    vocab["so"] = len(vocab)
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=backend)


TOKENIZERS = {"bytes": make_tokenizer, "byte level": byte_level, "sentencepiece": sentencepiece}


def stream(
    vocabulary: Vocabulary, ids: Sequence[int], prompt: Sequence[int] = (), stop: tuple[str, ...] = ()
) -> list[str]:
    """The pieces that come out, token by token, and the last one of ``flush``."""
    text = TextStream(vocabulary, prompt, stop)
    pieces = []
    for token in ids:
        pieces.append(text.push(token))
        if text.stopped is not None:
            break
    return [*pieces, text.flush()]


def encode(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """Ids without special tokens."""
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids


# -- joined is whole ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", SAMPLES)
@pytest.mark.parametrize("name", TOKENIZERS)
def test_pieces_joined_are_the_text(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]()
    vocabulary = Vocabulary(tokenizer)
    ids = encode(tokenizer, text)
    assert vocabulary.decode(ids) == text
    pieces = stream(vocabulary, ids)
    assert "".join(pieces) == text
    assert "\ufffd" not in "".join(pieces)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_random_texts_after_random_prompts(name: str) -> None:
    tokenizer = TOKENIZERS[name]()
    vocabulary = Vocabulary(tokenizer)
    rng = random.Random(1)
    letters = "abc and so 你好é😀👩🎉 "
    for _ in range(150):
        prompt = encode(tokenizer, "".join(rng.choice(letters) for _ in range(rng.randint(1, 12))))
        ids = encode(tokenizer, "".join(rng.choice(letters) for _ in range(rng.randint(0, 30))))
        whole = vocabulary.decode([*prompt, *ids])
        assert vocabulary.decode(prompt) + "".join(stream(vocabulary, ids, prompt)) == whole


@pytest.mark.parametrize("name", ["bytes", "byte level"])
def test_random_ids_that_are_no_text(name: str) -> None:
    tokenizer = TOKENIZERS[name]()
    vocabulary = Vocabulary(tokenizer)
    rng = random.Random(2)
    for _ in range(200):
        ids = [rng.choice([*range(len(tokenizer)), 65, 66, 0xE4, 0xBD, 0xA0]) for _ in range(rng.randint(0, 40))]
        assert "".join(stream(vocabulary, ids)) == vocabulary.decode(ids)


def test_a_character_is_shown_when_it_is_complete() -> None:
    vocabulary = Vocabulary(make_tokenizer())
    assert stream(vocabulary, list("a😀b".encode())) == ["a", "", "", "", "😀", "b", ""]


def test_half_a_character_at_the_end_is_shown_as_such() -> None:
    vocabulary = Vocabulary(make_tokenizer())
    assert stream(vocabulary, [65, 0xF0, 0x9F]) == ["A", "", "", "\ufffd"]


def test_many_byte_tokens_in_a_row() -> None:
    """Longer than any window of context: no character may be cut in two."""
    tokenizer = sentencepiece()
    vocabulary = Vocabulary(tokenizer)
    text = "a" + "😀你é" * 20 + "b"
    pieces = stream(vocabulary, encode(tokenizer, text))
    assert "".join(pieces) == text
    assert [piece for piece in pieces if piece] == list(text)


def test_special_tokens_show_nothing_and_spaces_survive_them() -> None:
    tokenizer = sentencepiece()
    vocabulary = Vocabulary(tokenizer)
    ids = [*encode(tokenizer, "so"), 2, *encode(tokenizer, "and")]
    assert "".join(stream(vocabulary, ids)) == vocabulary.decode(ids) == "so and"


def test_the_first_word_after_a_prompt_keeps_its_space() -> None:
    tokenizer = sentencepiece()
    prompt, more = encode(tokenizer, "so"), encode(tokenizer, "and")
    assert stream(Vocabulary(tokenizer), more, prompt) == [" and", ""]


def test_ids_beyond_the_vocabulary_show_nothing() -> None:
    vocabulary = Vocabulary(make_tokenizer())
    assert "".join(stream(vocabulary, [65, 5000, 66])) == "AB"
    assert vocabulary.spell(5000) == ("", b"")


# -- stop strings ---------------------------------------------------------------------------------------------------


def reference_stop(text: str, stop: tuple[str, ...]) -> str:
    """Text before the stop string that is complete first; of those complete at once, the one that begins first."""
    for end in range(1, len(text) + 1):
        starts = [end - len(s) for s in stop if text[:end].endswith(s)]
        if starts:
            return text[: min(starts)]
    return text


def test_stop_strings_against_a_search_of_the_whole_text() -> None:
    vocabulary = Vocabulary(make_tokenizer())
    rng = random.Random(3)
    met = 0
    for _ in range(400):
        text = "".join(rng.choice("abé") for _ in range(rng.randint(0, 14)))
        stop = tuple("".join(rng.choice("abé") for _ in range(rng.randint(1, 4))) for _ in range(rng.randint(1, 3)))
        stop_stream = TextStream(vocabulary, (), stop)
        shown = ""
        for byte in text.encode():
            shown += stop_stream.push(byte)
            if stop_stream.stopped is not None:
                break
        met += stop_stream.stopped is not None
        assert (stop_stream.stopped is not None) == any(s in text for s in stop)
        shown += stop_stream.flush()
        assert shown == reference_stop(text, stop)
    assert 50 < met < 350


def test_text_that_may_begin_a_stop_string_is_held_and_released() -> None:
    vocabulary = Vocabulary(make_tokenizer())
    assert stream(vocabulary, list(b"xENx"), stop=("END",)) == ["x", "", "", "ENx", ""]
    assert stream(vocabulary, list(b"xEN"), stop=("END",)) == ["x", "", "", "EN"]
    assert stream(vocabulary, list(b"xENDy"), stop=("END",)) == ["x", "", "", "", ""]


def test_the_earliest_of_several_matches_wins_within_one_token() -> None:
    tokenizer = sentencepiece()
    (token,) = [at for piece, at in tokenizer.get_vocab().items() if piece == "▁and"]
    text = TextStream(Vocabulary(tokenizer), encode(tokenizer, "so"), ("d", "n"))
    assert text.push(token) == " a"
    assert text.stopped == "n"


def test_before_its_time_a_stop_string_is_plain_text() -> None:
    text = TextStream(Vocabulary(make_tokenizer()), (), ("b",))
    assert [text.push(byte, may_stop=False) for byte in b"ab"] == ["a", "b"]
    assert text.stopped is None
    assert [text.push(byte) for byte in b"ab"] == ["a", ""]
    assert text.stopped == "b"


def test_a_stop_string_in_a_character_that_is_complete_late() -> None:
    text = TextStream(Vocabulary(make_tokenizer()), (), ("好",))
    shown = [text.push(byte) for byte in "你好".encode()]
    assert shown == ["", "", "你", "", "", ""]
    assert text.stopped == "好"


# -- spelling -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [text for text in SAMPLES if text])
@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_bytes_of_tokens_joined_are_the_text(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]()
    vocabulary = Vocabulary(tokenizer)
    data = b"".join(vocabulary.spell(token)[1] for token in encode(tokenizer, text))
    assert data.decode().removeprefix(" " if name == "sentencepiece" else "") == text


def test_half_a_character_is_spelled_with_its_bytes() -> None:
    vocabulary = Vocabulary(make_tokenizer())
    assert vocabulary.spell(0xF0) == ("\ufffd", b"\xf0")
    assert vocabulary.spell(65) == ("A", b"A")
    assert vocabulary.spell(32) == (" ", b" ")
    assert vocabulary.spell(258) == ("<|im_end|>", b"<|im_end|>")


def test_bytes_that_never_become_a_character_are_not_held_for_ever() -> None:
    tokenizer = make_tokenizer()
    stream = TextStream(Vocabulary(tokenizer), [])
    ids = [0x80] * 100 + list("ü".encode())
    shown = [stream.push(token) for token in ids]
    assert len(stream._ids) < 30
    assert "".join(shown) + stream.flush() == tokenizer.backend_tokenizer.decode(ids)
    assert "".join(shown).endswith("ü")


def test_special_tokens_have_text_where_that_is_asked_for() -> None:
    vocabulary = Vocabulary(make_tokenizer())
    for special, wanted in ((False, "a\u20acb"), (True, "a<|im_start|>\u20ac<|endoftext|>b")):
        stream = TextStream(vocabulary, [70, 257], special=special)
        ids = [97, 257, *"\u20ac".encode(), 256, 98]
        assert "".join(stream.push(token) for token in ids) + stream.flush() == wanted
    stream = TextStream(vocabulary, [70], ("<|im_end|>",), special=True)
    assert stream.push(97) + stream.push(258) == "a"
    assert stream.stopped == "<|im_end|>"
