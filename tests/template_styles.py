"""Chat templates in the styles of the ones that models ship, written for tests: how tools, calls, results and reasoning
look in each. They are the files of ``templates``; ``tokens_with`` puts one on the demo model's tokenizer.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from http_context import demo_tokens
from transformers import AutoTokenizer

from server.chat.chat_tokenizer import ChatTokenizer
from server.config.prompt_rules import PROMPT_RULES

FOLDER = Path(__file__).with_name("templates")


def template(name: str) -> str:
    return (FOLDER / f"{name}.jinja").read_text().removesuffix("\n")


HERMES = template("hermes")
BEGINS = "{%- if add_generation_prompt %}\n<|im_start|>assistant\n"
THINKS = HERMES.replace(BEGINS, BEGINS + "<think>\n")
NO_TOOLS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('No system messages.') }}{% endif %}" + NO_TOOLS
STYLES = {
    "hermes": HERMES,
    "thinks": THINKS,
    "mistral": template("mistral"),
    "llama": template("llama"),
    "xml": template("xml"),
    "pairs": template("pairs"),
    "named": template("named"),
    "no tools": NO_TOOLS,
    "no system": NO_SYSTEM,
    "strict": template("strict"),
    "alternating": template("alternating"),
}


def tokens_with(
    template: str | None, response_template: object = None, rules: Collection[str] = PROMPT_RULES
) -> ChatTokenizer:
    """The demo tokenizer under another template."""
    tokenizer = AutoTokenizer.from_pretrained(demo_tokens()._tokenizer.name_or_path)
    tokenizer.chat_template = template
    return ChatTokenizer(tokenizer, response_template=response_template, rules=rules)
