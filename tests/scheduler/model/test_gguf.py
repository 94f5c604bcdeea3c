"""GGUF files as models of the engine: tokens as of a forward from scratch, the tokenizer, and errors in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from gguf_kit import Q4_0, Q8_0, store, write_file
from gguf_loaded import rewritten
from gguf_metadata import metadata_of
from gguf_models import written
from loaded_kit import check_generated, load_quietly, reason
from tiny_models import TEMPLATE
from transformers import AutoModelForCausalLM, AutoTokenizer

from scheduler.accel.gpu.device_weight import device_weight_of
from scheduler.accel.gpu.quantised_modules import move_packed
from scheduler.model import gguf
from scheduler.model.loader import fingerprint
from scheduler.weights.gguf.tokenizer import read_gguf_tokenizer
from server import torchless

DEMO = Path(__file__).resolve().parents[3] / "server" / "demo"
EMBEDDINGS = torch.zeros(288, 64)
PROMPTS = [[(7 * i + 3) % 250 for i in range(40)], list(range(10, 21)), [*range(30, 70), 5, 6, 7]]


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("label", "kind"),
    [
        ("llama", Q4_0),
        ("qwen2", Q8_0),
        ("qwen3moe", Q8_0),
        ("gemma2", Q8_0),
        ("afmoe", Q4_0),
        ("apertus", Q4_0),
        ("dots1", Q8_0),
        ("ernie4_5-moe", Q8_0),
        ("hunyuan-dense", Q4_0),
        ("exaone-moe", Q8_0),
        ("chatglm", Q8_0),
        ("phi2", Q8_0),
        ("cohere2moe", Q4_0),
        ("dbrx", Q4_0),
        ("granite_swa", Q4_0),
        ("granite_swa experts", Q8_0),
        ("granitemoe shared", Q4_0),
        ("hy_v3", Q4_0),
        ("hy_v4", Q8_0),
        ("laguna", Q4_0),
        ("laguna whole", Q8_0),
        ("mellum", Q8_0),
        ("exaone", Q4_0),
        ("phimoe", Q4_0),
        ("llama4", Q8_0),
        ("qwen4exp", Q8_0),
        ("minimax-m3", Q8_0),
        ("kimi-linear", Q8_0),
        ("bailingmoe3", Q4_0),
        ("mimo2", Q4_0),
        ("internlm2", Q4_0),
        ("minicpm", Q8_0),
        ("olmo", Q4_0),
        ("orion", Q8_0),
        ("qwen", Q4_0),
        ("hrm_text", Q4_0),
        ("bitnet", Q4_0),
        ("hunyuan_vl", Q8_0),
        ("jais2", Q8_0),
        ("gptneox", Q4_0),
        ("mpt", Q8_0),
        ("starcoder", Q8_0),
        ("hunyuan-moe", Q4_0),
        ("jamba", Q8_0),
        ("jamba dense", Q4_0),
        ("granitehybrid", Q8_0),
        ("granitehybrid dense", Q4_0),
        ("granitehybrid rotary", Q8_0),
        ("falcon-h1", Q4_0),
        ("nemotron_h", Q4_0),
        ("nemotron_h_moe latent", Q8_0),
        ("lfm2moe", Q8_0),
        ("mistral3", Q4_0),
        ("qwen3vlmoe", Q8_0),
        ("gemma3n", Q8_0),
        ("gemma4", Q8_0),
        ("gemma4 experts", Q4_0),
        ("qwen3next", Q8_0),
        ("qwen35", Q4_0),
        ("qwen35moe", Q8_0),
        ("glm4moe", Q4_0),
        ("deepseek2", Q8_0),
        ("deepseek2 growing", Q8_0),
        ("deepseek32", Q8_0),
        ("deepseek4", Q8_0),
        ("dots3note", Q8_0),
        ("glm-dsa", Q4_0),
        ("minicpm3", Q8_0),
        ("mistral4", Q4_0),
    ],
)
def test_greedy_tokens_are_those_of_the_dequantised_weights(label: str, kind: int, tmp_path: Path) -> None:
    path, want = written(tmp_path / "x.gguf", label, kind)
    loaded = load_quietly(path)
    assert loaded.eos_token_ids == (258,)
    assert loaded.context == 256
    check_generated(loaded, PROMPTS, 12, want)


def test_on_another_device_than_a_cpu_weights_stay_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, want = written(tmp_path / "x.gguf", "llama", Q4_0)
    monkeypatch.setattr(gguf, "move_packed", lambda model, device: move_packed(model, torch.device("cpu")))
    model, _ = gguf.read_model(path, gguf.read_config(path), AutoModelForCausalLM, None, {}, torch.device("cuda"))
    assert sum(device_weight_of(weight) is not None for weight in model.parameters()) == 16
    ids = torch.tensor(PROMPTS[:1])
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, want(ids).logits)


def test_files_have_fingerprints_of_their_own(tmp_path: Path) -> None:
    path, _ = written(tmp_path / "x.gguf", "llama", Q8_0)
    other, _ = written(tmp_path / "y.gguf", "llama", Q4_0)
    first = fingerprint(load_quietly(path))
    assert fingerprint(load_quietly(path)) == first != fingerprint(load_quietly(other))
    tokens = [*metadata_of("llama")["tokenizer.ggml.tokens"][:-1], "<fim_pad>"]
    ended = load_quietly(rewritten(path, "llama", {}, **{"tokenizer.ggml.tokens": tokens}))
    assert ended.eos_token_ids == (258, len(tokens) - 1)
    assert fingerprint(ended) == first  # KV does not depend on where replies end


@pytest.mark.parametrize(
    ("own", "generation", "ends"),
    [
        (None, None, (258, 5)),
        (7, None, (7, 258, 5)),
        ([7, 5], {"temperature": 0.5}, (7, 5, 258)),
        (7, {"eos_token_id": 9}, (9, 258)),  # the second is the tokenizer's own
        (None, {"eos_token_id": [9, 8]}, (9, 8, 258)),
    ],
)
def test_ends_of_the_vocabulary_end_replies_unless_a_generation_config_beside_the_file_says_which(
    own: int | list[int] | None, generation: dict[str, object] | None, ends: tuple[int, ...], tmp_path: Path
) -> None:
    path, want = written(tmp_path / "x.gguf", "llama", Q8_0)
    tokens = list(metadata_of("llama")["tokenizer.ggml.tokens"])
    tokens[5] = "<|im_end|>"
    path = rewritten(path, "llama", {}, **{"tokenizer.ggml.tokens": tokens})
    if own is not None:
        (tmp_path / "config.json").write_text(json.dumps({**want.config.to_dict(), "eos_token_id": own}))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert load_quietly(path).eos_token_ids == ends


def test_the_tokenizer_in_the_file(tmp_path: Path) -> None:
    path = write_file(tmp_path / "x.gguf", metadata_of("llama"), {})
    tokenizer = read_gguf_tokenizer(path)
    text = "<|im_start|>user\nÜber 42?<|im_sep|>"
    assert tokenizer.encode(text) == [256, *b"user\n\xc3\x9cber 42?", 257]
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.chat_template == TEMPLATE
    assert (tokenizer.eos_token, tokenizer.pad_token, tokenizer.bos_token) == ("<|endoftext|>", "<|im_start|>", None)
    again = torchless.read_tokenizer(str(path))  # in a process without torch
    assert (again.encode(text), again.chat_template) == (tokenizer.encode(text), TEMPLATE)
    assert (again.eos_token, again.pad_token, again.bos_token) == ("<|endoftext|>", "<|im_start|>", None)


@pytest.mark.parametrize("architecture", ["gemma3", "gemma3n"])
def test_words_of_spaces_are_spelled_as_they_are_merged(architecture: str, tmp_path: Path) -> None:
    """In sentencepiece's vocabularies of these, whose merges are in the order of the tokens."""
    words = ["<pad>", "<eos>", "<bos>", "<unk>", "  ", "    ", "ab", "abc", "a", "b", "c", "\u2581"]
    said = {
        "general.architecture": architecture,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": words,
        "tokenizer.ggml.scores": [float(-number) for number in range(len(words))],
        "tokenizer.ggml.token_type": [3, 3, 3, 2, *[1] * (len(words) - 4)],
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.add_bos_token": True,
    }
    tokenizer = read_gguf_tokenizer(write_file(tmp_path / "x.gguf", said, {}))
    assert tokenizer.encode("abc    ab c", add_special_tokens=False) == [7, 5, 6, 11, 10]


def test_a_tokenizer_beside_the_file_wins(tmp_path: Path) -> None:
    own = AutoTokenizer.from_pretrained(DEMO)
    path = write_file(tmp_path / "x.gguf", metadata_of("llama"), {})
    own.save_pretrained(tmp_path)
    text = "How far is the moon?"
    assert read_gguf_tokenizer(path).encode(text) == own.encode(text)
    assert read_gguf_tokenizer(path).chat_template == own.chat_template


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"tokenizer.ggml.tokens": []}, "there is no tokenizer in the file or beside it"),
        ({"tokenizer.ggml.model": "unheard-of"}, "the tokenizer in the file is of an unknown kind or damaged"),
        ({"tokenizer.ggml.merges": ["a"]}, "the tokenizer in the file is of an unknown kind or damaged"),
        ({"general.architecture": "unheard-of"}, "its architecture is not one of afmoe, apertus, arcee"),
    ],
)
def test_what_cannot_be_loaded_is_told_in_a_line(change: dict[str, object], told: str, tmp_path: Path) -> None:
    path = write_file(tmp_path / "x.gguf", {**metadata_of("llama"), **change}, {"token_embd.weight": store(EMBEDDINGS)})
    assert told in reason(path)
