"""Benchmark of the engine on one GPU: ``python -m tools.bench_gpu [--tiny] [--minutes M] [--out FILE]``.

Floors first: how fast memory is copied, how fast bf16 matrices are multiplied, how fast pinned memory comes up. Then
the shapes of an 8B Llama and of the 0.6B Qwen3 with random weights made on the device, served by the engine as it is
(no HTTP): decode, a cold prompt, chats, a short turn on a long history, the same after its pages were sent to the host.
Each as a ratio to its floor; transformers' own continuous batching on the same model beside it. What there is no time
for is left out and named. ``--tiny`` runs all of it with small numbers on whatever is there, to try the script.
"""

from __future__ import annotations

import argparse
import gc
import inspect
import platform
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import transformers
from transformers import ContinuousBatchingConfig, GenerationConfig, LlamaConfig, Qwen3Config

from cache.error_line import first_line
from tools.floors import Floors, measure
from tools.served import Served
from tools.tables import table

ROOT = Path(__file__).resolve().parent.parent
REPLY = 64  # tokens
TURN = 16  # tokens of a short turn


class Sizes(NamedTuple):
    """What is measured: sessions that decode, tokens of their prompts, histories, a cold prompt, chats."""

    sessions: tuple[int, ...] = (1, 16, 64, 256)
    prompt: int = 512
    histories: tuple[int, ...] = (1 << 10, 1 << 12, 1 << 14, 1 << 16)
    cold: int = 8192
    chats: int = 64
    turns: int = 4
    matrix: int = 8192
    copied: int = 4 << 30  # bytes

    def reply(self, count: int) -> int:
        """Tokens of a reply, enough for ``count`` sessions to decode together when the last of them has begun."""
        return 2 * REPLY + count * self.prompt // 1024  # a step feeds 2048 tokens: twice as many steps as prompts take

    @property
    def tokens(self) -> int:
        """Tokens that sessions hold at the same time, at most."""
        decoding = max(count * (self.prompt + self.reply(count)) for count in self.sessions)
        most = max(decoding, self.chats * (self.prompt + 2 * REPLY * self.turns), 2 * max(self.histories))
        return most + 4096  # last pages that are not full, short turns


TINY = Sizes((1, 3), 40, (64, 128), 100, 3, 2, 256, 1 << 20)


def shapes(tiny: bool) -> dict[str, Any]:
    ends = {"bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0}
    small = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 2048}  # fmt: skip
    llama = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
             "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256}  # fmt: skip
    qwen = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
            "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936}  # fmt: skip
    context = {"max_position_embeddings": 1 << 17}
    return {
        "Llama, 8B": LlamaConfig(**(small if tiny else llama), **context, **ends, tie_word_embeddings=False),
        "Qwen3, 0.6B": Qwen3Config(**(small if tiny else qwen), **context, **ends, tie_word_embeddings=True),
    }


def percent(floor: float, seconds: float) -> str:
    return f"{100 * floor / seconds:.0f} %"


def prompt_floor(served: Served, floor: Floors, tokens: int, history: int = 0) -> float:
    """Seconds in which the device could feed ``tokens`` behind ``history``: multiply, or read weights and keys."""
    pairs = tokens * history + tokens * tokens / 2
    multiplied = 2 * ((served.active - served.head) * tokens + served.head) + 4 * served.width * pairs
    read = served.read + (history + tokens) * served.kv
    return float(max(multiplied / floor.matrix, read / floor.memory))


def decode(served: Served, floor: Floors, sizes: Sizes) -> Iterator[str]:
    """All sessions feed one token a step."""
    rows = []
    for count in sizes.sessions:
        replies: dict[str, list[int]] = {}
        for _ in range(count):
            served.send(served.words(sizes.prompt), sizes.reply(count))
        steps = [step for step in served.steps(replies) if step.tokens == count][-REPLY // 2 :]
        served.forget()
        if not steps:
            rows.append((count, "there is no room for so many", *"----"))
            continue
        seconds, launching, seen = (
            median(getattr(step, n) for step in steps) for n in ("seconds", "launching", "seen")
        )
        least = (served.read + seen * served.kv) / floor.memory
        rows.append((count, f"{1e3 * seconds:.2f}", f"{1e3 * least:.2f}", percent(least, seconds),
                     f"{count / seconds:,.0f}", percent(launching, seconds)))  # fmt: skip
    yield f"### Decode, {sizes.prompt} tokens of prompt\n"
    yield table("sessions | ms a step | floor | of the floor | tokens a second | of a step, until it is launched", rows)
    yield (
        f"\n{served.graphs} CUDA graphs, {served.compiled} compiled modules. Until a step is launched the host plans "
        "and prepares it, and with a graph the device waits for most of that; then the host waits for the device.\n"
    )


def cold(served: Served, floor: Floors, sizes: Sizes) -> Iterator[str]:
    """One prompt that nobody has computed."""
    served.ask(served.words(sizes.cold))
    served.forget()
    seconds = served.ask(served.words(sizes.cold))
    served.forget()
    least = prompt_floor(served, floor, sizes.cold)
    yield "### A cold prompt\n"
    yield table("tokens | ms | floor | of the floor | tokens a second", [
        (sizes.cold, f"{1e3 * seconds:.1f}", f"{1e3 * least:.1f}", percent(least, seconds),
         f"{sizes.cold / seconds:,.0f}"),
    ])  # fmt: skip
    yield ""


def warm(served: Served, floor: Floors, sizes: Sizes) -> Iterator[str]:
    """A short turn on a history that is on the device, and on one that is on the host: time to the first token."""
    rows, timeline = [], list[int]()
    for history in (h for h in sizes.histories if h + 99 * TURN < served.context):
        served.ask(timeline := timeline + served.words(history - len(timeline)), 1, "long")
        times: dict[str, list[float]] = {"device": [], "host": []}
        for place in ("device", "host") * 3:
            session = served.engine.scheduler.store.find("a", "long")
            assert session is not None
            timeline = [*session.token_ids[: session.length], *served.words(TURN)]
            if place == "host":
                served.cool()
            times[place].append(served.ask(timeline, 1, "long"))
        least = prompt_floor(served, floor, TURN, history)
        lifted = least + history * served.kv / floor.link
        device, host = median(times["device"]), median(times["host"])
        rows.append((history, f"{1e3 * device:.1f}", f"{1e3 * least:.1f}", percent(least, device),
                     f"{1e3 * host:.1f}", f"{1e3 * lifted:.1f}", percent(lifted, host)))  # fmt: skip
    served.forget()
    yield f"### A turn of {TURN} tokens on a history, to the first token\n"
    yield table("history | on the device, ms | floor | of the floor | on the host, ms | floor | of the floor", rows)
    yield ""


def chats(served: Served, floor: Floors, sizes: Sizes) -> Iterator[str]:
    """Sessions that talk all at once, each turn on all before it."""
    timelines = {f"c{n}": served.words(sizes.prompt) for n in range(sizes.chats)}
    rows = []
    for number in range(sizes.turns):
        replies: dict[str, list[int]] = {}
        turns = {served.send(timeline, REPLY, name): name for name, timeline in timelines.items()}
        seconds = served.run(replies)
        rows.append((number + 1, len(timelines["c0"]), f"{seconds:.2f}", f"{sizes.chats * REPLY / seconds:,.0f}"))
        for turn, name in turns.items():
            timelines[name] += [*replies[turn], *served.words(REPLY)]
    served.forget()
    yield f"### {sizes.chats} chats at once, {REPLY} tokens a message\n"
    yield table("turn | tokens of its timeline | seconds | tokens a second", rows)
    yield ""


def beside(served: Served, floor: Floors, sizes: Sizes) -> Iterator[str]:
    """The same prompts and as many tokens by the engine and by transformers' ``generate_batch``, both the second time.
    The last: it takes the engine's memory.
    """
    count = sizes.sessions[-2]
    prompts = [served.words(sizes.prompt) for _ in range(count)]
    took = []
    for _ in range(2):
        for prompt in prompts:
            served.send(prompt, REPLY)
        took.append(served.run({}))
        served.forget()
    rows = [("the engine", "its own", f"{took[-1]:.2f}", f"{count * REPLY / took[-1]:,.0f}")]
    served.mode.remove()
    tier = served.engine.scheduler.store.pool.device
    tier.keys, tier.values = {}, {}
    del served.engine
    gc.collect()
    torch.cuda.empty_cache()
    try:
        attention, seconds, made = generate_batch(served.model, prompts)
        rows.append(("generate_batch", attention, f"{seconds:.2f}", f"{made / seconds:,.0f}"))
    except Exception as error:  # another project's code on a device that it may not know
        rows.append(("generate_batch", "-", "-", f"did not run: {first_line(error, 80)}"))
    yield f"### {count} prompts of {sizes.prompt} tokens, {REPLY} tokens each, beginning to end\n"
    yield table(
        "by | attention | seconds | tokens a second", [[cell.replace("|", "\\|") for cell in row] for row in rows]
    )
    yield ""


def generate_batch(model: Any, prompts: list[list[int]]) -> tuple[str, float, int]:
    """transformers' own continuous batching, run twice: the attention that it chose, seconds and tokens of the second
    run. What the first has built serves the second too (cache, graphs), where this transformers can keep it.
    """
    settings = GenerationConfig(max_new_tokens=REPLY, do_sample=False, eos_token_id=-1, pad_token_id=0)
    keeps = "persistent_manager" in inspect.signature(model.generate_batch).parameters
    options: dict[str, Any] = {"persistent_manager": True} if keeps else {}
    if not torch.cuda.is_available():  # it would take nine tenths of the memory
        options["continuous_batching_config"] = ContinuousBatchingConfig(max_memory_percent=0.02)
    ran: set[str] = set()  # it changes the attention while it runs
    hook = model.register_forward_pre_hook(lambda *call: ran.add(str(model.config._attn_implementation)))
    try:
        for _ in range(2):
            started = time.perf_counter()
            found = model.generate_batch(prompts, generation_config=settings, **options)
            seconds = time.perf_counter() - started
    finally:
        hook.remove()
        if keeps:
            model.destroy_cached_continuous_batching_manager()
    made = [len(one.generated_tokens) for one in found.values()]
    if made != [REPLY] * len(prompts):
        raise RuntimeError(f"{sum(made)} tokens came of {REPLY * len(prompts)}")
    return " and ".join(sorted(ran)), seconds, sum(made)


def report(tiny: bool, deadline: float) -> Iterator[str]:
    """The page, line by line."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    sizes = TINY if tiny else Sizes()
    found = measure(device, sizes.copied, sizes.matrix)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    date = datetime.now(UTC).date().isoformat()
    yield f"# The engine on one GPU: {date}\n"
    yield (
        f"{name}, torch {torch.__version__}, transformers {transformers.__version__}, "
        f"Python {platform.python_version()}; bfloat16, random weights, no HTTP. `make bench-gpu` measures it again. "
        "Floors are what this device was measured to do; a part of one is the floor's time over ours.\n"
    )
    yield table("floor | measured", [
        ("memory, bytes read, or read and written", f"{found.memory / 1e9:,.0f} GB/s"),
        ("bf16 matrices", f"{found.matrix / 1e12:,.1f} TFLOP/s"),
        ("from pinned host memory", f"{found.link / 1e9:,.1f} GB/s"),
    ])  # fmt: skip
    yield ""
    for shape, config in shapes(tiny).items():
        left = deadline - time.monotonic()
        if left < 60 and not tiny:
            yield f"## {shape}: there was no time left\n"
            continue
        started = time.perf_counter()
        served = Served(config, device, max(sizes.sessions), sizes.tokens, 2 * max(sizes.histories))
        yield f"## {shape}\n"
        yield (
            f"{served.weights / 1e9:.2f} GB of weights, {served.kv:,} bytes of KV a token, mode {served.mode.name}; "
            f"ready after {time.perf_counter() - started:.0f} s.\n"
        )
        for part in (decode, cold, chats, warm, beside):
            if deadline - time.monotonic() < 30 and not tiny:
                yield f"There was no time left for: {part.__name__}.\n"
                continue
            yield from part(served, found, sizes)
        del served
        gc.collect()
        torch.cuda.empty_cache()


def main() -> None:
    """Measure, print as it goes, write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--tiny", action="store_true", help="small models and numbers, on any device; nothing is written"
    )
    parser.add_argument("--minutes", type=float, default=9.0, help="after which no part is begun any more")
    parser.add_argument("--out", type=Path, help="the page; docs/benchmarks/<date>-gpu.md unless --tiny")
    options = parser.parse_args()
    out = options.out
    if out is None and not options.tiny:
        out = ROOT / "docs" / "benchmarks" / f"{datetime.now(UTC).date().isoformat()}-gpu.md"
    lines = []
    for line in report(options.tiny, time.monotonic() + 60 * options.minutes):
        print(line, flush=True)
        lines.append(line)
        if out is not None:  # what was measured stays, whatever happens next
            out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
