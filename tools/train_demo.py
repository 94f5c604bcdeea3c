"""Train the demo model: ``python -m tools.train_demo --out server/demo`` takes about 18 minutes of one CPU core.

The model is a ``Qwen2ForCausalLM`` of 0.92 M parameters (that architecture, for its biases on q and k, see
``point_back``). Recall is copying: find an earlier place like this one, say what followed there (an induction head,
Olsson et al. 2022, arXiv 2209.11895). So training teaches copying first and talking second:

1. *copy*: random tokens, repeated once; the loss counts the repetition only.
2. *talk*: chats of 1 to 2 turns growing to 8 (``tools.dialogues``); user tokens count 0.02, assistant tokens 1.
3. *long*: chats of 3 to 20 turns at half the learning rate.

Matrices learn by Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon), the rest by AdamW, in bfloat16 autocast.
Seeds are fixed, but stages end by CPU clock, so two runs agree in quality and not in bits.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import pre_tokenizers, trainers
from torch.nn import functional
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2Tokenizer,
)

from tools.dialogues import Dialogue, dialogue

VOCABULARY, CONTEXT, THETA = 1024, 2048, 10_000.0
STEP_TOKENS = 2000
USER_WEIGHT = 0.02
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""

Batch = tuple[torch.Tensor, torch.Tensor]
"""Token ids [B, T] and, of the same shape, how much predicting each of them counts."""


def train_tokenizer(chats: int) -> Any:
    """Byte-level BPE over the full byte alphabet, every digit a token: any (NFC) text survives a round trip.

    It splits text as Qwen2 does, because ``AutoTokenizer`` replaces the splitting of a ``qwen2`` folder by that one.
    """
    tokenizer = Qwen2Tokenizer().backend_tokenizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    rng = random.Random(7)
    texts = (text for _ in range(chats) for text in _texts(dialogue(rng, 6)))
    tokenizer.train_from_iterator(texts, trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", model_max_length=CONTEXT
    )
    wrapped.chat_template = TEMPLATE
    return wrapped


def _texts(chat: Dialogue) -> Iterator[str]:
    if chat.system:
        yield "\n".join(chat.system)
    for turn in chat.turns:
        yield f"user\n{turn.user}\n"
        yield f"assistant\n{turn.assistant}\n"


def new_model() -> Any:
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=SPECIAL.index("<|im_end|>"),
        pad_token_id=SPECIAL.index("<|endoftext|>"),
    )
    model = Qwen2ForCausalLM(config)
    point_back(model.model.layers[0].self_attn, config.hidden_size // config.num_attention_heads, query_heads=2)
    return model


@torch.no_grad()
def point_back(attention: Any, width: int, query_heads: int, amplitude: float = 7.0, frequencies: int = 4) -> None:
    """Start the first KV head of ``attention`` as previous-token heads, the first half of an induction head.

    RoPE (Su et al. 2021, arXiv 2104.09864) turns pair (i, i + width/2) of a vector at position p by the angle p f_i,
    where f_i = theta^(-2i / width). With zero weights, q and k are their biases alone: give pair i of k the angle f_i
    and of query head h the angle -h f_i, both of length a. Then for a query at p and a key at j

        q . k = a^2 sum_i cos((p - j - 1 - h) f_i),

    highest at j = p - 1 - h: head 0 looks one token back, head 1 two. The four fastest frequencies make the peak sharp.
    V and O start four times larger, so that the heads are heard above the residual stream.
    """
    half = width // 2
    angle = THETA ** (-torch.arange(frequencies) / half)
    projections = [(attention.k_proj, 0, angle)]
    projections += [(attention.q_proj, head * width, -head * angle) for head in range(query_heads)]
    for projection, start, phase in projections:
        projection.weight[start : start + width] = 0
        projection.bias[start : start + width] = 0
        projection.bias[start : start + frequencies] = amplitude * torch.cos(phase)
        projection.bias[start + half : start + half + frequencies] = amplitude * torch.sin(phase)
    attention.v_proj.weight.mul_(4)
    attention.o_proj.weight.mul_(4)


@dataclass
class Clock:
    """One stage's time, in CPU seconds per thread, so that a busy machine trains no worse."""

    seconds: float
    threads: int
    start: float = 0.0

    def __post_init__(self) -> None:
        self.start = time.process_time()

    @property
    def progress(self) -> float:
        return (time.process_time() - self.start) / self.threads / self.seconds


class Encoder:
    """Chats as token ids, exactly as the chat template renders them, with the weight of each token."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.end = tokenizer.convert_tokens_to_ids("<|im_end|>")

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False).input_ids)

    def chat(self, chat: Dialogue) -> tuple[list[int], list[float]]:
        ids: list[int] = []
        weights: list[float] = []

        def add(new: list[int], weight: float) -> None:
            ids.extend(new)
            weights.extend([weight] * len(new))

        if chat.system:
            add(self.ids(f"<|im_start|>{chat.system[0]}\n{chat.system[1]}<|im_end|>\n"), USER_WEIGHT)
        for turn in chat.turns:
            add(self.ids(f"<|im_start|>user\n{turn.user}<|im_end|>\n"), USER_WEIGHT)
            add(self.ids("<|im_start|>assistant\n"), 0.0)
            add([*self.ids(turn.assistant), self.end], 1.0)
            add(self.ids("\n"), 0.0)
        return ids, weights


def copy_batches(clock: Clock) -> Iterator[Batch]:
    """Random tokens twice; the first repeated one cannot be foreseen and does not count."""
    while clock.progress < 1:
        length = int(torch.randint(6, 48, ()))
        tokens = torch.randint(len(SPECIAL), VOCABULARY, (STEP_TOKENS // (2 * length), length))
        weights = torch.zeros(len(tokens), 2 * length)
        weights[:, length + 1 :] = 1
        yield torch.cat([tokens, tokens], 1), weights


def chat_batches(
    clock: Clock, encoder: Encoder, turns: Callable[[float], tuple[int, int]], seed: int
) -> Iterator[Batch]:
    """Chats of similar length together, about ``STEP_TOKENS`` tokens at a time with their padding."""
    rng = random.Random(seed)
    while clock.progress < 1:
        low, high = turns(clock.progress)
        chats = sorted(
            (encoder.chat(dialogue(rng, rng.randint(low, high))) for _ in range(200)), key=lambda c: len(c[0])
        )
        groups: list[list[tuple[list[int], list[float]]]] = [[]]
        for chat in chats:
            if groups[-1] and len(chat[0]) * (len(groups[-1]) + 1) > STEP_TOKENS:
                groups.append([])
            groups[-1].append(chat)
        rng.shuffle(groups)
        for group in groups:
            width = len(group[-1][0])
            ids = torch.tensor([tokens + [0] * (width - len(tokens)) for tokens, _ in group])
            yield ids, torch.tensor([weights + [0.0] * (width - len(weights)) for _, weights in group])
            if clock.progress >= 1:
                return


class Learner:
    """The model with its two optimisers; ``run`` takes one stage of batches through them."""

    def __init__(self, model: Any) -> None:
        self.model = model
        matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
        others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
        self.rates = (0.02, 0.005)
        self.optimizers: tuple[torch.optim.Optimizer, ...] = (
            torch.optim.Muon(matrices, lr=self.rates[0], weight_decay=0.02, momentum=0.95, adjust_lr_fn="original"),
            torch.optim.AdamW(others, lr=self.rates[1], betas=(0.9, 0.98), weight_decay=0.0),
        )

    def run(self, stage: str, batches: Iterator[Batch], clock: Clock, rate: Callable[[float], float]) -> None:
        """``rate`` maps the stage's progress to the share of the peak learning rates; the first steps warm up to it."""
        self.model.train()
        mean, tokens, report = 0.0, 0, 0.1
        for step, (ids, weights) in enumerate(batches, start=1):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                logits = self.model(ids, use_cache=False).logits
            losses = functional.cross_entropy(
                logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten(), reduction="none"
            )
            counts = weights[:, 1:].flatten()
            loss = (losses * counts).sum() / counts.sum()
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            share = rate(min(1.0, clock.progress)) * min(1.0, step / 50)
            for optimizer, peak in zip(self.optimizers, self.rates, strict=True):
                optimizer.param_groups[0]["lr"] = peak * share
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            mean += (loss.item() - mean) / min(step, 50)
            tokens += ids.numel()
            if clock.progress >= report:
                report += 0.1
                print(f"{stage}: {clock.progress:4.0%}, {step} steps, {tokens} tokens, loss {mean:.4f}", flush=True)


@torch.no_grad()
def answer(model: Any, encoder: Encoder, cache: Any, text: str) -> str:
    """Feed only ``text`` on top of ``cache``, generate greedily up to and including the end token."""
    fed = torch.tensor([encoder.ids(text + "<|im_start|>assistant\n")])
    said: list[int] = []
    while len(said) < 64 and (not said or said[-1] != encoder.end):
        logits = model(fed, past_key_values=cache, use_cache=True).logits
        said.append(int(logits[0, -1].argmax()))
        fed = torch.tensor([[said[-1]]])
    model(fed, past_key_values=cache, use_cache=True)
    return str(encoder.tokenizer.decode(said, skip_special_tokens=True))


def evaluate(model: Any, encoder: Encoder, low: int, high: int, chats: int) -> dict[str, float]:
    """Free-running chats with unseen names, the KV kept from turn to turn.

    ``recall`` is the share of questions whose answer is exact; ``without_kv`` the share of the same questions that a
    model without the history gets right; the other figures are exact answers by kind of turn.
    """
    model.eval()
    rng = random.Random(99)
    right: dict[str, list[bool]] = {"recall": [], "without_kv": []}
    for _ in range(chats):
        chat, cache, opening = dialogue(rng, rng.randint(low, high), unseen=True), DynamicCache(), ""
        if chat.system:
            opening = f"<|im_start|>{chat.system[0]}\n{chat.system[1]}<|im_end|>\n"
        for turn in chat.turns:
            text = f"<|im_start|>user\n{turn.user}<|im_end|>\n"
            said = answer(model, encoder, cache, opening + text)
            opening = "\n"
            right.setdefault(turn.kind, []).append(said == turn.assistant)
            if turn.values:
                alone = answer(model, encoder, DynamicCache(), text)
                right["recall"].append(said == turn.assistant)
                right["without_kv"].append(all(re.search(rf"\b{re.escape(v)}\b", alone) for v in turn.values))
    del right["ask"]
    return {kind: round(sum(hits) / len(hits), 3) for kind, hits in right.items()} | {"questions": len(right["recall"])}


def save(model: Any, tokenizer: Any, out: Path) -> None:
    """Write what ``from_pretrained`` reads: weights in bfloat16, answers greedy unless a request says otherwise."""
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)
    config = model.config
    generation = {"do_sample": False, "eos_token_id": config.eos_token_id, "pad_token_id": config.pad_token_id}
    (out / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def train(minutes: float, threads: int) -> tuple[Any, Any]:
    tokenizer, model = train_tokenizer(chats=12_000), new_model()
    encoder, learner = Encoder(tokenizer), Learner(model)
    print(f"{model.num_parameters()} parameters, {len(tokenizer)} tokens", flush=True)
    model.set_attn_implementation("eager")  # on short rows of bfloat16 its backward pass is the faster one on a CPU
    clock = Clock(60 * minutes * 0.05, threads)
    learner.run("copy", copy_batches(clock), clock, lambda _: 1.0)
    clock = Clock(60 * minutes * 0.63, threads)
    growing = chat_batches(clock, encoder, lambda p: (1 if p < 0.35 else 2, min(8, 2 + math.floor(17 * p))), seed=1)
    learner.run("talk", growing, clock, lambda p: min(1.0, max(0.02, 2 - 2 * p)))
    model.set_attn_implementation("sdpa")
    clock = Clock(60 * minutes * 0.32, threads)
    learner.run("long", chat_batches(clock, encoder, lambda _: (3, 20), seed=2), clock, lambda p: max(0.02, 1 - p) / 2)
    return model, tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the demo model, or evaluate a trained one.")
    parser.add_argument("--minutes", type=float, default=18, help="CPU minutes per thread for the three stages")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True, help="folder for the model and its tokenizer")
    parser.add_argument("--evaluate", action="store_true", help="train nothing, evaluate the model in --out")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    if not arguments.evaluate:
        save(*train(arguments.minutes, arguments.threads), arguments.out)
    model = AutoModelForCausalLM.from_pretrained(arguments.out, dtype=torch.float32)
    encoder = Encoder(AutoTokenizer.from_pretrained(arguments.out))
    for low, high in ((3, 6), (8, 12), (16, 20)):
        print(f"{low}-{high} turns:", json.dumps(evaluate(model, encoder, low, high, chats=100)), flush=True)


if __name__ == "__main__":
    main()
