"""Edits of a request's history (``context_management``): old tool results and old reasoning are left out, and a
conversation is compacted (``server.api.anthropic.compact_edit``).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BeforeValidator, Discriminator, Field, Tag

from server.api.anthropic.block_schemas import ThinkingBlockParam, ToolResultBlockParam, ToolUseBlockParam
from server.schemas.field_types import INT32
from server.schemas.strict import Strict

CLEARED = "[Old tool result content cleared]"
TRIGGER_TOKENS = 100_000  # Anthropic's default
KEPT_USES = 3  # Anthropic's default
COMPACTED_TOKENS = 150_000  # Anthropic's default
Count = Annotated[int, Field(ge=0, le=INT32)]
ToolNames = Annotated[list[Annotated[str, Field(max_length=128)]], Field(max_length=4096)]


class Amount(Strict):
    """So many of what the type names."""

    type: Literal["input_tokens", "tool_uses", "thinking_turns"]
    value: Count


def of(*kinds: str) -> BeforeValidator:
    """Only amounts of these kinds."""

    def check(value: object) -> object:
        if isinstance(value, dict) and value.get("type") not in kinds:
            raise ValueError(f"must have the type {' or '.join(kinds)}")
        return value

    return BeforeValidator(check)


class ToolUsesEdit(Strict):
    """Clears the results of all but the newest tool uses, once the prompt is large."""

    type: Literal["clear_tool_uses_20250919"]
    trigger: Annotated[Amount, of("input_tokens", "tool_uses")] = Amount(type="input_tokens", value=TRIGGER_TOKENS)
    keep: Annotated[Amount, of("tool_uses")] = Amount(type="tool_uses", value=KEPT_USES)
    clear_at_least: Annotated[Amount, of("input_tokens")] | None = None
    exclude_tools: ToolNames = Field(default_factory=list)
    clear_tool_inputs: bool | ToolNames = False


def kept_turns(value: object) -> object:
    """``keep`` as an amount; "all" is None."""
    return None if value in ("all", {"type": "all"}) else value


class ThinkingEdit(Strict):
    """Leaves out the reasoning of all but the newest replies; ``keep`` None: of none."""

    NULLS: ClassVar[frozenset[str]] = frozenset({"keep"})
    type: Literal["clear_thinking_20251015"]
    keep: Annotated[Annotated[Amount, of("thinking_turns")] | None, BeforeValidator(kept_turns)] = Amount(
        type="thinking_turns", value=1
    )


class CompactEdit(Strict):
    """Summarises the older messages of a prompt of more than ``trigger`` tokens, or of one that does not fit;
    ``instructions`` take the place of our own question. With ``pause_after_compaction`` all messages are summarised,
    and the client asks again behind the summary.
    """

    type: Literal["compact_20260112"]
    trigger: Annotated[Amount, of("input_tokens")] = Amount(type="input_tokens", value=COMPACTED_TOKENS)
    instructions: str | None = None
    pause_after_compaction: bool = False


def kind_of_edit(value: object) -> str:
    """Which edit this is; unknown ones are validated, and so refused, as the first."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    names = {"clear_thinking_20251015": "<thinking>", "compact_20260112": "<compact>"}
    return names.get(kind, "<tool_uses>") if isinstance(kind, str) else "<tool_uses>"


Edit = Annotated[
    Annotated[ToolUsesEdit, Tag("<tool_uses>")]
    | Annotated[ThinkingEdit, Tag("<thinking>")]
    | Annotated[CompactEdit, Tag("<compact>")],
    Discriminator(kind_of_edit),
]


class ContextManagement(Strict):
    """Edits of the history before it is read, in their order."""

    edits: Annotated[list[Edit], Field(max_length=16), Field(fail_fast=True)] = Field(default_factory=list)

    @property
    def compaction(self) -> CompactEdit | None:
        """The edit that compacts, if there is one; it comes after the others."""
        return next((edit for edit in self.edits if isinstance(edit, CompactEdit)), None)


Message = TypeVar("Message", bound=Any)
CountTokens = Callable[[Sequence[Any]], Awaitable[int]]


async def apply_edits(
    messages: Sequence[Message], edits: Sequence[Edit], count: CountTokens
) -> tuple[list[Message], list[dict[str, Any]]]:
    """The messages after ``edits``, but for compactions, and those that have changed something, as replies name them.
    ``count`` counts the tokens of the prompt that messages make.
    """
    applied: list[dict[str, Any]] = []
    now = [*messages]
    for edit in edits:
        if isinstance(edit, CompactEdit):
            continue
        made, number = clear_thinking(now, edit) if isinstance(edit, ThinkingEdit) else clear_uses(now, edit)
        if not number:
            continue
        before, after = await count(now), await count(made)
        if isinstance(edit, ToolUsesEdit) and not is_due(edit, now, before, before - after):
            continue
        unit = "cleared_thinking_turns" if isinstance(edit, ThinkingEdit) else "cleared_tool_uses"
        applied.append({"type": edit.type, unit: number, "cleared_input_tokens": max(0, before - after)})
        now = made
    return now, applied


def is_due(edit: ToolUsesEdit, messages: Sequence[Any], tokens: int, cleared: int) -> bool:
    """Whether the prompt is as large as the edit waits for, and the edit clears as much as it must."""
    size = tokens if edit.trigger.type == "input_tokens" else len(uses_in(messages))
    return size > edit.trigger.value and (edit.clear_at_least is None or cleared >= edit.clear_at_least.value)


def uses_in(messages: Sequence[Any]) -> list[ToolUseBlockParam]:
    return [block for message in messages for block in message.blocks if isinstance(block, ToolUseBlockParam)]


def clear_uses(messages: Sequence[Message], edit: ToolUsesEdit) -> tuple[list[Message], int]:
    """The messages with the results of older tool uses cleared, and of how many uses."""
    uses = uses_in(messages)
    old = uses[: max(0, len(uses) - edit.keep.value)]
    chosen = {use.id: use for use in old if use.name not in edit.exclude_tools}
    cleared: set[str] = set()

    def change(block: Any) -> Any:
        if isinstance(block, ToolResultBlockParam) and block.tool_use_id in chosen and block.content != CLEARED:
            cleared.add(block.tool_use_id)
            return block.model_copy(update={"content": CLEARED})
        if isinstance(block, ToolUseBlockParam) and block.id in chosen and clears_input(block.name, edit):
            return block.model_copy(update={"input": {}})
        return block

    return [with_blocks(message, [change(block) for block in message.blocks]) for message in messages], len(cleared)


def clears_input(name: str, edit: ToolUsesEdit) -> bool:
    chosen: bool | Collection[str] = edit.clear_tool_inputs
    return chosen if isinstance(chosen, bool) else name in chosen


def clear_thinking(messages: Sequence[Message], edit: ThinkingEdit) -> tuple[list[Message], int]:
    """The messages without the reasoning of older replies, and of how many replies."""
    if edit.keep is None:
        return [*messages], 0
    thinking = [i for i, message in enumerate(messages) if any(is_thinking(block) for block in message.blocks)]
    old = {*thinking[: max(0, len(thinking) - edit.keep.value)]}
    made = [
        with_blocks(message, [block for block in message.blocks if not is_thinking(block)]) if i in old else message
        for i, message in enumerate(messages)
    ]
    return made, len(old)


def is_thinking(block: object) -> bool:
    return isinstance(block, ThinkingBlockParam)


def with_blocks(message: Message, blocks: Sequence[Any]) -> Message:
    same = len(blocks) == len(message.blocks) and all(
        one is other for one, other in zip(blocks, message.blocks, strict=True)
    )
    copied: Message = message if same else message.model_copy(update={"content": [*blocks]})
    return copied
