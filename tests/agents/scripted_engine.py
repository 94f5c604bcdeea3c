"""The engine process with a model that says what a script gives: the forward is real, the drawn tokens are not.

``AGENTS_SCRIPT`` names the script, which is read at each turn. Run as a module, in place of ``scheduler``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from agents.script import Reply, Script
from transformers import AutoTokenizer

from scheduler.__main__ import run
from scheduler.core import engine_core
from scheduler.core.sampling import Sampler, SamplerOutput
from scheduler.core.turn import Turn

ASKED = [{"role": "user", "content": "x"}]


class ScriptedSampler(Sampler):
    """Draws the tokens of the script's reply to each turn's prompt."""

    def __init__(self, eos_token_ids: tuple[int, ...]) -> None:
        super().__init__(eos_token_ids)
        self._tokenizer: Any = AutoTokenizer.from_pretrained(os.environ["AGENTS_MODEL"])
        self._path = Path(os.environ["AGENTS_SCRIPT"])
        self._replies: dict[str, list[int]] = {}

    def draw(self, logits: torch.Tensor, turns: Sequence[Turn]) -> SamplerOutput:
        """The script's next token of each row; what the logits say has no effect."""
        return SamplerOutput(logits, [self._next(turn) for turn in turns], [turn.request.logprobs for turn in turns])

    def _next(self, turn: Turn) -> int:
        name = turn.request.turn
        if name not in self._replies:
            self._replies[name] = self._reply(turn)
        ids = self._replies[name]
        return ids[min(turn.generated, len(ids) - 1)]

    def _reply(self, turn: Turn) -> list[int]:
        """The ids of a whole reply, with the end of its message."""
        script = Script.read(self._path)
        if turn.constraint is not None:
            return [*self._encode(script.constrained), self._tokenizer.eos_token_id]
        prompt = self._tokenizer.decode(turn.ids[: turn.prompt_length].tolist(), skip_special_tokens=False)
        return self._encode(self._render(script.reply_to(prompt), prompt))

    def _render(self, reply: Reply, prompt: str) -> str:
        """As the chat template writes a reply behind the beginning that the prompt ends with."""
        calls = [
            {"id": f"call{number:05}", "type": "function", "function": call} for number, call in enumerate(reply.calls)
        ]
        message: dict[str, Any] = {"role": "assistant", "content": reply.text, "reasoning_content": reply.reasoning}
        if calls:
            message["tool_calls"] = calls
        switched_off = prompt.endswith("</think>\n\n")
        render = self._tokenizer.apply_chat_template
        whole: str = render([*ASKED, message], tokenize=False)
        begun: str = render(ASKED, tokenize=False, add_generation_prompt=True)
        assert whole.startswith(begun), f"{whole!r} does not begin with {begun!r}"
        end = self._tokenizer.eos_token
        text = whole.removeprefix(begun)
        text = text[: text.rindex(end) + len(end)]
        return re.sub(r"^.*?</think>\s*", "", text, flags=re.DOTALL) if switched_off else text

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids


if __name__ == "__main__":
    vars(engine_core)["Sampler"] = ScriptedSampler
    run()
