"""Checkpoints that need a library of their own: loaded and run right where it is there, told in a line where not.

Which of the libraries are installed is up to the machine; a file is made with the library that reads it.
"""

from __future__ import annotations

import json
import shutil
import struct
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from loaded_kit import generate, load_quietly, reason
from tiny_models import greedy
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, TorchAoConfig
from transformers.utils import import_utils

from scheduler import extras
from scheduler.model.load_errors import _EXTRAS
from scheduler.model.loader import fingerprint
from scheduler.model.weights import digest, stored_bytes

ROOT = Path(__file__).resolve().parents[3]
DEMO = ROOT / "server" / "demo"  # trained weights: what quantising leaves of it can be measured
IDS = [(7 * i + 3) % 1000 + 10 for i in range(40)]


# -- where the library is there -------------------------------------------------------------------------------------


def write_gguf(path: Path, quantised: str | None) -> Path:
    """The demo model as one GGUF file, in float32 or with its matrices quantised."""
    gguf = pytest.importorskip("gguf")
    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    config, tokenizer = model.config, Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([tokenizer.id_to_token(i) for i in range(config.vocab_size)])
    writer.add_token_types([3 if i < 3 else 1 for i in range(config.vocab_size)])
    writer.add_token_merges([" ".join(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]])
    writer.add_eos_token_id(config.eos_token_id)
    writer.add_chat_template((DEMO / "chat_template.jinja").read_text())
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, config.num_hidden_layers)
    kind = gguf.GGMLQuantizationType[quantised] if quantised is not None else None
    for name, tensor in model.state_dict().items():
        if name != "lm_head.weight":  # the embeddings again
            data, matrix = tensor.numpy(), kind is not None and tensor.ndim == 2
            stored = gguf.quants.quantize(data, kind) if matrix else data
            writer.add_tensor(names.get_name(name, (".weight", ".bias")), stored, raw_dtype=kind if matrix else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_as_it_is(folder: Path) -> Path:
    return write_gguf(folder / "demo.gguf", None)


def gguf_q8(folder: Path) -> Path:
    return write_gguf(folder / "demo.Q8_0.gguf", "Q8_0")


def save_with(folder: Path, scheme: Any) -> Path:
    """The demo model, quantised by transformers while it loads, saved again."""
    AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32, quantization_config=scheme).save_pretrained(folder)
    AutoTokenizer.from_pretrained(DEMO).save_pretrained(folder)
    return folder


def torchao_int8(folder: Path) -> Path:
    torchao = pytest.importorskip("torchao.quantization")
    return save_with(folder, TorchAoConfig(torchao.Int8WeightOnlyConfig(version=2)))


def bitsandbytes_4bit(folder: Path) -> Path:
    pytest.importorskip("bitsandbytes")
    return save_with(folder, BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4"))


def compressed_int8(folder: Path) -> Path:
    compressors = pytest.importorskip("compressed_tensors.compressors")
    library = pytest.importorskip("compressed_tensors.quantization")
    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    scheme = library.QuantizationScheme(
        targets=["Linear"], weights=library.QuantizationArgs(num_bits=8, strategy="channel")
    )
    settings = library.QuantizationConfig(
        config_groups={"all": scheme}, ignore=["lm_head"], quantization_status="frozen", format="int-quantized"
    )
    library.apply_quantization_config(model, settings)
    for module in model.modules():
        if hasattr(module, "weight_scale"):
            module.weight_scale.data = module.weight.detach().abs().amax(1, keepdim=True) / 127
    compressor = compressors.ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(str(folder))
    AutoTokenizer.from_pretrained(DEMO).save_pretrained(folder)
    return folder


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(("write", "least"), [(torchao_int8, 0.25), (bitsandbytes_4bit, 0.125)])
def test_quantised_weights_take_less(write: Callable[[Path], Path], least: float, tmp_path: Path) -> None:
    """Of float32; embeddings, norms and scales are not quantised."""
    loaded, original = load_quietly(write(tmp_path), dtype="float32"), load_quietly(DEMO, dtype="float32")
    assert loaded.parameters == original.parameters
    assert least < loaded.weight_bytes / original.weight_bytes < least + 0.4


@pytest.mark.filterwarnings("default")  # what those libraries deprecate is theirs
@pytest.mark.parametrize(
    ("write", "loss"),
    [(gguf_as_it_is, 1e-5), (gguf_q8, 0.05), (torchao_int8, 0.05), (compressed_int8, 0.05), (bitsandbytes_4bit, 0.4)],
)
def test_it_runs_like_a_forward_from_scratch(write: Callable[[Path], Path], loss: float, tmp_path: Path) -> None:
    path = write(tmp_path)
    loaded, original = load_quietly(path, dtype="float32"), load_quietly(DEMO, dtype="float32")
    assert loaded.verdict.mode.name == "packed"
    further = ["<|endoftext|>"] if write in (gguf_as_it_is, gguf_q8) else []  # a vocabulary's, as llama.cpp reads it
    assert loaded.eos_token_ids == (*original.eos_token_ids, *original.tokenizer.convert_tokens_to_ids(further))
    assert loaded.context == original.context
    assert loaded.tokenizer.chat_template == original.tokenizer.chat_template
    text = "<|im_start|>user\nMy name is Ann, I'm 42."
    assert loaded.tokenizer(text).input_ids == original.tokenizer(text).input_ids
    prompts = [IDS, IDS[:11], [*IDS, 5, 6, 7]]
    said = generate(loaded, prompts, 12)
    loaded.verdict.mode.remove()
    assert said == [greedy(loaded.model, *one) for one in zip(prompts, [12] * 3, said, strict=True)]
    original.verdict.mode.remove()
    tokens = torch.tensor([IDS])
    with torch.no_grad():
        got, want = loaded.model(tokens).logits, original.model(tokens).logits
    assert (got - want).norm() <= loss * want.norm()  # the same model, but for what quantising lost
    assert fingerprint(load_quietly(path, dtype="float32")) == fingerprint(loaded) != fingerprint(original)


def test_the_dtype_that_was_asked_for(tmp_path: Path) -> None:
    assert load_quietly(gguf_q8(tmp_path), dtype="bfloat16").model.dtype is torch.bfloat16


class Scaled(torch.Tensor):
    """Two tensors that stand for one, as quantised weights are kept."""

    data_and_scale: tuple[torch.Tensor, torch.Tensor]

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["stored", "scale"], None

    @property
    def stored(self) -> torch.Tensor:
        return self.data_and_scale[0]

    @property
    def scale(self) -> torch.Tensor:
        return self.data_and_scale[1]

    def reshape(self, *shape: Any) -> torch.Tensor:
        raise NotImplementedError


def scaled(stored: int, scale: float) -> torch.nn.Module:
    """A model of one such weight, which two names have, 4 bytes and a number for 100 parameters."""
    weight = torch.zeros(100).as_subclass(Scaled)
    weight.data_and_scale = torch.full((2, 2), stored, dtype=torch.int8), torch.tensor(scale)

    class Model(torch.nn.Module):
        config = type("Config", (), {"to_json_string": lambda self: "{}"})()

        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            return {"weight": weight, "tied": weight, "extra": None}

    return Model()


def test_a_weight_of_a_class_that_cannot_be_reshaped_has_a_digest() -> None:
    digests = [digest(scaled(*each)) for each in ((1, 0.5), (2, 0.5), (1, 0.25))]
    assert digest(scaled(1, 0.5)) == digests[0]
    assert len(set(digests)) == 3


def test_bytes_are_those_that_are_stored() -> None:
    assert stored_bytes(scaled(1, 0.5)) == 2 * 2 + 4
    plain = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.bfloat16)
    assert stored_bytes(plain) == 2 * plain.num_parameters()  # its embeddings are tied


# -- where it is not ------------------------------------------------------------------------------------------------

_TORCHAO = {"_type": "Int8WeightOnlyConfig", "_version": 2, "_data": {}}
_INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
SCHEMES: list[tuple[str, dict[str, Any]]] = [
    ("torchao", {"quant_method": "torchao", "quant_type": {"default": _TORCHAO}}),
    ("bitsandbytes", {"quant_method": "bitsandbytes", "load_in_4bit": True}),
    ("bitsandbytes", {"quant_method": "bitsandbytes", "load_in_8bit": True}),
    (
        "compressed-tensors",
        {
            "quant_method": "compressed-tensors",
            "format": "int-quantized",
            "config_groups": {"all": {"targets": ["Linear"], "weights": _INT8}},
            "quantization_status": "compressed",
        },
    ),
    ("gptq", {"quant_method": "gptq", "bits": 4, "group_size": 32}),
    ("gptq", {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}),
]


def quantised_as(folder: Path, scheme: dict[str, Any]) -> Path:
    """A copy of the demo model whose configuration says that it is quantised."""
    shutil.copytree(DEMO, folder, dirs_exist_ok=True)
    config = json.loads((DEMO / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": scheme}))
    return folder


def forget_what_is_installed() -> None:
    for name, function in vars(import_utils).items():
        if name.startswith("is_") and hasattr(function, "cache_clear"):
            function.cache_clear()


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """transformers finds none of the libraries, installed or not."""
    hidden = {"gguf", "torchao", "bitsandbytes", "compressed_tensors", "gptqmodel", "optimum"}
    real = import_utils._is_package_available

    def found(name: str, *args: Any, **kwargs: Any) -> Any:
        return (False, "N/A") if name in hidden else real(name, *args, **kwargs)

    monkeypatch.setattr(import_utils, "_is_package_available", found)
    for name in {*hidden, *(name for name in sys.modules if name.partition(".")[0] in hidden)}:
        monkeypatch.setitem(sys.modules, name, None)
    forget_what_is_installed()
    yield
    monkeypatch.undo()
    forget_what_is_installed()


def missing(path: Path, extra: str) -> str:
    return f"cannot load {str(path)!r}: a library is missing: {extras.install_command(extra)}"


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize(("extra", "scheme"), SCHEMES)
def test_the_line_names_the_extra(extra: str, scheme: dict[str, Any], tmp_path: Path) -> None:
    path = quantised_as(tmp_path, scheme)
    assert reason(path, dtype="float32") == missing(path, extra)


@pytest.mark.usefixtures("bare")
def test_the_line_of_a_gguf_file_that_only_transformers_reads(tmp_path: Path) -> None:
    key, value = b"general.architecture", b"t5"
    path = tmp_path / "tiny.gguf"
    text = struct.pack(f"<Q{len(key)}sIQ{len(value)}s", len(key), key, 8, len(value), value)
    path.write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + text)
    assert reason(path, dtype="float32") == missing(path, "gguf")


def test_every_extra_that_is_named_exists() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(_EXTRAS.values()) <= set(extras)


@pytest.mark.parametrize("scheme", [{"quant_method": "of-tomorrow"}, {}])
def test_a_scheme_that_nobody_knows_is_not_taken_for_plain_weights(scheme: dict[str, Any], tmp_path: Path) -> None:
    assert "quanti" in reason(quantised_as(tmp_path, scheme), dtype="float32")


@pytest.mark.parametrize("data", [b"", b"garbage" * 100, b"GGUF" + b"\0" * 64])
def test_a_broken_gguf_file(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(data)
    assert reason(path, dtype="float32").startswith(f"cannot load {str(path)!r}: ")
