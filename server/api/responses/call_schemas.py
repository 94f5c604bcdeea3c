"""Request schemas of calls of tools and of what these gave back."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, Self

from msgspec import UNSET
from pydantic import Field, model_validator

from server.api.responses.client_tools import ClientTool, Execution
from server.api.responses.part_schemas import Output, pieces
from server.api.responses.tool_schemas import AnyObject, ResponseTools, client_tools, note_tools, tool_objects
from server.schemas.call_items import (
    CallItem,
    CallOutputItem,
    CustomCallItem,
    CustomOutputItem,
    SearchCallItem,
    SearchOutputItem,
    ShellCallItem,
    ShellOutputItem,
    shell_action,
)
from server.schemas.item_texts import InputPart, input_part
from server.schemas.items import AddedToolsItem, Item, new_id
from server.schemas.messages import NAME, CallArguments, Id
from server.schemas.strict import Strict, missing_field_error

ItemStatus = Literal["in_progress", "completed", "incomplete"]
Name = Annotated[str, Field(pattern=NAME)]


class ItemParam(Strict):
    """What all items may have. An ``id`` that comes along is not kept; the rest are notes of clients and servers."""

    IDLE: ClassVar[frozenset[str]] = frozenset(
        {"caller", "created_by", "internal_chat_message_metadata_passthrough", "metadata", "status"}
    )
    id: Id | None = None
    status: ItemStatus | None = None
    metadata: AnyObject | None = None
    internal_chat_message_metadata_passthrough: AnyObject | None = None
    created_by: str | None = None
    caller: AnyObject | None = None


class InputCall(ItemParam):
    """A call of an earlier reply. ``parsed_arguments`` are what a client has made of the arguments."""

    LATER: ClassVar[Mapping[str, tuple[object, ...]]] = {"async": (False,), "encrypted_function_args": ([],)}
    IDLE: ClassVar[frozenset[str]] = ItemParam.IDLE | {"parsed_arguments"}
    type: Literal["function_call"]
    call_id: Id
    name: Name
    arguments: CallArguments
    parsed_arguments: object = None
    namespace: Name | None = None

    def to_item(self, session: str | None) -> Item:
        space = self.namespace or UNSET
        return CallItem(new_id("fc", session), self.call_id, self.name, self.arguments, namespace=space)


class InputCustomCall(ItemParam):
    """A call of a custom tool."""

    LATER: ClassVar[Mapping[str, tuple[object, ...]]] = {"async": (False,)}
    type: Literal["custom_tool_call"]
    call_id: Id
    name: Name
    input: str
    namespace: Name | None = None

    def to_item(self, session: str | None) -> Item:
        space = self.namespace or UNSET
        return CustomCallItem(new_id("ctc", session), self.call_id, self.name, self.input, namespace=space)


class InputSearchCall(ItemParam):
    """A search for tools; one that a vendor did has no ``call_id``."""

    type: Literal["tool_search_call"]
    call_id: Id | None = None
    execution: Execution = "server"
    arguments: object = None

    def to_item(self, session: str | None) -> Item | None:
        if self.call_id is None:
            return None
        return SearchCallItem(new_id("tsc", session), self.call_id, self.arguments)


class ShellAction(Strict):
    """A command."""

    type: Literal["exec"] = "exec"
    command: Annotated[list[str], Field(max_length=10_000)]
    env: dict[str, str] | None = None
    timeout_ms: int | None = None
    user: str | None = None
    working_directory: str | None = None


class ShellParam(ItemParam):
    """A command, or what it printed: an output has to find its call, by either field."""

    call_id: Id | None = None

    @model_validator(mode="after")
    def is_named(self) -> Self:
        if self.call_id is None and self.id is None:
            raise missing_field_error("call_id")
        return self


class InputShellCall(ShellParam):
    """A command that a model gave; some clients name the call by the item's id."""

    type: Literal["local_shell_call"]
    action: ShellAction

    def to_item(self, session: str | None) -> Item:
        action = shell_action(self.action.model_dump())
        return ShellCallItem(new_id("lsh", session), self.call_id or self.id or "", action)


class OutputParam(ItemParam):
    """What outputs have in common: the call, and what it gave back. Some name the tool again."""

    IDLE: ClassVar[frozenset[str]] = ItemParam.IDLE | {"name", "namespace"}
    call_id: Id
    output: Output
    name: str | None = None
    namespace: str | None = None

    @property
    def given(self) -> str | list[InputPart]:
        return self.output if isinstance(self.output, str) else [*map(input_part, pieces(self.output))]


class InputCallOutput(OutputParam):
    """What a function gave back."""

    type: Literal["function_call_output"]

    def to_item(self, session: str | None) -> Item:
        return CallOutputItem(new_id("fco", session), self.call_id, self.given)


class InputCustomOutput(OutputParam):
    """What a custom tool gave back."""

    type: Literal["custom_tool_call_output"]

    def to_item(self, session: str | None) -> Item:
        return CustomOutputItem(new_id("ctco", session), self.call_id, self.given)


class InputShellOutput(ShellParam):
    """What a command printed; the specification names its call by ``id``."""

    type: Literal["local_shell_call_output"]
    output: str

    def to_item(self, session: str | None) -> Item:
        return ShellOutputItem(new_id("lsho", session), self.call_id or self.id or "", self.output)


class NewTools(ItemParam):
    """Tools that can be called from here on."""

    tools: ResponseTools

    @model_validator(mode="after")
    def notes(self) -> Self:
        """Note what is taken otherwise."""
        note_tools(self.tools)
        return self

    @cached_property
    def client_tools(self) -> list[ClientTool]:
        """Those that are called here."""
        return client_tools(self.tools)

    @property
    def sent(self) -> list[Any]:
        return tool_objects(self.tools)


class InputSearchOutput(NewTools):
    """The tools that a search has found. What a vendor's search found can be called too."""

    type: Literal["tool_search_output"]
    call_id: Id | None = None
    execution: Execution | None = None

    def to_item(self, session: str | None) -> Item | None:
        if self.call_id is None:
            return AddedToolsItem(new_id("at", session), self.sent)
        return SearchOutputItem(new_id("tso", session), self.call_id, self.sent)


class InputAddedTools(NewTools):
    """Tools that an application adds."""

    type: Literal["additional_tools"]
    role: Literal["developer"] = "developer"

    def to_item(self, session: str | None) -> Item:
        return AddedToolsItem(new_id("at", session), self.sent)
