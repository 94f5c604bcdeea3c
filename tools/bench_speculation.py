"""Measures speculation: ``python -m tools.bench_speculation [--only abcde] [--sessions 1 4 16] [--threads 1]``.

For each conversation of ``speculation_texts`` it makes a model of gpt2's shape that says its replies
(``scripted_model``), serves it with ``--speculate auto``, and asks for the replies with speculation and without, by
turns. All prompts are cached before. Each session has a tenant of its own, and is deleted after each round, so that
nothing is drafted from another session or an earlier round. Prints a table: tokens per second of CPU of both server
processes, and per second.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import string
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from tools.running import Server, serving
from tools.scripted_model import make_model, make_tokenizer
from tools.speculation_texts import Conversation, all_conversations
from tools.tables import table

HEAD = "text | sessions | tokens | off, per CPU s | on | ratio | off, per s | on | ratio | drafted | accepted"
TOKENS = {1: 800, 4: 300, 16: 120}  # of a reply, at most, by sessions


class Round(NamedTuple):
    """All sessions' replies, once."""

    texts: list[str]
    tokens: int
    cpu: float  # seconds
    wall: float
    drafted: int
    accepted: int


def words_of(tokenizer: Any) -> list[str]:
    """Words of one token each."""
    marked = [token[1:] for token in tokenizer.get_vocab() if token.startswith("Ġ") and token[1:].isalpha()]
    return sorted(word for word in marked if set(word) <= set(string.ascii_letters))


def script_of(tokenizer: Any, conversation: Conversation) -> dict[int, int]:
    """By position, the token that follows."""
    script: dict[int, int] = {}
    for messages, reply in conversation.prompts():
        shown = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        first = len(tokenizer.encode(shown)) - 1
        ids = [*tokenizer.encode(reply), tokenizer.eos_token_id]
        script |= {first + number: token for number, token in enumerate(ids)}
    return script


async def say(server: Server, tenant: int, conversation: Conversation, most: int, speculation: bool) -> Round:
    """A session's turns. The wall time is left out."""
    texts, tokens, drafted, accepted = [], 0, 0, 0
    headers = {"authorization": f"Bearer key-{tenant}", "x-session-id": "round", "x-session-create": "true"}
    for messages, _ in conversation.prompts():
        body = {"messages": messages, "max_tokens": most, "temperature": 0, "speculation": speculation}
        answer = await server.client.post(
            f"{server.url}/v1/chat/completions", json=body | conversation.more, headers=headers
        )
        if answer.status_code != 200:
            raise SystemExit(f"{answer.status_code}: {answer.text[:300]}")
        reply = answer.json()
        texts.append(reply["choices"][0]["message"]["content"])
        tokens += reply["usage"]["completion_tokens"]
        counts = reply["cache"].get("speculation", {}).values()
        drafted += sum(count["drafted"] for count in counts)
        accepted += sum(count["accepted"] for count in counts)
    await server.client.delete(f"{server.url}/v1/sessions/round", headers=headers)
    return Round(texts, tokens, 0.0, 0.0, drafted, accepted)


async def warm(server: Server, tenant: int, conversation: Conversation) -> None:
    """Compute the prompts; they stay cached."""
    headers = {"authorization": f"Bearer key-{tenant}", "x-session-id": "warm", "x-session-create": "true"}
    messages = conversation.prompts()[-1][0]
    body = {"messages": messages, "max_tokens": 1, "temperature": 0, "speculation": False}
    answer = await server.client.post(f"{server.url}/v1/chat/completions", json=body, headers=headers)
    answer.raise_for_status()


async def measure(server: Server, conversation: Conversation, sessions: int, most: int, speculation: bool) -> Round:
    """A round of that many sessions at once."""
    cpu, began = server.cpu(), time.perf_counter()
    said = await asyncio.gather(*(say(server, n, conversation, most, speculation) for n in range(sessions)))
    wall, cpu = time.perf_counter() - began, server.cpu() - cpu
    sums = [sum(getattr(one, name) for one in said) for name in ("tokens", "drafted", "accepted")]
    return Round([text for one in said for text in one.texts], sums[0], cpu, wall, sums[1], sums[2])


async def compare(server: Server, conversation: Conversation, sessions: int, most: int, rounds: int) -> list[object]:
    """A row of the table: medians of rounds, off and on by turns. SystemExit where the replies differ."""
    done: dict[bool, list[Round]] = {False: [], True: []}
    for number in range(2 * rounds):
        on = number % 4 in (1, 2)
        done[on].append(await measure(server, conversation, sessions, most, on))
    wanted = [reply for _ in range(sessions) for _, reply in conversation.prompts()]
    for one in done[False] + done[True]:
        if one.texts != done[False][0].texts:
            raise SystemExit(f"{conversation.name}: the replies differ")
        if not all(reply.startswith(text) for text, reply in zip(one.texts, wanted, strict=True)):
            raise SystemExit(f"{conversation.name}: the model does not follow its script")
    rates = []
    for name in ("cpu", "wall"):
        off, on_ = (
            statistics.median(one.tokens / getattr(one, name) for one in done[which]) for which in (False, True)
        )
        rates += [f"{off:.1f}", f"{on_:.1f}", f"{on_ / off:.2f}"]
    last = done[True][-1]
    return [conversation.name, sessions, last.tokens, *rates, last.drafted, last.accepted]


async def bench(args: argparse.Namespace, conversation: Conversation, folder: Path, data: Path) -> list[list[object]]:
    """The rows of a conversation."""
    keys = [part for n in range(max(args.sessions)) for part in ("--api-key", f"t{n}=key-{n}")]
    flags = ["--speculate", "auto", "--max-running", "64", "--disk-space", "0", *keys, *args.flags.split()]
    rows = []
    with serving(str(folder), data, *flags) as server:
        async with server.client:
            for number in range(max(args.sessions)):
                await warm(server, number, conversation)
            for sessions in args.sessions:
                most = args.tokens or TOKENS.get(sessions, 200)
                rows.append(await compare(server, conversation, sessions, most, args.rounds))
                print(f"| {' | '.join(map(str, rows[-1]))} |  load {os.getloadavg()[0]:.1f}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="abcde", help="letters of the conversations")
    parser.add_argument("--sessions", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=2, help="with speculation, and as many without")
    parser.add_argument("--tokens", type=int, help="of a reply at most (default: 800, 300 or 120, by sessions)")
    parser.add_argument("--flags", default="", help="further flags of the server")
    parser.add_argument("--folder", type=Path, help="keep the models there")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    rows = []
    with tempfile.TemporaryDirectory() as work:
        models = args.folder or Path(work)
        made = models / "tokenizer"
        tokenizer = make_tokenizer(made)
        words = random.Random(9).sample(words_of(tokenizer), 1500)
        for letter, make in all_conversations(words).items():
            if letter in args.only:
                conversation, folder = make(), models / letter
                if not (folder / "config.json").exists():
                    make_model(folder, script_of(tokenizer, conversation))
                    for file in made.iterdir():
                        (folder / file.name).write_bytes(file.read_bytes())
                rows += asyncio.run(bench(args, conversation, folder, Path(work) / f"data-{letter}"))
    print(table(HEAD, rows))


if __name__ == "__main__":
    main()
