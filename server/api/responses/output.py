"""The output items of a response while it is generated, and the stream events about them."""

from __future__ import annotations

import codecs
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec import UNSET, UnsetType

from server.api.responses import events as events
from server.api.responses.client_tools import ToolKey, ToolNames
from server.api.responses.gathering import call_entry
from server.api.responses.sealed_reasoning import seal
from server.chat.reply_parser import ArgumentsPiece, CallStart, ContentPiece, Part, ReasoningPiece
from server.schemas.call_items import call_item
from server.schemas.custom_input import InputStream, input_of
from server.schemas.item_texts import ItemLogprob, OutputText, ReasoningText, Status
from server.schemas.items import Entry, Item, MessageItem, ReasoningItem, entry

NO_TOOL = ToolKey("fc", "")
TEXTS = ("msg", "rs")  # the kinds of items that are text
OBFUSCATED = 32  # the texts of deltas are padded to a multiple of so many characters


@dataclass
class OpenItem:
    """The item that is being generated. ``call_id``, ``key`` and ``name`` are those of a call, its tool and the
    function that this is for the model; ``input`` reads what a custom tool is given.
    """

    id: str
    kind: str  # rs, msg, or a CallKind
    call_id: str = ""
    key: ToolKey = NO_TOOL
    name: str = ""
    input: InputStream = field(default_factory=InputStream)
    pieces: list[str] = field(default_factory=list)
    logprobs: list[ItemLogprob] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.pieces)


class OutputItems:
    """The items of a reply, in order; at most the last one is open. The methods return the events for their changes,
    numbered by ``next_number``. ``cut_is_whole``: output that reaches the token limit is complete all the same.
    """

    cut_is_whole = False

    def __init__(
        self,
        next_id: Callable[[str], str],
        next_number: Callable[[], int],
        names: ToolNames,
        *,
        obfuscate: bool = False,
        seal: bool = False,
    ) -> None:
        """``next_id`` makes an id for a kind of item; ``names`` are the functions that tools are for the model;
        ``seal``: reasoning has ``encrypted_content``."""
        self.items: list[Item] = []
        self.entries: list[Entry] = []
        self._id = next_id
        self._number = next_number
        self._names = names
        self._obfuscate = obfuscate
        self._seal = seal
        self._open: OpenItem | None = None
        self._waiting: list[ItemLogprob] = []  # of tokens whose text is not there yet

    def take(self, parts: Sequence[Part], logprobs: Sequence[ItemLogprob]) -> Iterator[events.Event]:
        """Append parts of the reply."""
        self._waiting.extend(logprobs)
        for part in parts:
            match part:
                case ContentPiece(text):
                    yield from self._to("msg")
                    yield from self._add(text)
                case ReasoningPiece(text):
                    yield from self._to("rs")
                    yield from self._add(text)
                case CallStart(_, id, name):
                    yield from self._close("completed")
                    key = self._names.key(name)
                    yield from self._begin(OpenItem(self._id(key.kind), key.kind, id, key, name))
                case ArgumentsPiece(_, text):
                    yield from self._add_arguments(text)

    def put(self, item: Item) -> Iterator[events.Event]:
        """An item that is complete, and no part of the reply's message."""
        index = len(self.items)
        yield events.ItemAdded(sequence_number=self._number(), output_index=index, item=item)
        self.items.append(item)
        yield events.ItemDone(sequence_number=self._number(), output_index=index, item=item)

    def finish(self, status: Status) -> Iterator[events.Event]:
        """The end of the reply; its last item has this status. A reply without any item is an empty message."""
        if not self.entries and self._open is None:
            yield from self._to("msg")
        yield from self._close(status)

    def cut(self) -> Iterator[events.Event]:
        """The reply was ended from outside: the open item, if any, stays incomplete."""
        yield from self._close("incomplete")

    def snapshot(self, status: Status = "in_progress") -> list[Item]:
        """All items in their current state; the open one has this status."""
        return self.items if self._open is None else [*self.items, self._item(self._open, status)]

    # --- within -------------------------------------------------------------------------------------------

    def _to(self, kind: str) -> Iterator[events.Event]:
        """An item of this kind is open."""
        if self._open is None or self._open.kind != kind:
            yield from self._close("completed")
            yield from self._begin(OpenItem(self._id(kind), kind))

    def _begin(self, item: OpenItem) -> Iterator[events.Event]:
        self._open = item
        index = len(self.items)
        begun = self._item(item, "in_progress", content=False)
        yield events.ItemAdded(sequence_number=self._number(), output_index=index, item=begun)
        if item.kind in TEXTS:
            part = ReasoningText("") if item.kind == "rs" else OutputText("")
            yield events.PartAdded(sequence_number=self._number(), item_id=item.id, output_index=index, part=part)

    def _add(self, text: str) -> Iterator[events.Event]:
        """Text of a message or of reasoning."""
        item = self._open
        assert item is not None, "text of no item"
        item.pieces.append(text)
        spent = self._spent(text)
        if item.kind == "rs":
            yield events.ReasoningDelta(**self._delta(item, text))
            return
        item.logprobs += spent
        yield events.OutputTextDelta(**self._delta(item, text), logprobs=spent)

    def _add_arguments(self, text: str) -> Iterator[events.Event]:
        """A piece of a call's arguments."""
        item = self._open
        assert item is not None, "arguments of no call"
        item.pieces.append(text)
        self._spent(text)
        if item.kind == "fc":
            yield events.ArgumentsDelta(**self._delta(item, text))
        elif item.kind == "ctc" and (told := item.input.feed(text)):
            yield events.CustomInputDelta(**self._delta(item, told))

    def _delta(self, item: OpenItem, text: str) -> dict[str, Any]:
        """What all events about new text have."""
        return {
            "sequence_number": self._number(),
            "item_id": item.id,
            "output_index": len(self.items),
            "delta": text,
            "obfuscation": self._pad(text),
        }

    def _spent(self, text: str) -> list[ItemLogprob]:
        """The waiting tokens that a text is made of; those in front of them were marks. All, if that cannot be told."""
        pieces, whole = decode_pieces(self._waiting)
        start = whole.find(text)
        if start < 0:
            spent, self._waiting = self._waiting, []
            return spent
        spent, place = [], 0
        while self._waiting and place < start + len(text):
            token, piece = self._waiting.pop(0), pieces.pop(0)
            if place + max(1, len(piece)) > start:  # one without a piece is part of the next character
                spent.append(token)
            place += len(piece)
        return spent

    def _close(self, status: Status) -> Iterator[events.Event]:
        """The open item, if there is one, is over."""
        item = self._open
        if item is None:
            return
        index, text = len(self.items), item.text
        place: dict[str, Any] = {"item_id": item.id, "output_index": index}
        if item.kind in TEXTS:
            if item.kind == "rs":
                yield events.ReasoningDone(sequence_number=self._number(), text=text, **place)
            else:
                number = self._number()
                yield events.OutputTextDone(sequence_number=number, text=text, logprobs=item.logprobs, **place)
            part = ReasoningText(text) if item.kind == "rs" else OutputText(text, logprobs=item.logprobs)
            yield events.PartDone(sequence_number=self._number(), part=part, **place)
        elif item.kind == "fc":
            number = self._number()
            yield events.ArgumentsDone(sequence_number=number, name=item.key.name, arguments=text, **place)
        elif item.kind == "ctc":
            told = input_of(text)
            if told and not item.input.begun:  # which only the whole arguments tell
                yield events.CustomInputDelta(**self._delta(item, told))
            yield events.InputDone(sequence_number=self._number(), input=told, **place)
        whole = self._item(item, status)
        self.items.append(whole)
        told_as = (
            entry(item.id, text, status) if item.kind in TEXTS else call_entry(item.id, item.key, item.name, status)
        )
        self.entries.append(told_as)
        self._open = None
        yield events.ItemDone(sequence_number=self._number(), output_index=index, item=whole)

    def _item(self, item: OpenItem, status: Status, content: bool = True) -> Item:
        text = item.text
        match item.kind:
            case "msg":
                parts = [OutputText(text, logprobs=item.logprobs)] if content else []
                return MessageItem(item.id, "assistant", [*parts], status)
            case "rs":
                sealed = seal(text) if self._seal and status != "in_progress" else UNSET
                thoughts = [ReasoningText(text)] if content else []
                return ReasoningItem(item.id, thoughts, encrypted_content=sealed, status=status)
            case _:
                key = item.key
                return call_item(item.kind, item.id, item.call_id, key.name, text, status, key.namespace or UNSET)

    def _pad(self, text: str) -> str | UnsetType:
        """As many random characters as hide how long a text is."""
        if not self._obfuscate:
            return UNSET
        missing = -len(text) % OBFUSCATED
        return secrets.token_urlsafe(missing)[:missing]


def decode_pieces(tokens: Sequence[ItemLogprob]) -> tuple[list[str], str]:
    """The characters that each token's bytes complete, and the text of all of them. Half a character at the end is
    U+FFFD, and in no piece.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    pieces = [decoder.decode(bytes(token.bytes)) for token in tokens]
    return pieces, "".join(pieces) + decoder.decode(b"", True)
