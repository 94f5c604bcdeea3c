"""Request schemas of items: messages, reasoning, references, and what other servers have left in a history."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator

from server.api.responses.call_schemas import (
    InputAddedTools,
    InputCall,
    InputCallOutput,
    InputCustomCall,
    InputCustomOutput,
    InputSearchCall,
    InputSearchOutput,
    InputShellCall,
    InputShellOutput,
    ItemParam,
)
from server.api.responses.part_schemas import Parts, ReadableParts, Text, pieces, texts
from server.api.responses.sealed_reasoning import SEAL, unseal
from server.schemas.adaptations import adapt
from server.schemas.item_texts import InputText, OutputText, ReasoningText, input_part
from server.schemas.items import CompactionItem, Item, MessageItem, ReasoningItem, new_id
from server.schemas.messages import MAX_MESSAGES, Id
from server.schemas.sealed_compaction import SEAL as COMPACTION_SEAL
from server.schemas.sealed_compaction import unseal_messages
from server.schemas.strict import Strict, wrong

VENDOR_ITEMS = frozenset(  # calls of tools that a vendor ran, and what belongs to them
    {
        "apply_patch_call",
        "apply_patch_call_output",
        "code_interpreter_call",
        "computer_call",
        "computer_call_output",
        "configuration_update",
        "file_search_call",
        "image_generation_call",
        "mcp_approval_request",
        "mcp_approval_response",
        "mcp_call",
        "mcp_list_tools",
        "program",
        "program_output",
        "shell_call",
        "shell_call_output",
        "web_search_call",
    }
)


class InputMessage(ItemParam):
    """A message, also one of an earlier reply."""

    IDLE: ClassVar[frozenset[str]] = ItemParam.IDLE | {"phase", "end_turn"}
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Text
    phase: Literal["commentary", "final_answer"] | None = None
    end_turn: bool | None = None

    def to_item(self, session: str | None) -> Item:
        parts = pieces(self.content)
        if self.role == "assistant":
            said = [OutputText(text) for text in parts if isinstance(text, str)]
            return MessageItem(new_id("msg", session), self.role, [*said])
        return MessageItem(new_id("msg", session), self.role, [*map(input_part, parts)])


class AgentMessage(ItemParam):
    """What one agent of a client wrote to another: for the model that reads it, a user's message."""

    type: Literal["agent_message"]
    author: Annotated[str, Field(max_length=512)]
    recipient: Annotated[str, Field(max_length=512)]
    content: ReadableParts

    def to_item(self, session: str | None) -> Item:
        text = "\n".join([f"Message from {self.author} to {self.recipient}:", *texts(self.content)])
        return MessageItem(new_id("msg", session), "user", [InputText(text)])


class InputReasoning(ItemParam):
    """What an earlier reply thought: ``content``, or sealed where a client asked for that. A summary is not used.
    Reasoning that another server has encrypted is left out, as nobody can open it.
    """

    IDLE: ClassVar[frozenset[str]] = ItemParam.IDLE | {"summary"}
    type: Literal["reasoning"]
    summary: Parts = Field(default_factory=list)
    content: ReadableParts = Field(default_factory=list)
    encrypted_content: str | None = None

    @model_validator(mode="after")
    def is_ours(self) -> Self:
        """What looks like ours can be opened."""
        sealed = self.encrypted_content
        if sealed is not None and unseal(sealed) is None:
            if sealed.startswith(SEAL):
                raise wrong("encrypted_content", "was not made by this server")
            adapt("reasoning_dropped", "encrypted_content")
        return self

    def to_item(self, session: str | None) -> Item | None:
        parts = [text for text in texts(self.content) if text]
        if not parts and self.encrypted_content is not None:
            opened = unseal(self.encrypted_content)
            if opened is None:
                return None
            parts = [opened]
        return ReasoningItem(new_id("rs", session), [ReasoningText(text) for text in parts])


class InputCompaction(ItemParam):
    """A summary that takes the place of what came before it. One that another server has encrypted is left out, as
    nobody can open it, and what came before it stays.
    """

    IDLE: ClassVar[frozenset[str]] = ItemParam.IDLE | {"created_by"}
    type: Literal["compaction"]
    encrypted_content: str
    created_by: str | None = None

    @model_validator(mode="after")
    def is_ours(self) -> Self:
        """What looks like ours can be opened."""
        sealed = self.encrypted_content
        if sealed.startswith(COMPACTION_SEAL) and unseal_messages(sealed) is None:
            raise wrong("encrypted_content", "was not made by this server")
        return self

    def to_item(self, session: str | None) -> Item | None:
        ours = self.encrypted_content.startswith(COMPACTION_SEAL)
        if not ours and unseal(self.encrypted_content) is None:
            adapt("item_left_out", "compaction")
            return None
        return CompactionItem(new_id("cmp", session), self.encrypted_content)


class CompactionTrigger(ItemParam):
    """Asks, as the last item, for a compaction in place of a reply. It is no item of the conversation."""

    type: Literal["compaction_trigger"]

    def to_item(self, session: str | None) -> None:
        """None."""


class Reference(Strict):
    """An item that is somewhere already, to be read here again."""

    type: Literal["item_reference"] = "item_reference"
    id: Id


class VendorItem(Strict):
    """An item of a tool that a vendor ran, in a history that another server has made: it is left out."""

    type: str

    @model_validator(mode="before")
    @classmethod
    def only_known(cls, data: Any) -> object:
        """Its type; nothing else is looked at."""
        adapt("item_left_out", data["type"])
        return {"type": data["type"]}

    def to_item(self, session: str | None) -> None:
        """None."""


class Unknown(InputMessage):
    """Items of types that only other servers support: they are refused."""

    @model_validator(mode="before")
    @classmethod
    def only_known(cls, data: object) -> object:
        raise wrong("type", "names a kind of item that this server does not support")


KINDS = frozenset(
    {
        "additional_tools",
        "agent_message",
        "compaction",
        "compaction_trigger",
        "custom_tool_call",
        "custom_tool_call_output",
        "function_call",
        "function_call_output",
        "item_reference",
        "local_shell_call",
        "local_shell_call_output",
        "message",
        "reasoning",
        "tool_search_call",
        "tool_search_output",
    }
)


def kind(value: object) -> str:
    """The item's type, for the union; also of an item that was read already."""
    if not isinstance(value, dict):
        named = getattr(value, "type", "message")
    else:
        named = value.get("type")
        if named is None:
            return "<message>" if "role" in value or "content" in value or "id" not in value else "<item_reference>"
    if not isinstance(named, str):
        return "<unknown>"
    if named in VENDOR_ITEMS:
        return "<vendor>"
    return f"<{named}>" if named in KINDS else "<unknown>"


InputItem = Annotated[
    Annotated[InputMessage, Tag("<message>")]
    | Annotated[AgentMessage, Tag("<agent_message>")]
    | Annotated[InputCall, Tag("<function_call>")]
    | Annotated[InputCallOutput, Tag("<function_call_output>")]
    | Annotated[InputCustomCall, Tag("<custom_tool_call>")]
    | Annotated[InputCustomOutput, Tag("<custom_tool_call_output>")]
    | Annotated[InputSearchCall, Tag("<tool_search_call>")]
    | Annotated[InputSearchOutput, Tag("<tool_search_output>")]
    | Annotated[InputShellCall, Tag("<local_shell_call>")]
    | Annotated[InputShellOutput, Tag("<local_shell_call_output>")]
    | Annotated[InputAddedTools, Tag("<additional_tools>")]
    | Annotated[InputReasoning, Tag("<reasoning>")]
    | Annotated[InputCompaction, Tag("<compaction>")]
    | Annotated[CompactionTrigger, Tag("<compaction_trigger>")]
    | Annotated[Reference, Tag("<item_reference>")]
    | Annotated[VendorItem, Tag("<vendor>")]
    | Annotated[Unknown, Tag("<unknown>")],
    Discriminator(kind),
]
Items = Annotated[list[InputItem], Field(max_length=MAX_MESSAGES), Field(fail_fast=True)]
