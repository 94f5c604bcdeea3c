"""Request schemas of content blocks. What stands in a history that another server has made, and what only models that
see could read in a tool's result, is replaced or left out, so that it does not end a conversation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from server.media.media import Media
from server.schemas.adaptations import adapt
from server.schemas.media_parts import CheckedMedia
from server.schemas.messages import NAME, Id
from server.schemas.sealed_compaction import SEAL, unseal_messages
from server.schemas.strict import Harmless, Strict, wrong

MAX_BLOCKS = 10_000
SEEN = ("image", "document", "search_result")  # kinds that a tool's result may have beside text
FOREIGN = frozenset(  # what other servers' tools leave in a history
    {
        "advisor_tool_result",
        "bash_code_execution_tool_result",
        "code_execution_tool_result",
        "connector_text",
        "container_upload",
        "fallback",
        "mcp_tool_result",
        "mcp_tool_use",
        "redacted_thinking",
        "server_tool_use",
        "text_editor_code_execution_tool_result",
        "tool_search_tool_result",
        "web_fetch_tool_result",
        "web_search_tool_result",
    }
)


class CacheControl(Strict):
    """What came up to here is to be kept for so long. ``scope``: who else may reuse it; a tenant's KV is its own."""

    IDLE: ClassVar[frozenset[str]] = frozenset({"scope"})
    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] = "5m"
    scope: Annotated[str, Field(max_length=64)] | None = None


class Block(Strict):
    """A block of a message. ``KIND`` is its type."""

    KIND: ClassVar[str]
    cache_control: CacheControl | None = None


def only_text(value: object) -> object:
    """Refuse block types that only other servers support, with an error that says so."""
    kind = value.get("type") if isinstance(value, dict) else "text"
    if isinstance(kind, str) and kind != "text":
        raise wrong("type", "names a kind of content that is not supported by this server")
    return value


class TextBlockParam(Block):
    """Text. ``citations`` of an earlier reply are not read."""

    KIND = "text"
    IDLE: ClassVar[frozenset[str]] = frozenset({"citations"})
    type: Literal["text"]
    text: str
    citations: list[object] | None = None


class ThinkingBlockParam(Strict):
    """What an earlier reply thought. Its signature is not looked at: this server signs nothing."""

    KIND: ClassVar[str] = "thinking"
    IDLE: ClassVar[frozenset[str]] = frozenset({"signature"})
    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class ToolUseBlockParam(Block):
    """A call of an earlier reply."""

    KIND = "tool_use"
    LATER: ClassVar[Harmless] = {"caller": ({"type": "direct"},), "toolset_name": ()}
    type: Literal["tool_use"]
    id: Id
    name: Annotated[str, Field(pattern=NAME)]
    input: dict[str, Any]


class CompactionBlockParam(Block):
    """A summary that takes the place of what came before it; one without ``content`` has failed, and is left out. Of a
    block that another server has made, only the summary is read.
    """

    KIND = "compaction"
    IDLE: ClassVar[frozenset[str]] = frozenset({"signature", "tool_changes"})
    type: Literal["compaction"]
    content: Annotated[str, Field(min_length=1)] | None = None
    encrypted_content: str | None = None
    signature: str | None = None
    tool_changes: list[object] | None = None

    @model_validator(mode="after")
    def is_ours(self) -> Self:
        """What looks like ours can be opened."""
        sealed = self.encrypted_content or ""
        if sealed.startswith(SEAL) and unseal_messages(sealed) is None:
            raise wrong("encrypted_content", "was not made by this server")
        return self


class ForeignBlock(Strict):
    """A block of a tool that another server has run, or that only it can read: it is left out."""

    KIND: ClassVar[str] = "foreign"
    type: str

    @model_validator(mode="before")
    @classmethod
    def left_out(cls, data: Any) -> object:
        """Its type; nothing else is looked at."""
        adapt("block_left_out", data["type"])
        return {"type": data["type"]}


class ReplacedBlock(Strict):
    """A block of a tool's result that is no text: the text that takes its place."""

    KIND: ClassVar[str] = "replaced"
    type: str
    text: str

    @model_validator(mode="before")
    @classmethod
    def as_text(cls, data: Any) -> object:
        """The text of a document or search result that has one, else its kind in brackets."""
        return {"type": data["type"], "text": text_in(data)}


def text_in(block: Mapping[str, Any]) -> str:
    """The text of a block that may hold one."""
    kind, source, content = block["type"], block.get("source"), block.get("content")
    if kind == "document" and isinstance(source, dict) and source.get("type") == "text":
        return str(source.get("data", ""))
    if kind == "search_result" and isinstance(content, list):
        texts = [part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str)]
        return "\n".join([str(block.get("title", "")), *texts])
    adapt("image_replaced" if kind == "image" else "document_replaced", "tool_result")
    return f"[{kind}]"


def kind_of_result(value: object) -> str:
    """The kind of a block in a tool's result, for the union."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    if kind == "tool_reference":
        return "<tool_reference>"
    if isinstance(value, Media):
        return "<media>"
    return "<replaced>" if kind in SEEN else "<text>"


class ToolReferenceBlockParam(Block):
    """A tool that a call has found: it can be called from here on. Its definition is in ``tools``, where it is
    deferred.
    """

    KIND = "tool_reference"
    type: Literal["tool_reference"]
    tool_name: Annotated[str, Field(pattern=NAME)]


Text = Annotated[TextBlockParam, BeforeValidator(only_text)]
Texts = Annotated[
    Annotated[str, Tag("<string>")]
    | Annotated[list[Text], Field(max_length=MAX_BLOCKS), Field(fail_fast=True), Tag("<list>")],
    Discriminator(lambda value: "<list>" if isinstance(value, list) else "<string>"),
]
ResultBlock = Annotated[
    Annotated[Text, Tag("<text>")]
    | Annotated[ToolReferenceBlockParam, Tag("<tool_reference>")]
    | Annotated[CheckedMedia, Tag("<media>")]
    | Annotated[ReplacedBlock, Tag("<replaced>")],
    Discriminator(kind_of_result),
]
Results = Annotated[
    Annotated[str, Tag("<string>")]
    | Annotated[list[ResultBlock], Field(max_length=MAX_BLOCKS), Field(fail_fast=True), Tag("<list>")],
    Discriminator(lambda value: "<list>" if isinstance(value, list) else "<string>"),
]


class ToolResultBlockParam(Block):
    """What a call gave back."""

    KIND = "tool_result"
    LATER: ClassVar[Harmless] = {"toolset_name": ()}
    type: Literal["tool_result"]
    tool_use_id: Id
    content: Results = ""
    is_error: bool = False

    @property
    def references(self) -> list[str]:
        """The names of the tools that were found."""
        blocks = [] if isinstance(self.content, str) else self.content
        return [block.tool_name for block in blocks if isinstance(block, ToolReferenceBlockParam)]


class ToolName(Strict):
    """A tool by its name."""

    type: Literal["tool_reference"]
    name: Annotated[str, Field(pattern=NAME)]


class ToolAdditionBlockParam(Block):
    """From here on, a tool of ``tools`` can be called."""

    KIND = "tool_addition"
    type: Literal["tool_addition"]
    tool: ToolName


class ToolRemovalBlockParam(Block):
    """From here on, a tool can no longer be called."""

    KIND = "tool_removal"
    type: Literal["tool_removal"]
    tool: ToolName


KINDS = ("compaction", "thinking", "tool_use", "tool_result", "tool_reference", "tool_addition", "tool_removal")


def kind_of(value: object) -> str:
    """The block's type, for the union; unknown ones are validated, and so refused, as text."""
    if isinstance(value, Media):
        return "<media>"
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    empty = kind == "compaction" and isinstance(value, dict) and value.get("content") is None
    if empty or (isinstance(kind, str) and kind in FOREIGN):
        return "<foreign>"
    return f"<{kind}>" if isinstance(kind, str) and kind in KINDS else "<text>"


AnyBlock = Annotated[
    Annotated[Text, Tag("<text>")]
    | Annotated[ThinkingBlockParam, Tag("<thinking>")]
    | Annotated[ToolUseBlockParam, Tag("<tool_use>")]
    | Annotated[ToolResultBlockParam, Tag("<tool_result>")]
    | Annotated[ToolReferenceBlockParam, Tag("<tool_reference>")]
    | Annotated[ToolAdditionBlockParam, Tag("<tool_addition>")]
    | Annotated[ToolRemovalBlockParam, Tag("<tool_removal>")]
    | Annotated[CompactionBlockParam, Tag("<compaction>")]
    | Annotated[CheckedMedia, Tag("<media>")]
    | Annotated[ForeignBlock, Tag("<foreign>")],
    Discriminator(kind_of),
]


def readable(value: object) -> object:
    """The blocks of a message. What is seen beside tool results comes from the tools, so that it is replaced there."""
    if not isinstance(value, list):
        return value
    results = any(isinstance(block, dict) and block.get("type") == "tool_result" for block in value)
    return [readable_block(block, results) if isinstance(block, dict) else block for block in value]


def readable_block(block: dict[str, Any], beside_results: bool) -> dict[str, Any]:
    """A block, as text if it is seen beside tool results."""
    kind = block.get("type")
    if beside_results and kind in SEEN:
        return {"type": "text", "text": text_in(block)}
    return block


Content = Annotated[
    Annotated[str, Tag("<string>")]
    | Annotated[list[AnyBlock], Field(max_length=MAX_BLOCKS), Field(fail_fast=True), Tag("<list>")],
    Discriminator(lambda value: "<list>" if isinstance(value, list) else "<string>"),
    BeforeValidator(readable),
]
MAY_HOLD = {
    "user": {"text", "tool_result", "compaction", "foreign", "image"},
    "assistant": {"text", "thinking", "tool_use", "compaction", "foreign"},
    "system": {"text", "tool_addition", "tool_removal"},
}
