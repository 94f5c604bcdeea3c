"""``StopChecker``: decides whether a drawn token ends its turn, and makes the turn's deltas.

The decision needs a token's text only if the turn has stop strings. Other text is decoded when the delta is made, on a
GPU while the next step runs.
"""

from __future__ import annotations

from dataclasses import dataclass

from scheduler.core.sampling import SampledToken
from scheduler.core.text import Vocabulary
from scheduler.core.turn import Turn
from scheduler.protocol import Delta, FinishReason, TokenLogprob


@dataclass(eq=False)
class DrawnToken:
    """A token that was drawn for ``turn``. ``reason``: why it ends the turn, None if it does not. ``stop``: the stop
    string or token that matched. ``text``: the text that may be shown with it, None if it is not decoded yet.
    ``shown``: whether it has text. ``may_stop``: whether a stop string may end the turn with it. ``thinking_cut``:
    see ``Delta``.
    """

    turn: Turn
    sampled: SampledToken
    reason: FinishReason | None = None
    stop: str | int | None = None
    text: str | None = None
    shown: bool = True
    may_stop: bool = True
    thinking_cut: bool = False


class StopChecker:
    """Checks turns of up to ``context`` tokens. ``eos_token_ids`` end a reply unless the turn ignores them."""

    def __init__(self, vocabulary: Vocabulary, eos_token_ids: tuple[int, ...], context: int) -> None:
        self._vocabulary = vocabulary
        self._eos_token_ids = frozenset(eos_token_ids)
        self._context = context

    def check(self, turn: Turn, sampled: SampledToken) -> DrawnToken:
        """Append the token to its turn. Raises ``GrammarError``, and what decoding raises."""
        thinking, stopping = turn.thinking, turn.request.stopping
        drawn = DrawnToken(turn, sampled)
        may_end = turn.may_end
        if thinking is not None:
            drawn.may_stop, drawn.thinking_cut = thinking.allows_end, thinking.cut
            thinking.accept(sampled.token)
        turn.append(sampled.token)
        complete = turn.constraint is not None and turn.constraint.accept(sampled.token)
        if may_end and sampled.token in stopping.stop_token_ids:
            drawn.reason, drawn.stop, drawn.shown = FinishReason.STOP, sampled.token, False
        elif sampled.token in self._eos_token_ids and (
            turn.constraint is not None or (may_end and not stopping.ignore_eos)
        ):
            drawn.reason, drawn.shown = FinishReason.STOP, False
        elif complete:
            drawn.reason = FinishReason.STOP
        elif len(turn.ids) >= self._context or (turn.limit is not None and turn.generated >= turn.limit):
            drawn.reason = FinishReason.LENGTH
        if stopping.stop:
            drawn.text = _text(drawn)
            if turn.text.stopped is not None:
                drawn.reason, drawn.stop = FinishReason.STOP, turn.text.stopped
        return drawn

    def delta(self, drawn: DrawnToken) -> Delta:
        """What the server is told of it. Once for each token of a turn, in order. Raises what decoding raises."""
        sampled = drawn.sampled
        return Delta(
            drawn.turn.request.turn,
            (sampled.token,),
            _text(drawn) if drawn.text is None else drawn.text,
            finish_reason=drawn.reason,
            stop=drawn.stop,
            logprobs=(self.spell_logprobs(sampled),) if sampled.logprob is not None else (),
            thinking_cut=drawn.thinking_cut,
            drafts=drawn.turn.drafts if drawn.reason is not None else {},
            encoding=drawn.turn.encoding if drawn.reason is not None else 0.0,
        )

    def spell_logprobs(self, sampled: SampledToken) -> TokenLogprob:
        """A token's log-probabilities as the server is told them."""
        text, data = self._vocabulary.spell(sampled.token)
        top = tuple((token, *self._vocabulary.spell(token), logprob) for token, logprob in sampled.top)
        return TokenLogprob(sampled.token, text, data, sampled.logprob, top)


def _text(drawn: DrawnToken) -> str:
    """What the token releases: all that was held back, if it ends the turn."""
    turn = drawn.turn
    text = (
        turn.text.push(drawn.sampled.token, may_stop=turn.has_fewest_tokens and drawn.may_stop) if drawn.shown else ""
    )
    return text if drawn.reason is None else text + turn.text.flush()
