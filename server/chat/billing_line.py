"""The billing line: a line in front of the system text, for the vendor's accounting, that changes with every request.
It says nothing to the model, and is left out of the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import structs

from server.config.prompt_rules import BILLING_LINE
from server.log.logged_message import LoggedMessage
from server.schemas.adaptations import adapt

PREFIX = "x-anthropic-billing-header:"


def has_billing_line(message: LoggedMessage) -> bool:
    """Whether it is a system or developer message that begins with a billing line."""
    return message.role in ("system", "developer") and message.content.startswith(PREFIX)


def fold_billing_line(text: str) -> str:
    """A system text without the billing line that it begins with, if it does."""
    return text.partition("\n")[2].lstrip("\n") if text.startswith(PREFIX) else text


def fold_instructions(instructions: str | None) -> str | None:
    """Instructions without the billing line that they begin with; None if they are nothing else."""
    if instructions is None or not instructions.startswith(PREFIX):
        return instructions
    adapt(BILLING_LINE, "instructions", 1)
    return fold_billing_line(instructions) or None


def fold_billing_lines(messages: Sequence[LoggedMessage]) -> list[LoggedMessage]:
    """Messages without the billing lines of system and developer messages, which the receipt then says. A message of
    nothing else is left out, unless it is the only one, or items are made of it.
    """
    made, count = [], 0
    for message in messages:
        if has_billing_line(message):
            count += 1
            message = structs.replace(message, content=fold_billing_line(message.content))
            needed = message.content or message.added_tools or message.removed_tools or message.items
            if not needed and len(messages) > 1:
                continue
        made.append(message)
    if count:
        adapt(BILLING_LINE, "system", count)
    return made
