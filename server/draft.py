"""One reply as far as it has come."""

from __future__ import annotations

from dataclasses import dataclass, field

from scheduler.messages import Delta, FinishReason, TokenLogprob
from server.objects import Finish
from server.reading import Arguments, Call, Content, Part, Plain, Reading, Reasoning
from server.timeline import Message

FINISH: dict[FinishReason, Finish] = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


@dataclass
class ToolCall:
    """A call of a tool; ``arguments`` is a JSON text, unfinished while ``finish`` of its draft is None."""

    id: str
    name: str
    arguments: str = ""


@dataclass
class Draft:
    """What one choice has told so far, read by ``reading``."""

    reading: Reading = field(default_factory=Plain)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    finish: Finish | None = None
    _content: list[str] = field(default_factory=list)
    _reasoning: list[str] = field(default_factory=list)

    def add(self, delta: Delta) -> list[Part]:
        """Append one delta; what its text was read as."""
        self.tokens.extend(delta.tokens)
        self.logprobs.extend(delta.logprobs)
        self.prompt_logprobs.extend(delta.prompt_logprobs)
        parts = self.reading.feed(delta.text)
        if delta.finish_reason is not None:
            parts += self.reading.finish()
        for part in parts:
            self._take(part)
        if delta.finish_reason is not None:
            finish = FINISH[delta.finish_reason]
            self.finish = "tool_calls" if finish == "stop" and self.calls else finish
        return parts

    def _take(self, part: Part) -> None:
        match part:
            case Content(text):
                self._content.append(text)
            case Reasoning(text):
                self._reasoning.append(text)
            case Call(_, id, name):
                self.calls.append(ToolCall(id, name))
            case Arguments(index, text):
                self.calls[index].arguments += text

    @property
    def content(self) -> str:
        """The answer so far."""
        return "".join(self._content)

    @property
    def reasoning(self) -> str:
        """What was thought so far."""
        return "".join(self._reasoning)

    def message(self) -> Message:
        """The reply as the log holds it and templates read it: fields that would be empty are left out, but
        ``content``."""
        message: Message = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.calls
            ]
        return message
