"""Measures what loading a packed model takes: ``PYTHONPATH=.:tests python -m tools.load_memory [FORMAT ...]``.

For each format a random model of about 500 MB is written, and loaded on the CPU by a process of its own, which has
loaded a tiny one of the same kind before: what Python and the libraries take is there by then. What the process has
then, and what it had at most, is compared with the file. CPU seconds of loading stand beside those of reading the file.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from gguf_kit import F32, Stored, byte_tokens, store, write_file
from packed_models import CASES, CONFIGS, FP8, fp8, write_case
from safetensors.torch import load_file, save_file

from tools.tables import table

_SHAPES: dict[str, dict[str, int]] = {
    "llama": {"hidden_size": 2048, "intermediate_size": 4096, "num_attention_heads": 16, "num_key_value_heads": 4},
    "qwen3_moe": {"hidden_size": 1024, "moe_intermediate_size": 512, "num_experts": 32, "num_attention_heads": 8},
    "gpt_oss": {"hidden_size": 1024, "intermediate_size": 1024, "num_local_experts": 16, "num_attention_heads": 8},
}
_ARCHITECTURES = {"mxfp4": "gpt_oss", "fp8 of qwen": "qwen3_moe"}  # of the others: llama
_BYTES = 500e6
CASES["fp8"] = "llama", partial(fp8, rows=128, columns=128), FP8 | {"weight_block_size": [128, 128]}
_FORMATS = ("GGUF Q4_K", "GGUF Q6_K", "GGUF Q8_0", "GPTQ", "AWQ", "compressed-tensors", "fp8", "mxfp4", "nf4")
_TYPES = {"Q4_K": (12, 256, 144), "Q6_K": (14, 256, 210), "Q8_0": (8, 32, 34)}  # number, elements, bytes of a block
_LOAD = """
import gc, json, sys, time
from scheduler.engine_config import EngineConfig
from scheduler.model.loader import load
def status(name):
    line = next(line for line in open("/proc/self/status") if line.startswith(name))
    return int(line.split()[1]) * 1024
def loaded(model):
    return load(EngineConfig("", model, device="cpu", dtype=sys.argv[3]), lambda _: None)
loaded(sys.argv[1])
gc.collect()
open("/proc/self/clear_refs", "w").write("5")
base, began = status("VmRSS"), time.process_time()
with open(sys.argv[2], "rb", buffering=0) as file:
    while file.read(1 << 20):
        pass
read, began = time.process_time() - began, time.process_time()
held = loaded(sys.argv[4])
spent = time.process_time() - began
gc.collect()
print(json.dumps([status("VmHWM") - base, status("VmRSS") - base, spent, read]))
"""


def write(folder: Path, name: str, large: bool) -> tuple[Path, Path]:
    """A model, tiny or of about ``_BYTES``: what is loaded, and the file of its weights."""
    if name.startswith("GGUF "):
        path = _write_gguf(folder / "model.gguf", name.removeprefix("GGUF "), large)
        return path, path
    architecture = _ARCHITECTURES.get(name, "llama")
    config = CONFIGS[architecture]()
    for key, value in {**(_SHAPES[architecture] if large else {}), "num_hidden_layers": 1}.items():
        setattr(config, key, value)
    config.head_dim = config.hidden_size // config.num_attention_heads
    if architecture == "gpt_oss":
        config.layer_types = ["full_attention"]
    write_case(folder, name, config)
    packed = folder / "packed"
    _repeat_layer(packed, _BYTES if large else 0)
    return packed, packed / "model.safetensors"


def _repeat_layer(packed: Path, size: float) -> None:
    """Give a checkpoint of one layer so many copies of it that it has about ``size`` bytes."""
    tensors = load_file(packed / "model.safetensors")
    mine = {name: tensor for name, tensor in tensors.items() if ".layers.0." in name}
    each = sum(tensor.nbytes for tensor in mine.values())
    count = max(1, round((size - sum(t.nbytes for t in tensors.values())) / each) + 1)
    for layer in range(1, count):
        tensors |= {name.replace(".layers.0.", f".layers.{layer}."): tensor.clone() for name, tensor in mine.items()}
    save_file(tensors, packed / "model.safetensors", {"format": "pt"})
    settings = json.loads((packed / "config.json").read_text()) | {"num_hidden_layers": count}
    if "layer_types" in settings:
        settings["layer_types"] *= count
    (packed / "config.json").write_text(json.dumps(settings))


def _write_gguf(path: Path, kind: str, large: bool) -> Path:
    """A llama whose products are of one type; in blocks of 256 a row has a whole number of them."""
    shape = _SHAPES["llama"] if large else {**_SHAPES["llama"], "hidden_size": 256, "intermediate_size": 256}
    hidden, inner, heads, pairs = shape.values()
    wide, vocabulary = hidden // heads, 4096 if large else 288
    sizes = {"attn_q": hidden, "attn_k": pairs * wide, "attn_v": pairs * wide, "attn_output": hidden}
    sizes |= {"ffn_gate": inner, "ffn_up": inner}
    each = {f"{name}.weight": (out, hidden) for name, out in sizes.items()} | {"ffn_down.weight": (hidden, inner)}
    made = {name: _random(kind, *size) for name, size in each.items()}
    made |= {f"{name}_norm.weight": store(torch.ones(hidden), F32) for name in ("attn", "ffn")}
    layers = max(1, round(_BYTES / sum(one.data.nbytes for one in made.values()))) if large else 1
    tensors = {"token_embd.weight": _random(kind, vocabulary, hidden), "output_norm.weight": store(torch.ones(hidden))}
    tensors |= {f"blk.{layer}.{name}": one for layer in range(layers) for name, one in made.items()}
    said = {"embedding_length": hidden, "feed_forward_length": inner, "block_count": layers, "context_length": 2048}
    said |= {"attention.head_count": heads, "attention.head_count_kv": pairs}
    metadata = {"general.architecture": "llama", "llama.attention.layer_norm_rms_epsilon": 1e-5}
    metadata |= {f"llama.{name}": value for name, value in said.items()}
    return write_file(path, metadata | byte_tokens(vocabulary), tensors)


def _random(kind: str, out: int, inside: int) -> Stored:
    """A weight of random codes, with values of about a fiftieth."""
    number, elements, size = _TYPES[kind]
    blocks = torch.randint(0, 256, (out * inside // elements, size), dtype=torch.uint8)
    if kind == "Q4_K":  # all fine scales and minima are 32
        blocks[:, :4] = _halves(1.4e-4, 7.5 * 1.4e-4)
        blocks[:, 4:16] = torch.tensor([160] * 8 + [0] * 4, dtype=torch.uint8)
    elif kind == "Q6_K":
        blocks[:, 192:208], blocks[:, 208:] = 32, _halves(3.4e-5)
    else:
        blocks[:, :2] = _halves(2.7e-4)
    return Stored(blocks.view(out, -1).numpy(), (out, inside), number, torch.empty(0))


def _halves(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers).half().view(torch.uint8)


def measured(name: str) -> Iterator[object]:
    """A row of the table."""
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        tiny, (large, file) = write(Path(first), name, False)[0], write(Path(second), name, True)
        size = file.stat().st_size
        dtype = "float32" if name.startswith("GGUF") else "bfloat16"
        command = [sys.executable, "-c", _LOAD, str(tiny), str(file), dtype, str(large)]
        ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    most, after, seconds, read = json.loads(ran.stdout.splitlines()[-1])
    yield from (name, f"{size / 1e6:.0f}", f"{most / 1e6:.0f} ({most / size:.2f})")
    yield from (f"{after / 1e6:.0f} ({after / size:.2f})", f"{seconds:.1f}", f"{read:.1f}")


def main(names: list[str]) -> None:
    """Print the table, of the formats named or of all."""
    rows = [list(measured(name)) for name in names or _FORMATS]
    head = "format | file, MB | at most, MB (by file) | after, MB (by file) | CPU s to load | to read the file"
    print(table(head, rows))


if __name__ == "__main__":
    main(sys.argv[1:])
