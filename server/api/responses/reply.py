"""Writes a response: the object, its stream events, and the record that is stored."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import partial

import msgspec
from msgspec.structs import replace

from scheduler.protocol import Delta, FinishReason
from server.api.responses import events as events
from server.api.responses.client_tools import ToolNames
from server.api.responses.gathering import key_of
from server.api.responses.objects import (
    IncompleteDetails,
    InputDetails,
    OutputDetails,
    ResponseError,
    ResponseObject,
    ResponseStatus,
    ResponseUsage,
)
from server.api.responses.output import OutputItems
from server.chat.partial_reply import PartialReply
from server.chat.reply_parser import ArgumentsPiece, CallStart, ContentPiece, Part, ReasoningPiece
from server.errors import ApiError
from server.http.event_recording import EventRecording, read_recording
from server.log.logged_message import LoggedMessage
from server.log.response_rows import StoredResponse, TurnExtras
from server.schemas import objects
from server.schemas.call_items import CallBase, arguments_of
from server.schemas.item_texts import ItemLogprob, ItemTopLogprob, OutputText
from server.schemas.items import AddedToolsItem, CompactionItem, Item, MessageItem, ReasoningItem, new_id
from server.turns.replies import CacheField, Reply, ReplyHead, UsageField, UsageOptions, chat_logprob, encoder

EVERYWHERE = UsageOptions(at_end=False, everywhere=True, elsewhere=msgspec.UNSET)
ENDS = {"completed": events.Completed, "incomplete": events.Incomplete, "cancelled": events.Incomplete}
STATUSES: dict[objects.Finish, ResponseStatus] = {"length": "incomplete", "cancelled": "cancelled"}  # else completed
CODES = {429: "rate_limit_exceeded", 400: "invalid_prompt"}  # otherwise server_error


class SequenceNumbers:
    """The numbers of a response's events, from 0; they can be set back if events were not sent."""

    def __init__(self) -> None:
        self.next = 0

    def __call__(self) -> int:
        self.next += 1
        return self.next - 1


class ResponseReply(Reply):
    """One response. What it has told so far is in ``response``; ``recording``, if there is one, gets every event.

    ``kept`` and ``inputs`` say what is stored with its turn: the key within its session and the input items, and
    ``begins`` what a session that begins with it is like. None of it for a response that is not stored. ``names`` are
    the functions that the tools are. ``compaction``: what the output begins with, where the conversation was compacted
    before the reply.
    """

    done = b""
    has_output = True

    def __init__(
        self,
        head: ReplyHead,
        response: ResponseObject,
        *,
        key: str | None,
        names: ToolNames,
        inputs: Sequence[Item] = (),
        begins: TurnExtras | None = None,
        recording: EventRecording | None = None,
        obfuscate: bool = False,
        seal: bool = False,
        logprobs: bool = False,
        compaction: CompactionItem | None = None,
        make_output: type[OutputItems] = OutputItems,
    ) -> None:
        super().__init__(head, EVERYWHERE)
        self.recording = recording
        self._response = response
        self._key = key
        self._inputs = inputs
        self._begins = begins or TurnExtras()
        self._logprobs = logprobs
        self._number = SequenceNumbers()
        session = None if isinstance(head.session, msgspec.UnsetType) else head.session
        made = partial(new_id, session=session)
        self._output = make_output(made, self._number, names, obfuscate=obfuscate, seal=seal)
        self._compaction = compaction  # until the output has it
        self._last: list[events.Event] | None = None  # once the reply has ended

    # --- what a stream tells ------------------------------------------------------------------------------

    def begin(self) -> Iterable[events.Event]:
        """The events before the turn is admitted: those of a response in the background, which has been told of."""
        yield events.Created(sequence_number=self._number(), response=self._response)
        yield events.Queued(sequence_number=self._number(), response=self._response)

    def open_choice(self, index: int, usage: UsageField) -> Sequence[events.Event]:
        told: list[events.Event] = []
        if self._response.status != "queued":
            told.append(events.Created(sequence_number=self._number(), response=self._response))
        self._response = replace(self._response, status="in_progress")
        told.append(events.InProgress(sequence_number=self._number(), response=self._response))
        return [*told, *self._put_compaction()]

    def write_delta(self, index: int, delta: Delta, parts: Sequence[Part], usage: UsageField) -> Sequence[events.Event]:
        return [*self._output.take(parts, self._entries(delta))]

    def observe_delta(self, index: int, delta: Delta, parts: Sequence[Part]) -> None:
        self._put_compaction()
        for _ in self._output.take(parts, self._entries(delta)):
            pass

    def end_choice(
        self, index: int, partial_reply: PartialReply, usage: UsageField, cache: CacheField
    ) -> Sequence[events.Event]:
        assert isinstance(usage, objects.Usage)
        return self._end(partial_reply, usage, None if isinstance(cache, msgspec.UnsetType) else cache)

    def end_stream(
        self, partial_replies: Sequence[PartialReply], usage: objects.Usage, cache: CacheField
    ) -> Sequence[events.Event]:
        return ()

    def encode_event(self, told: msgspec.Struct) -> bytes:
        data = frame_event(told)
        if self.recording is not None:
            self.recording.add(data)
        return data

    def encode_failure(self, error: ApiError) -> bytes:
        return b"".join(map(self.encode_event, self.write_failure(error)))

    def write_failure(self, error: ApiError) -> tuple[events.ErrorEvent, events.Failed]:
        """An error, then the response as it has failed."""
        info = error.body.error
        if self._last is not None:  # which nobody has heard: it could not be committed
            self._number.next = self._last[0].sequence_number
        response = self.fail(error)
        return (
            events.ErrorEvent(sequence_number=self._number(), code=info.code, message=info.message, param=info.param),
            events.Failed(sequence_number=self._number(), response=response),
        )

    # --- what is kept -------------------------------------------------------------------------------------

    @property
    def response(self) -> ResponseObject:
        if self._last is not None or self._response.status not in ("queued", "in_progress"):
            return self._response
        return replace(self._response, output=self._output.snapshot())

    def write_body(
        self, partial_replies: Sequence[PartialReply], usage: objects.Usage, cache: objects.CacheReceipt | None
    ) -> ResponseObject:
        self._end(partial_replies[0], usage, cache)
        return self._response

    def message(self, partial_reply: PartialReply) -> LoggedMessage:
        return replace(partial_reply.message(), items=tuple(self._output.entries))

    def turn_extras(self, partial_reply: PartialReply, usage: objects.Usage, cache: objects.CacheReceipt) -> TurnExtras:
        last = self._end(partial_reply, usage, cache)
        if self._key is None:
            return self._begins
        recording = None if self.recording is None else self.recording.whole([frame_event(told) for told in last])
        return dataclasses.replace(self._begins, response=self.to_stored(recording))

    def to_stored(self, recording: bytes | None = None) -> StoredResponse:
        """The response as it is now, for the log."""
        assert self._key is not None
        response = self.response
        return StoredResponse(
            self._key,
            response.status,
            response.created_at,
            encoder.encode(response).decode(),
            encoder.encode(self._inputs).decode(),
            events=recording,
        )

    def fail(self, error: ApiError) -> ResponseObject:
        """Mark the response as failed."""
        code = CODES.get(error.status_code, "server_error")
        told = ResponseError(code, error.body.error.message)
        output = self._output.snapshot("incomplete")
        self._response = replace(
            self._response, status="failed", error=told, output=output, completed_at=None, incomplete_details=None
        )
        return self._response

    def cancel(self) -> bytes:
        """Mark the response as cancelled. Returns its last events."""
        if self._last is None:
            closing = [*self._output.cut()]
        else:  # they are those of a commit that never came to be: nobody has heard them
            closing = self._last[:-1]
            self._number.next = self._last[-1].sequence_number
        self._response = replace(
            self._response,
            status="cancelled",
            output=self._output.items,
            completed_at=None,
            incomplete_details=None,
        )
        end = events.Incomplete(sequence_number=self._number(), response=self._response)
        return b"".join(map(self.encode_event, [*closing, end]))

    def status_of(self, partial_reply: PartialReply) -> ResponseStatus:
        """The status of the response when this reply has ended."""
        if partial_reply.finish == "length" and self._output.cut_is_whole:
            return "completed"
        return STATUSES.get(partial_reply.finish or "stop", "completed")

    # --- within -------------------------------------------------------------------------------------------

    def _put_compaction(self) -> list[events.Event]:
        """The events of the compaction that the output begins with; none if it has it already."""
        item, self._compaction = self._compaction, None
        return [] if item is None else [*self._output.put(item)]

    def _end(
        self, partial_reply: PartialReply, usage: objects.Usage, cache: objects.CacheReceipt | None
    ) -> list[events.Event]:
        """The last events, the same each time."""
        if self._last is None:
            status = self.status_of(partial_reply)
            whole = status == "completed"
            last = [*self._output.finish("completed" if whole else "incomplete")] if self.has_output else []
            self._response = replace(
                self._response,
                status=status,
                completed_at=int(time.time()) if whole else None,
                incomplete_details=IncompleteDetails() if status == "incomplete" else None,
                output=self._output.items,
                usage=usage_of(usage),
                cache=cache,
            )
            self._last = [*last, ENDS[status](sequence_number=self._number(), response=self._response)]
        return self._last

    def _entries(self, delta: Delta) -> list[ItemLogprob]:
        """The log-probabilities of a delta, but for the token that only ends the reply."""
        if not self._logprobs:
            return []
        ends = delta.finish_reason == FinishReason.STOP and not isinstance(delta.stop, str)
        return [logprob_of(chat_logprob(entry)) for entry in (delta.logprobs[:-1] if ends else delta.logprobs)]


def frame_event(told: msgspec.Struct) -> bytes:
    """A server-sent event with the name of its type."""
    return b"event: %s\ndata: %s\n\n" % (str(told.__struct_config__.tag).encode(), encoder.encode(told))


def usage_of(usage: objects.Usage) -> ResponseUsage:
    cached = usage.prompt_tokens_details.cached_tokens
    return ResponseUsage(
        usage.prompt_tokens,
        InputDetails(cached, usage.prompt_tokens - cached),
        usage.completion_tokens,
        OutputDetails(usage.completion_tokens_details.reasoning_tokens),
        usage.total_tokens,
    )


def logprob_of(entry: objects.ChatLogprob) -> ItemLogprob:
    top = [ItemTopLogprob(other.token, other.bytes, other.logprob) for other in entry.top_logprobs]
    return ItemLogprob(entry.token, entry.bytes, entry.logprob, top)


def replay_events(response: ResponseObject) -> Iterator[events.Event]:
    """The events of a finished response, with one delta per text."""
    numbers, ids = itertools.count(), iter([item.id for item in response.output])
    sealed = any(isinstance(item, ReasoningItem) and item.encrypted_content for item in response.output)
    names = ToolNames(key_of(item) for item in response.output if isinstance(item, CallBase))
    output = OutputItems(lambda kind: next(ids), lambda: next(numbers), names, seal=sealed)
    begun = replace(response, status="in_progress", output=[], usage=None, completed_at=None, cache=msgspec.UNSET)
    begun = replace(begun, incomplete_details=None)
    yield events.Created(sequence_number=next(numbers), response=begun)
    yield events.InProgress(sequence_number=next(numbers), response=begun)
    for index, item in enumerate(response.output):
        match item:
            case MessageItem(content=[OutputText(text, logprobs=logprobs), *_]):
                yield from output.take([ContentPiece(text)], logprobs)
            case ReasoningItem(content=[part, *_]):
                yield from output.take([ReasoningPiece(part.text)], ())
            case CompactionItem():
                next(ids)
                yield from output.put(item)
            case CallBase():
                call = CallStart(index, item.call_id, names.name(key_of(item)))
                yield from output.take([call, ArgumentsPiece(index, arguments_of(item))], ())
    if response.output:
        last = response.output[-1]
        assert not isinstance(last, AddedToolsItem), "no model adds them"
        if not isinstance(last, CompactionItem):
            yield from output.finish(last.status)
    yield ENDS.get(response.status, events.Failed)(sequence_number=next(numbers), response=response)


def events_of(stored: StoredResponse, start: int) -> Iterable[bytes]:
    """The events of a finished response, as recorded; if they were not recorded, derived from the response."""
    if stored.events is not None:
        return read_recording(stored.events, start)
    response = msgspec.json.decode(stored.body, type=ResponseObject)
    events = [*replay_events(response)]
    return map(frame_event, events[start:] or [replace(events[-1], sequence_number=start)])
