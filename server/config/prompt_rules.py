"""The rules by which a prompt is rendered otherwise than its request is written, so that the next prompt begins with
the same tokens (docs/prompt_front.md).
"""

from __future__ import annotations

BILLING_LINE = "billing_line_folded"
SYSTEM_IN_PLACE = "system_in_place"
MESSAGES_JOINED = "messages_joined"
REASONING_KEPT = "reasoning_kept"
TOOL_ORDER = "tools_in_first_order"
TOOLS_IN_PLACE = "tools_in_place"
PROMPT_RULES = (BILLING_LINE, SYSTEM_IN_PLACE, MESSAGES_JOINED, REASONING_KEPT, TOOL_ORDER, TOOLS_IN_PLACE)


def parse_prompt_rules(given: object) -> object:
    """Names of rules, from ``all``, ``none``, a comma list or a list, in the order of ``PROMPT_RULES``.
    Raises ValueError.
    """
    entries = given.split(",") if isinstance(given, str) else given
    if not isinstance(entries, (list, tuple)):
        raise ValueError("expected all, none, or names of rules")
    if [*entries] in (["all"], ["none"]):
        return PROMPT_RULES if entries[0] == "all" else ()
    if not all(name in PROMPT_RULES for name in entries):
        raise ValueError(f"expected all, none, or some of {', '.join(PROMPT_RULES)}")
    return tuple(name for name in PROMPT_RULES if name in entries)
