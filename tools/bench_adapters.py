"""What LoRA adapters cost: ``python -m tools.bench_adapters [--ranks 8 16] [--sessions 16] [--adapters 8]``.

A model of llama-135m's shape with random adapters of each rank, on q and v and on all linear maps. All sessions decode
at once: with the base, with the adapters mixed, and, for comparison, the sessions of one adapter after those of
another; by turns. Prints a table: tokens per second of CPU of both server processes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from tools.random_model import make
from tools.running import Server, serving
from tools.tables import table

TARGETS = {"q, v": ("q_proj", "v_proj"), "all maps": ("_proj",)}
TOKENS = 64  # of a reply
HEAD = "maps | rank | sessions | base, tokens per CPU s | mixed | ratio | one adapter at a time | ratio"


def make_adapter(folder: Path, model: Path, targets: Sequence[str], rank: int, seed: int) -> None:
    """An adapter as peft writes it, with random halves, for the maps whose names end so."""
    with torch.device("meta"):
        shapes = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
    generator = torch.Generator().manual_seed(seed)
    tensors, names = {}, set()
    for name, module in shapes.named_modules():
        if isinstance(module, torch.nn.Linear) and name.endswith(tuple(targets)):
            down = torch.randn(rank, module.in_features, generator=generator) / math.sqrt(module.in_features)
            up = torch.randn(module.out_features, rank, generator=generator) / math.sqrt(100 * rank)
            tensors[f"base_model.model.{name}.lora_A.weight"] = down
            tensors[f"base_model.model.{name}.lora_B.weight"] = up
            names.add(name.split(".")[-1])
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": sorted(names), "bias": "none"}
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")


async def say(server: Server, model: str, number: int) -> int:
    """One reply; its tokens. SystemExit where it is refused."""
    body: dict[str, object] = {"messages": [{"role": "user", "content": f"Tell me about {number}."}], "model": model}
    body |= {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    answer = await server.client.post(f"{server.url}/v1/chat/completions", json=body)
    if answer.status_code != 200:
        raise SystemExit(f"{answer.status_code}: {answer.text[:300]}")
    return int(answer.json()["usage"]["completion_tokens"])


async def measure(server: Server, groups: Sequence[Sequence[str]]) -> float:
    """Tokens per CPU second of groups of replies, one group after the other; each name is a reply's model."""
    began, tokens = server.cpu(), 0
    for group in groups:
        tokens += sum(await asyncio.gather(*(say(server, model, number) for number, model in enumerate(group))))
    return tokens / (server.cpu() - began)


async def bench(server: Server, names: Sequence[str], sessions: int, rounds: int) -> list[object]:
    """The figures of a row: medians of rounds, by turns."""
    mixed = [names[number % len(names)] for number in range(sessions)]
    separate = [[name] * mixed.count(name) for name in dict.fromkeys(mixed)]
    async with server.client:
        base = (await server.client.get(f"{server.url}/v1/models")).json()["data"][0]["id"]
        ways = {"base": [[base] * sessions], "mixed": [mixed], "separate": separate}
        for groups in ways.values():
            await measure(server, groups)
        found: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(rounds):
            for way, groups in ways.items():
                found[way].append(await measure(server, groups))
    plain, together, apart = (statistics.median(found[way]) for way in ways)
    return [f"{plain:.1f}", f"{together:.1f}", f"{together / plain:.2f}", f"{apart:.1f}", f"{apart / plain:.2f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--sessions", type=int, default=16)
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--maps", choices=[*TARGETS], nargs="+", default=[*TARGETS])
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    rows: list[list[object]] = []
    with tempfile.TemporaryDirectory() as work:
        model = make(Path(work) / "model")
        for maps in args.maps:
            for rank in args.ranks:
                names = [f"adapter-{number}" for number in range(args.adapters)]
                flags = ["--disk-space", "0", "--max-running", "64"]
                for number, name in enumerate(names):
                    folder = Path(work) / f"{maps.replace(', ', '-').replace(' ', '-')}-{rank}" / name
                    make_adapter(folder, model, TARGETS[maps], rank, number)
                    flags += ["--adapter", f"{name}={folder}"]
                with serving(str(model), Path(work) / f"data-{len(rows)}", *flags) as server:
                    found = asyncio.run(bench(server, names, args.sessions, args.rounds))
                rows.append([maps, rank, args.sessions, *found])
                print(rows[-1], f"load {os.getloadavg()[0]:.1f}", flush=True)
    print(table(HEAD, rows))


if __name__ == "__main__":
    main()
