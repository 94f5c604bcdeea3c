"""Benchmark of the rules that keep the front of a prompt as it was: how much of each prompt is the one before.

    python -m tools.bench_prompt_front [--turns 10]

A scripted conversation as a coding agent sends it to the Messages API, without an engine and without time: each prompt
is compared with the tokens of the request before, its prompt and its reply. The table has the share of these tokens
that the prompt begins with, over all requests from the second one on.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from scheduler.model_facts import ModelFacts
from server.api.anthropic.as_chat import as_chat
from server.api.anthropic.schemas import MessagesRequest
from server.chat.chat_tokenizer import ChatTokenizer, TemplateRefused
from server.chat.prompts import EMPTY_RECORD, Prompt, conversation, new_messages, rendering_change_of
from server.config.prompt_rules import PROMPT_RULES
from server.lines.branch import branch_of
from server.log.logged_message import LoggedMessage
from server.log.timeline import SessionRecord, TurnRecord, common_prefix
from tools.random_model import DEMO
from tools.tables import table

TEMPLATE = Path(__file__).resolve().parents[1] / "tests" / "templates" / "strict.jinja"
REFUSAL = "{%- if not loop.first %}{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
IN_PLACE = "{%- if not loop.first %}{{ '\\n<|im_start|>system\\n' + message.content + '<|im_end|>' }}{% endif %}"
END = "<|im_end|>"
WORDS = "file line test value return path error name list build module class read write index key call type".split()
FACTS = ModelFacts(
    architecture="none",
    parameters=0,
    weight_bytes=0,
    dtype="float32",
    device="cpu",
    vocab_size=1 << 20,
    max_context=1 << 20,
    eos_token_ids=(),
    mode="packed",
    probe="",
    layer_kinds={},
    kv_bytes_per_token=0,
    page_size=16,
    pages=0,
    fingerprint="",
)
SHUFFLED = 7  # the turn from which on the tools come in another order
SEARCHED = 4  # the turn that finds a deferred tool


@dataclass
class Script:
    """A client that appends: ``messages`` is its history. Each turn has two requests: a question, answered with a call,
    and the call's result, answered with text.
    """

    messages: list[dict[str, Any]] = field(default_factory=list)
    requests: int = 0
    chance: random.Random = field(default_factory=lambda: random.Random(5))

    def words(self, count: int) -> str:
        """Words of a file or a text."""
        return " ".join(self.chance.choices(WORDS, k=count))

    def ask(self, turn: int) -> None:
        """The user's question, and what the client tells the model beside it."""
        self.messages.append({"role": "user", "content": f"{turn}. {self.words(40)}"})
        self._tell(f"<total_tokens>{190_000 - 3_000 * turn} tokens left</total_tokens>")

    def reply(self, turn: int) -> None:
        """A reply that reasons and calls a tool."""
        call = {"type": "tool_use", "id": f"call_{turn}", "name": "tool_1", "input": {"path": f"src/{turn}.py"}}
        self._say({"type": "thinking", "thinking": self.words(60)}, call)

    def give_result(self, turn: int) -> None:
        """The result of the call, and more of what the client tells."""
        content: list[dict[str, Any]] = [{"type": "text", "text": self.words(400)}]
        if turn == SEARCHED:
            content.append({"type": "tool_reference", "tool_name": "late"})
        result = {"type": "tool_result", "tool_use_id": f"call_{turn}", "content": content}
        self.messages.append({"role": "user", "content": [result]})
        self._tell(f"<total_tokens>{189_000 - 3_000 * turn} tokens left</total_tokens>")
        if turn % 3 == 0:
            self._tell("The list of things to do has not been used for a while.")

    def answer(self) -> None:
        """The reply that ends the turn."""
        self._say({"type": "thinking", "thinking": self.words(40)}, {"type": "text", "text": self.words(50)})

    def request(self, turn: int) -> MessagesRequest:
        """The next request: billing line, system text, tools, and the whole history."""
        self.requests += 1
        fixed = random.Random(6)
        tools: list[dict[str, Any]] = [
            {
                "name": f"tool_{number}",
                "description": " ".join(fixed.choices(WORDS, k=60)),
                "input_schema": {"type": "object", "properties": {"path": {"type": "string"}}},
            }
            for number in range(12)
        ]
        tools = [*reversed(tools)] if turn >= SHUFFLED else tools
        late = {"name": "late", "description": "Comes late.", "input_schema": {"type": "object"}, "defer_loading": True}
        billing = f"x-anthropic-billing-header: cc_version=2.1; cc_entrypoint=cli; cch={self.requests:05};"
        texts = (billing, "You are a coding agent.", " ".join(fixed.choices(WORDS, k=1_000)))
        made = {
            "model": "",
            "max_tokens": 1000,
            "system": [{"type": "text", "text": text} for text in texts],
            "tools": [*tools, late],
            "messages": self.messages,
        }
        return MessagesRequest.model_validate(made)

    def last_reply(self) -> LoggedMessage:
        """The last message, as it is logged."""
        messages = [{"role": "user", "content": "x"}, self.messages[-1], {"role": "user", "content": "y"}]
        request = MessagesRequest.model_validate({"model": "", "max_tokens": 1, "messages": messages})
        return as_chat(request).plain_messages()[1]

    def _tell(self, text: str) -> None:
        self.messages.append({"role": "system", "content": text})

    def _say(self, *blocks: dict[str, Any]) -> None:
        self.messages.append({"role": "assistant", "content": [*blocks]})


@dataclass
class Tally:
    """``reused`` of ``reusable`` tokens, and why there is no more."""

    reused: int = 0
    reusable: int = 0
    refused: str = ""

    @property
    def shown(self) -> str:
        """The share, as it stands in the table."""
        return "400" if self.refused else f"{100 * self.reused / self.reusable:.1f} %"


def run(tokens: ChatTokenizer, turns: int, hinted: bool) -> Tally:
    """Run the script. ``hinted``: the client gives a hint, so that its requests go on from the log where they agree
    with it; otherwise each is rendered whole.
    """
    script, tally, record = Script(), Tally(), EMPTY_RECORD
    try:
        for turn in range(1, turns + 1):
            for ask, reply in ((script.ask, script.reply), (script.give_result, lambda _: script.answer())):
                ask(turn)
                prompt = prompt_of(tokens, script.request(turn), record if hinted else EMPTY_RECORD)
                if record.tokens:
                    tally.reusable += len(record.tokens)
                    tally.reused += common_prefix(record.tokens, prompt.ids)
                reply(turn)
                record = extend_log(tokens, prompt, script.last_reply(), record)
    except TemplateRefused as error:
        tally.refused = error.message
    return tally


def prompt_of(tokens: ChatTokenizer, request: MessagesRequest, record: SessionRecord) -> Prompt:
    """The prompt of a request, on the line ``record`` where it agrees with it."""
    chat = as_chat(request)
    messages = new_messages(chat, tokens)
    change = replace(rendering_change_of(chat, tokens), whole=True)
    branch = branch_of(record, messages, own=True) if record.tokens else None
    if branch is None:
        return conversation(tokens, FACTS, None, messages, change)
    return conversation(tokens, FACTS, branch.past, branch.new, change)


def extend_log(tokens: ChatTokenizer, prompt: Prompt, reply: LoggedMessage, record: SessionRecord) -> SessionRecord:
    """The log after a turn."""
    ids = [*prompt.ids, *tokens.encode(write_reply(tokens, reply), special=False)]
    messages = [*prompt.messages, reply]
    fingerprint = tokens.fingerprint(FACTS.vocab_size)
    turns = tuple(turn for turn in record.turns if turn.tokens <= common_prefix(record.tokens, ids))
    number = len(turns) + 1
    turn = TurnRecord(number, 0, len(prompt.ids), len(ids), len(messages), 0, "stop", fingerprint, number)
    return SessionRecord("line", ids, messages, fingerprint, 0, turns=(*turns, turn))


def write_reply(tokens: ChatTokenizer, reply: LoggedMessage) -> str:
    """A reply as the model writes it: as the template shows it while it is the last message."""
    asked = [LoggedMessage("user", "x")]
    before = tokens.render(asked, generation_prompt=True)
    shown = tokens.render([*asked, reply], generation_prompt=False)
    assert shown.startswith(before)
    return shown.removeprefix(before)


def tokens_of(template: str, rules: Sequence[str]) -> ChatTokenizer:
    """The demo model's tokenizer under another template."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    tokenizer.chat_template = template
    return ChatTokenizer(tokenizer, rules=rules)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=10)
    turns = parser.parse_args().turns
    refusing = TEMPLATE.read_text()
    templates = {"takes them": refusing.replace(REFUSAL, IN_PLACE), "refuses them": refusing}
    choices = {"all": PROMPT_RULES, "none": ()}
    choices |= {f"all but {rule}": tuple(r for r in PROMPT_RULES if r != rule) for rule in PROMPT_RULES}
    rows = []
    for name, rules in choices.items():
        row = [name]
        for template in templates.values():
            tokens = tokens_of(template, rules)
            row += [run(tokens, turns, hinted).shown for hinted in (False, True)]
            tokens.close()
        rows.append(row)
    heads = [f"template {name}, {way}" for name in templates for way in ("whole history", "with a hint")]
    print(table(" | ".join(["rules", *heads]), rows))


if __name__ == "__main__":
    main()
