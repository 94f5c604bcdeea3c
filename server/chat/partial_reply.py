"""``PartialReply``: the part of one choice that has been generated so far, parsed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from scheduler.protocol import Delta, FinishReason, TokenLogprob
from server.chat.reply_parser import (
    ArgumentsPiece,
    CallStart,
    ContentPiece,
    Part,
    PlainParser,
    ReasoningPiece,
    ReplyParser,
)
from server.log.logged_message import LoggedCall, LoggedFunction, LoggedMessage
from server.schemas.objects import Finish

FINISH: dict[FinishReason, Finish] = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.CANCELLED: "cancelled",
}


@dataclass
class ParsedCall:
    """A tool call; ``arguments`` is JSON text, incomplete while the reply's ``finish`` is None."""

    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class PartialReply:
    """The part of one choice that has been generated so far, parsed by ``parser``."""

    parser: ReplyParser = field(default_factory=PlainParser)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: Sequence[TokenLogprob] = ()
    reasoning_tokens: int = 0
    thinking_cut: bool = False  # its budget for reasoning was spent, and the end was forced
    drafts: Mapping[str, tuple[int, int]] = field(default_factory=dict)  # by source: tokens drafted, tokens accepted
    calls: list[ParsedCall] = field(default_factory=list)
    finish: Finish | None = None
    stop: str | int | None = None  # the stop string or stop token id that ended it
    _content: list[str] = field(default_factory=list)
    _reasoning: list[str] = field(default_factory=list)
    _untold: int = 0  # tokens whose text is held back
    _thinks: bool = False  # whether what was told last is reasoning

    def add(self, delta: Delta) -> list[Part]:
        """Append one delta. Returns the parts parsed from its text."""
        self.tokens.extend(delta.tokens)
        self.logprobs.extend(delta.logprobs)
        if delta.prompt_logprobs:
            self.prompt_logprobs = (*self.prompt_logprobs, *delta.prompt_logprobs)
        self.thinking_cut = self.thinking_cut or delta.thinking_cut
        parts = self.parser.feed(delta.text)
        if delta.finish_reason is not None:
            parts += self.parser.finish()
        for part in parts:
            self.take(part)
        self._count(len(delta.tokens), parts)
        if delta.finish_reason is not None:
            self.stop, self.drafts = delta.stop, delta.drafts
            finish = FINISH[delta.finish_reason]
            self.finish = "tool_calls" if finish == "stop" and self.calls else finish
        return parts

    def _count(self, tokens: int, parts: Sequence[Part]) -> None:
        """Tell reasoning from the rest: what is held back belongs to what was told before it, and where several tokens
        come at once, characters tell."""
        if not parts:
            self._untold += tokens
            return
        if self._thinks or isinstance(parts[0], ReasoningPiece):
            self.reasoning_tokens += self._untold
        self._untold = 0
        self._thinks = isinstance(parts[-1], ReasoningPiece)
        lengths = [
            (isinstance(part, ReasoningPiece), len(part.name if isinstance(part, CallStart) else part.text))
            for part in parts
        ]
        whole = sum(length for _, length in lengths)
        if whole:
            thought = sum(length for is_thought, length in lengths if is_thought)
            self.reasoning_tokens += round(tokens * thought / whole)

    def take(self, part: Part) -> None:
        match part:
            case ContentPiece(text):
                self._content.append(text)
            case ReasoningPiece(text):
                self._reasoning.append(text)
            case CallStart(_, id, name):
                self.calls.append(ParsedCall(id, name))
            case ArgumentsPiece(index, text):
                self.calls[index].arguments += text

    @property
    def content(self) -> str:
        return "".join(self._content)

    @property
    def reasoning(self) -> str:
        return "".join(self._reasoning)

    def message(self) -> LoggedMessage:
        calls = tuple(LoggedCall(call.id, "function", LoggedFunction(call.name, call.arguments)) for call in self.calls)
        return LoggedMessage("assistant", self.content, reasoning_content=self.reasoning, tool_calls=calls)


class FinishedReply:
    """A parser that returns the parts of a complete reply, without parsing."""

    def __init__(self, message: LoggedMessage) -> None:
        self._parts: list[Part] = []
        if message.reasoning_content:
            self._parts.append(ReasoningPiece(message.reasoning_content))
        if message.content:
            self._parts.append(ContentPiece(message.content))
        for index, call in enumerate(message.tool_calls):
            self._parts.append(CallStart(index, call.id, call.function.name))
            self._parts.append(ArgumentsPiece(index, call.function.arguments))

    def feed(self, text: str) -> list[Part]:
        """All parts at once."""
        parts, self._parts = self._parts, []
        return parts

    def finish(self) -> list[Part]:
        """Empty: nothing is held back."""
        return []
