"""Tokenizers of GGUF files: how they split text, for every name of a split that llama.cpp knows, and first spaces."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gguf_kit import byte_tokens, write_file
from transformers import AutoTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from scheduler.weights.gguf.header import GgufError
from scheduler.weights.gguf.splits import _NAMES
from scheduler.weights.gguf.tokenizer import read_gguf_tokenizer

# A text, and its pieces for each name as llama.cpp's own code makes them. Where that only comes near to the expression
# of the model's tokenizer.json (tekken, gpt-4o, tiny_aya, youtu, kimi-k2, afmoe and the like), as that does.
SPLITS: dict[str, Any] = json.loads(Path(__file__).with_name("splits.json").read_text())
PIECES = {name: row["pieces"].split("|") for row in SPLITS["rows"] for name in row["names"].split()}

IGNORE_MERGES = (
    *("minicpm5", "llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
    *("jina-v5-nano", "youtu", "glm4", "glm5", "tekken", "granite-embed-multi-97m"),
)

BEGUN = (
    *("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano"),
    *("tekken", "chameleon"),
)


def _read(folder: Path, called: Any = None, **changes: Any) -> Any:
    said = {"general.architecture": "llama", "general.name": called, **byte_tokens()}
    said |= {f"tokenizer.ggml.{name}": value for name, value in changes.items()}
    return read_gguf_tokenizer(
        write_file(folder / "x.gguf", {name: value for name, value in said.items() if value is not None}, {})
    )


def _pieces(tokenizer: Any) -> list[str]:
    """The pieces of the text, whose bytes a byte-level vocabulary spells as letters."""
    bytes_of = {letter: byte for byte, letter in bytes_to_unicode().items()}
    found = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(SPLITS["text"])
    return [bytes(bytes_of[letter] for letter in piece).decode() for piece, _ in found]


@pytest.mark.parametrize("name", PIECES)
def test_text_is_split_as_the_file_says(name: str, tmp_path: Path) -> None:
    assert _pieces(_read(tmp_path, pre=name)) == PIECES[name]


def test_each_name_is_known_once() -> None:
    named = [name for names in _NAMES.values() for name in names.split()]
    assert sorted(named) == sorted(PIECES)
    assert PIECES.keys() >= GGUF_PRE_TOKENIZER_SPLITS.keys()


@pytest.mark.parametrize("name", [None, ""])
def test_a_file_that_does_not_say_has_the_default_split(name: str | None, tmp_path: Path) -> None:
    assert _pieces(_read(tmp_path, pre=name)) == PIECES["default"]


def test_merges_do_not_go_beyond_a_piece(tmp_path: Path) -> None:
    newline = bytes_to_unicode()[10]
    tokens = [*byte_tokens()["tokenizer.ggml.tokens"], f".{newline}", "12"]
    said = {"tokens": tokens, "merges": [f". {newline}", "1 2"], "token_type": [1] * len(tokens)}
    text = "e.\n12"
    assert _read(tmp_path, pre="glm4", **said).tokenize(text) == ["e", f".{newline}", "12"]
    assert _read(tmp_path, pre="hunyuan", **said).tokenize(text) == ["e", f".{newline}", "1", "2"]
    assert _read(tmp_path, pre="smollm", **said).tokenize(text) == ["e", ".", newline, "1", "2"]


THREES = [
    ("afmoe", "12 34567a 890²", "12|Ġ|34|567|a|Ġ|8|90²"),
    ("superbpe", "12 34567a 890²345", "12|Ġ|34|567|aĠ|890²|345"),
    ("tiny_aya", "12 34567a 890²345  1234_", "12|Ġ|345|67|a|Ġ|890|²|345|Ġ|Ġ|123|4|_"),
]


@pytest.mark.parametrize(("name", "text", "pieces"), THREES)
def test_digits_are_split_into_threes_from_the_right(name: str, text: str, pieces: str, tmp_path: Path) -> None:
    """Of tiny_aya only where a word ends with them. To look ahead from each three of so many would take minutes."""
    split = _read(tmp_path, pre=name).backend_tokenizer.pre_tokenizer
    assert [piece for piece, _ in split.pre_tokenize_str(text)] == pieces.replace("²", "Â²").split("|")
    assert len(split.pre_tokenize_str("1" * 300_001)) == 100_001


@pytest.mark.parametrize("name", PIECES)
def test_a_piece_that_is_a_token_is_not_merged_where_llama_cpp_says_so(name: str, tmp_path: Path) -> None:
    """The word "hello" is a token, and merges lead to others: ``ignore_merges`` of src/llama-vocab.cpp."""
    tokens = [*byte_tokens()["tokenizer.ggml.tokens"], "he", "ll", "hello"]
    said = {"tokens": tokens, "merges": ["h e", "l l"], "token_type": [1] * len(tokens)}
    tokenizer = _read(tmp_path, pre=name, **said)
    tokenizer.save_pretrained(tmp_path)
    want = ["hello"] if name in IGNORE_MERGES else ["he", "ll", "o"]
    for each in (tokenizer, AutoTokenizer.from_pretrained(tmp_path)):  # the second as the server reads it
        assert each.tokenize("hello") == want


@pytest.mark.parametrize("name", PIECES)
@pytest.mark.parametrize("said", [None, True, False])
def test_texts_begin_with_the_token_for_that_as_the_file_says_or_else_as_its_split(
    name: str, said: bool | None, tmp_path: Path
) -> None:
    """``add_bos`` of src/llama-vocab.cpp. Chats, which are read without it, have what their template writes."""
    tokenizer = _read(tmp_path, pre=name, bos_token_id=256, add_bos_token=said)
    begun = name in BEGUN if said is None else said
    assert tokenizer.encode("a") == ([256, 97] if begun else [97])
    assert tokenizer.encode("a", add_special_tokens=False) == [97]


@pytest.mark.parametrize("said", [None, True, False])
def test_gemma_4_begins_texts_whatever_the_file_says(said: bool | None, tmp_path: Path) -> None:
    read = {"tokens": ["<pad>", "<eos>", "<bos>", "<unk>", "a"], "token_type": [3, 3, 3, 2, 1], "eos_token_id": 1}
    tokenizer = _read(tmp_path, model="gemma4", bos_token_id=2, add_bos_token=said, **read)
    assert tokenizer.encode("a<eos>") == [2, 4, 1]


@pytest.mark.parametrize("said", [None, True, False])
def test_texts_of_t5_end_with_the_token_for_that_unless_the_file_says_otherwise(
    said: bool | None, tmp_path: Path
) -> None:
    read = {"tokens": ["<pad>", "</s>", "<unk>", "▁", "a"], "scores": [0.0, 0.0, 0.0, -1.0, -1.0], "eos_token_id": 1}
    tokenizer = _read(tmp_path, model="t5", token_type=[3, 3, 2, 1, 1], add_eos_token=said, unknown_token_id=2, **read)
    assert tokenizer.encode("a") == ([3, 4] if said is False else [3, 4, 1])


def test_a_file_without_a_token_for_begins_has_none(tmp_path: Path) -> None:
    assert _read(tmp_path, pre="llama-bpe").encode("a") == [97]


@pytest.mark.parametrize("name", [*SPLITS["refused"], "unheard-of"])
def test_an_unknown_split_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(GgufError, match=rf"\({name}\) is unknown: put the model's tokenizer\.json beside the file"):
        _read(tmp_path, pre=name)


def test_a_tokenizer_beside_a_file_of_an_unknown_split(tmp_path: Path) -> None:
    own = _read(tmp_path, pre="glm4")
    own.save_pretrained(tmp_path)
    assert _pieces(_read(tmp_path, pre="unheard-of")) == PIECES["glm4"]


def test_special_tokens_have_the_ids_of_the_file(tmp_path: Path) -> None:
    """Also those with letters that stand for no byte, such as DeepSeek's. No token is added to the vocabulary."""
    words = ["<｜begin▁of▁sentence｜>", "<｜User｜>", "   ", "<unk>"]
    tokens = [*byte_tokens()["tokenizer.ggml.tokens"][:256], *words]
    named = {"bos_token_id": 256, "eos_token_id": None, "padding_token_id": None, "add_bos_token": True}
    tokenizer = _read(tmp_path, pre="deepseek-llm", tokens=tokens, token_type=[1] * 256 + [3, 3, 4, 2], **named)
    tokenizer.save_pretrained(tmp_path)
    for each in (tokenizer, AutoTokenizer.from_pretrained(tmp_path)):  # the second as the server reads it
        assert len(each) == len(tokens)
        text = "<｜User｜>é   x<unk><|endoftext|></s>"
        ids = each.encode(text)
        assert ids == [256, 257, *b"\xc3\xa9", 258, *b"x", 259, *b"<|endoftext|></s>"]
        assert each.decode(ids[1:]) == text
        assert each.decode(ids, skip_special_tokens=True) == "é   x<|endoftext|></s>"


@pytest.mark.parametrize(
    ("words", "kinds", "whole", "hidden"),
    [
        ("<|im_end|> <|user|>", [1, 1], "<|im_end|>", "<|im_end|>"),
        ("<|im_end|> </s>", [4, 3], "<|im_end|> </s>", "<|im_end|> </s>"),
        ("</s> <s> <EOT>", [1, 1, 4], "<EOT>", ""),  # Qwen's vocabulary has the first for a word of text
        ("[PAD] [EOS] <PAD> <REPO> <eos>", [1, 1, 1, 1, 1], "", ""),
        ("<|tool_response> </s>", [4, 1], "<|tool_response>", ""),  # Gemma 4's
        ("<fim_prefix> <|file_sep|>", [1, 1], "<|file_sep|>", "<|file_sep|>"),
        ("<｜fim▁hole｜> <｜User｜>", [5, 1], "<｜fim▁hole｜>", "<｜fim▁hole｜>"),
        *(
            (words, [kind] * 8, words, words)
            for words in ("<|return|> <|call|> <|end|> <|start|> <|channel|> <|message|> <|constrain|> <|flush|>",)
            for kind in (1, 3)  # gpt-oss's are alike
        ),
        ("<|user|> <think> <unk>", [3, 4, 2], "<|user|> <think> <unk>", "<|user|> <unk>"),
    ],
)
def test_words_at_which_replies_end_are_special_of_whatever_type(
    words: str, kinds: list[int], whole: str, hidden: str, tmp_path: Path
) -> None:
    """If they are spelled as such ones, so that a template's are one token. llama.cpp makes others too, as ``</s>``."""
    tokens = [*byte_tokens()["tokenizer.ggml.tokens"][:256], *words.split()]
    named = {"eos_token_id": None, "padding_token_id": None}
    tokenizer = _read(tmp_path, pre="qwen2", tokens=tokens, token_type=[1] * 256 + kinds, **named)
    for number, word in enumerate(words.split(), 256):
        assert tokenizer.encode(f"a{word}") == [97, *([number] if word in whole.split() else word.encode())]
        assert tokenizer.decode([number], skip_special_tokens=True) == ("" if word in hidden.split() else word)


@pytest.mark.parametrize("name", ["bos", "eos", "eot", "eom", "unknown", "padding", "fim_pre", "fim_rep"])
@pytest.mark.parametrize("word", ["</s>", "[OTHER]", "▁<PRE>", "<other>"])
def test_a_word_that_the_metadata_names_is_special_of_whatever_type(name: str, word: str, tmp_path: Path) -> None:
    tokens = [*byte_tokens()["tokenizer.ggml.tokens"][:256], word, "<fim_prefix>"]
    said = {"eos_token_id": None, "padding_token_id": None, f"{name}_token_id": 256, "add_bos_token": False}
    tokenizer = _read(tmp_path, tokens=tokens, token_type=[1] * 258, **said)
    assert tokenizer.encode(f"a{word}<fim_prefix>") == [97, 256, *b"<fim_prefix>"]
    assert tokenizer.decode([97, 256], skip_special_tokens=True) == "a"
    called = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}.get(name)
    assert called is None or getattr(tokenizer, called) == word


@pytest.mark.parametrize(
    ("first", "want"),
    [
        (("<unk>", "<s>", "</s>"), ("<s>", "</s>", "<unk>")),
        (("<|pad|>", "<|startoftext|>", "<|endoftext|>"), ("<|startoftext|>", "<|endoftext|>", None)),
        (("<pad>", "<eos>", "<bos>"), (None, None, None)),  # Gemma's
    ],
)
def test_special_tokens_that_a_file_does_not_name(
    first: tuple[str, ...], want: tuple[str | None, ...], tmp_path: Path
) -> None:
    """llama.cpp's places for them, if the words there are such."""
    tokenizer = _of_sentencepiece(tmp_path, "llama", None, *first, named=False)
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token) == want
    assert tokenizer.encode("hi") == [*([1] if want[0] else []), 263]


@pytest.mark.parametrize("word", ["<|endoftext|>", ","])
def test_special_tokens_that_a_byte_level_file_does_not_name(word: str, tmp_path: Path) -> None:
    """llama.cpp takes token 11, which is Falcon's <|endoftext|>, and a comma of most."""
    tokens = [f"<|{number}|>" for number in range(11)] + [word, "a"]
    tokenizer = _read(tmp_path, pre="falcon3", tokens=tokens, token_type=[1] * 13, eos_token_id=None)
    found = word if word != "," else None
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token) == (found, found, None)
    assert tokenizer.encode("a") == ([11, 12] if found else [12])


@pytest.mark.parametrize("name", ["padding", "unknown", "bos", "eos"])
def test_a_named_token_that_is_an_ordinary_word_is_not_special(name: str, tmp_path: Path) -> None:
    """Such as the padding "!" of many files, 0: what is special is not shown of a reply."""
    said = {"padding_token_id": None, f"{name}_token_id": ord("!")}
    tokenizer = _read(tmp_path, **said)
    assert not {"!"} & {tokenizer.pad_token, tokenizer.unk_token, tokenizer.bos_token, tokenizer.eos_token}
    assert tokenizer.decode(tokenizer.encode("Hi!"), skip_special_tokens=True) == "Hi!"


@pytest.mark.parametrize("name", ["Phi3", "Phi-3.5-mini-instruct", "Phi 3 Mini 4k Instruct", "Phi 4 Mini", None])
def test_spaces_behind_special_tokens_of_phi_3_are_taken_away(name: str | None, tmp_path: Path) -> None:
    """As its own tokenizer does, and llama.cpp, which finds it by its name."""
    words = ["<|user|>", "<|end|>", "<s>", "<|endoftext|>"]
    said = {"tokens": [*byte_tokens()["tokenizer.ggml.tokens"][:256], *words], "token_type": [1] * 256 + [3] * 4}
    tokenizer = _read(tmp_path, **said, eos_token_id=None, padding_token_id=None, called=name)
    space = [] if name is not None and "3" in name else [*b" \n "]
    ids = [256, *space, 97, 32, 257, *space, 258, 32, 259, 32]
    assert tokenizer.encode("<|user|> \n a <|end|> \n <s> <|endoftext|> ", add_special_tokens=False) == ids


def test_a_vocabulary_of_pieces_gets_no_token_that_it_has_not(tmp_path: Path) -> None:
    tokenizer = _of_sentencepiece(tmp_path, "jamba", None, "<|unk|>", "<|begin|>", "<|end|>")
    assert len(tokenizer) == len(tokenizer.backend_tokenizer.get_vocab()) == 266
    assert tokenizer.encode("<|unk|><|end|></s>")[:3] == [1, 0, 2]


def _of_sentencepiece(
    folder: Path,
    architecture: str,
    added: bool | None,
    *first: str,
    named: bool = True,
    marks: tuple[str, ...] = (),
    kind: int = 3,
) -> Any:
    """A tokenizer of a few words, of all bytes, and of ``marks`` of a type."""
    first = first or ("<unk>", "<s>", "</s>")
    words = [*first, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "h", "i", "hi", "▁hi", "▁▁"]
    said: dict[str, Any] = {
        "general.architecture": architecture,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [*words, "<think>", *marks],
        "tokenizer.ggml.scores": [0.0] * 259 + [-10.0, -11.0, -12.0, -1.0, -2.0, -0.5, 0.0] + [-9.0] * len(marks),
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * 6 + [4] + [kind] * len(marks),
    }
    if named:
        said |= {f"tokenizer.ggml.{name}_token_id": number for number, name in enumerate(("unknown", "bos", "eos"))}
    if added is not None:
        said["tokenizer.ggml.add_space_prefix"] = added
    return read_gguf_tokenizer(write_file(folder / "x.gguf", said, {}))


# A text, and its tokens as llama.cpp reads it with a space before texts, and without one.
SPACES = [
    ("hi hi", "▁hi ▁hi", "hi ▁hi"),
    (" hi", "▁▁ hi", "▁hi"),
    ("  hi", "▁▁ ▁hi", "▁▁ hi"),
    (" ", "▁▁", "▁"),
    ("", "", ""),
    ("</s>hi", "</s> ▁hi", "</s> hi"),
    (" </s> hi</s>", "▁▁ </s> ▁▁ hi </s>", "▁ </s> ▁hi </s>"),
    ("hi</s></s>hi hi", "▁hi </s> </s> ▁hi ▁hi", "hi </s> </s> hi ▁hi"),
    ("<think>hi <think>", "<think> ▁hi ▁ <think>", "<think> hi ▁ <think>"),
]


@pytest.mark.parametrize("architecture", ["jamba", "phi3"])
@pytest.mark.parametrize("added", [None, True, False])
def test_a_space_is_put_before_a_text_unless_the_file_says_otherwise(
    architecture: str, added: bool | None, tmp_path: Path
) -> None:
    """Also where there is one, and after each special token."""
    tokenizer = _of_sentencepiece(tmp_path, architecture, added)
    tokenizer.save_pretrained(tmp_path)
    for each in (tokenizer, AutoTokenizer.from_pretrained(tmp_path)):  # the second as the server reads it
        for text, with_it, without in SPACES:
            assert each.tokenize(text) == (without if added is False else with_it).split()
        for text in ("hi hi", " hi", "  hi ", "é hi"):
            assert each.decode(each.encode(text, add_special_tokens=False)) == text
        assert each.encode("hi")[0] == 1


@pytest.mark.parametrize("added", [None, True, False])
def test_gemma_has_no_space_before_a_text_unless_the_file_says_so(added: bool | None, tmp_path: Path) -> None:
    tokenizer = _of_sentencepiece(tmp_path, "gemma3", added)
    assert tokenizer.tokenize(" hi</s>hi") == (["▁", "▁hi", "</s>", "▁hi"] if added else ["▁hi", "</s>", "hi"])


def test_mistral_s_marks_have_no_space_behind_them(tmp_path: Path) -> None:
    """As the tokenizer.json of its models from v2 on, and not llama.cpp. Those before have no tokens for them."""
    texts = {
        "hi hi": "▁hi ▁hi",
        " hi": "▁hi",
        "  hi": "▁▁ hi",
        "": "",
        "<s>[INST] hi[/INST] hi hi</s>[INST]hi[/INST]": "<s> [INST] ▁hi [/INST] ▁hi ▁hi </s> [INST] hi [/INST]",
    }
    tokenizer = _of_sentencepiece(tmp_path, "llama", None, marks=("[INST]", "[/INST]"))
    tokenizer.save_pretrained(tmp_path)
    for each in (tokenizer, AutoTokenizer.from_pretrained(tmp_path)):  # the second as the server reads it
        for text, want in texts.items():
            assert each.tokenize(text) == want.split()
        assert each.decode(each.encode("hi hi", add_special_tokens=False)) == "hi hi"
    other = tmp_path / "other"  # where no tokenizer is beside the file
    other.mkdir()
    without = _of_sentencepiece(other, "llama", False, marks=("[INST]", "[/INST]"))
    assert without.tokenize("hi[INST] hi") == ["hi", "[INST]", "▁hi"]
    text = _of_sentencepiece(other, "llama", None, marks=("[INST]", "[/INST]"), kind=1)
    assert text.tokenize("</s> hi") == ["</s>", "▁▁", "hi"]


@pytest.mark.parametrize("architecture", ["gemma", "gemma2", "gemma3", "gemma3n"])
def test_words_of_spaces_of_gemma_that_are_typed_add_no_token(architecture: str, tmp_path: Path) -> None:
    """The file spells them with spaces, and what merges lead to with letters for these."""
    tokenizer = _of_sentencepiece(tmp_path, architecture, None, marks=("   ",), kind=4)
    assert len(tokenizer) == len(tokenizer.backend_tokenizer.get_vocab()) == 267
    assert "▁▁▁" in tokenizer.get_vocab()
    assert tokenizer.tokenize("hi   ") == ["hi", "▁▁▁"]


@pytest.mark.parametrize("kind", [1, 3, 4, 5])
def test_sentinels_of_t5_are_tokens_of_their_own(kind: int, tmp_path: Path) -> None:
    tokens = ["<pad>", "</s>", "<unk>", "▁", "a", "▁a", *(f"[PAD{number}]" for number in range(6, 108))]
    said = {"tokens": tokens, "scores": [0.0] * 3 + [-1.0] * 3 + [-1000.0] * 102, "eos_token_id": 1}
    types = [3, 3, 2, 1, 1, 1] + [kind] * 102
    tokenizer = _read(tmp_path, model="t5", token_type=types, unknown_token_id=2, padding_token_id=0, **said)
    ids = tokenizer.encode("a <extra_id_0> a<extra_id_99>")
    assert (ids, len(tokenizer)) == ([5, 105, 5, 6, 1], len(tokens))
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a a"


DAMAGE = {
    "token_type": 3,
    "tokens": [["a"], ["b"]],
    "pre": ["qwen2"],
    "merges": ["nowhere a"],
}


@pytest.mark.parametrize("name", DAMAGE)
def test_metadata_of_another_type_is_told_of(name: str, tmp_path: Path) -> None:
    with pytest.raises(GgufError, match="the tokenizer in the file is of an unknown kind or damaged"):
        _read(tmp_path, **{name: DAMAGE[name]})


def test_a_template_that_is_no_text_is_told_of(tmp_path: Path) -> None:
    said = {"general.architecture": "llama", **byte_tokens(), "tokenizer.chat_template": ["a", "b"]}
    with pytest.raises(GgufError, match="the chat template in the file is not a text"):
        read_gguf_tokenizer(write_file(tmp_path / "x.gguf", said, {}))


def test_vocabularies_that_lack_something_are_told_of(tmp_path: Path) -> None:
    said = {"eos_token_id": None, "padding_token_id": None, "token_type": [1, 1, 1, 1]}
    with pytest.raises(GgufError, match="the tokenizer in the file is of an unknown kind or damaged"):
        _read(tmp_path, model="t5", tokens=["<pad>", "</s>", "<unk>", "a"], scores=[0.0], **said)
    with pytest.raises(GgufError, match="the vocabulary in the file has no <unk>"):
        _read(tmp_path, model="gemma4", tokens=["a", "b", "c", "d"], **said)
