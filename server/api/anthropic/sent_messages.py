"""Messages in the form of a chat's request, to which a Messages request is translated; and those that a
``compaction`` block stands for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from server.api.anthropic.block_schemas import CompactionBlockParam
from server.api.anthropic.schemas import AnthropicMessageParam
from server.chat.compaction import GO_ON, summary_messages
from server.log.logged_message import LoggedMessage
from server.schemas.sealed_compaction import unseal_messages

ADDS, REMOVES = "adds", "removes"  # names of tools, in a message until ``tool_changes`` has read them


def as_sent(message: LoggedMessage) -> dict[str, Any]:
    """A logged message as a chat's request would have it."""
    made: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning_content:
        made["reasoning_content"] = message.reasoning_content
    if message.tool_calls:
        made["tool_calls"] = [*msgspec.to_builtins(message.tool_calls)]
    if message.role == "tool":
        made["tool_call_id"] = message.tool_call_id
    made[ADDS] = [tool["function"]["name"] for tool in message.added_tools]
    made[REMOVES] = [*message.removed_tools]
    return made


def open_compaction(
    messages: Sequence[AnthropicMessageParam],
) -> tuple[list[dict[str, Any]], list[AnthropicMessageParam]]:
    """What the compaction that a history begins with stands for (nothing if it begins with none), and the messages
    behind it. What follows a summary is asked for by the user, if only to go on.
    """
    first, *rest = messages
    block, behind = next(iter(first.blocks), None), [*first.blocks[1:]]
    if not isinstance(block, CompactionBlockParam):
        return [], [*messages]
    if behind:
        rest = [first.model_copy(update={"content": behind}), *rest]
    compacted = messages_in(block)
    if compacted[-1].role == "assistant" and (not rest or rest[0].role == "assistant"):
        compacted.append(LoggedMessage("user", GO_ON))
    return [as_sent(message) for message in compacted], rest


def messages_in(block: CompactionBlockParam) -> list[LoggedMessage]:
    """The question, the summary, and the newest messages where this server has made the block."""
    assert block.content is not None
    kept = unseal_messages(block.encrypted_content or "")
    if kept is None:
        return summary_messages(block.content)
    kept[1] = replace(kept[1], content=block.content)
    return kept
