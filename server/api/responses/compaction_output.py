"""The output of a response that is asked for a compaction: one item, which holds the summary when this is complete."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from server.api.responses import events as events
from server.api.responses.output import OutputItems
from server.api.responses.sealed_reasoning import seal
from server.chat.reply_parser import ContentPiece, Part
from server.schemas.item_texts import ItemLogprob, Status
from server.schemas.items import CompactionItem, Item, entry
from server.turns.summary import no_summary


class CompactionOutput(OutputItems):
    """Collects the text of a summary. Reasoning is left out; a summary that reaches its token limit is one too."""

    cut_is_whole = True
    _id_of_item = ""
    _text = ""

    def take(self, parts: Sequence[Part], logprobs: Sequence[ItemLogprob]) -> Iterator[events.Event]:
        text = "".join(part.text for part in parts if isinstance(part, ContentPiece))
        if not self._id_of_item:
            self._id_of_item = self._id("cmp")
            begun = CompactionItem(self._id_of_item, "")
            yield events.ItemAdded(sequence_number=self._number(), output_index=0, item=begun)
        self._text += text
        if text:
            yield events.Compacting(sequence_number=self._number(), item_id=self._id_of_item, output_index=0)

    def finish(self, status: Status) -> Iterator[events.Event]:
        """The item is complete. Raises a 400 if there is no summary."""
        summary = self._text.strip()
        if not summary:
            raise no_summary()
        item = CompactionItem(self._id_of_item, seal(summary))
        self.items.append(item)
        self.entries.append(entry(item.id, self._text, "completed", item.encrypted_content))
        yield events.ItemDone(sequence_number=self._number(), output_index=0, item=item)

    def snapshot(self, status: Status = "in_progress") -> list[Item]:
        return self.items
