"""``StepRows``: which logits a step needs."""

from __future__ import annotations

from dataclasses import dataclass, field

from scheduler.core.drafters import Draft
from scheduler.core.turn import Turn


@dataclass
class StepRows:
    """The rows of a step's tokens ``[T]`` behind which logits are computed, and whose they are. All but ``tokens`` are
    places in the logits ``[len(tokens), V]``.
    """

    tokens: list[int] = field(default_factory=list)  # ascending
    prompts: list[tuple[Turn, int, int]] = field(default_factory=list)  # log-probabilities: the first, how many
    last: list[tuple[Turn, int]] = field(default_factory=list)  # behind a turn's last token, where it is fed
    drafts: dict[Turn, int] = field(default_factory=dict)  # behind a draft's first token

    @classmethod
    def of(cls, plan: list[tuple[Turn, int]], drafts: dict[Turn, Draft]) -> StepRows:
        """Of a plan whose turns are fed one after the other, each with its draft behind it."""
        rows, at = cls(), 0
        for turn, count in plan:
            is_last = turn.uncomputed == count
            if turn.request.prompt_logprobs is not None and turn.generated == 0:
                rows.prompts.append((turn, len(rows.tokens), count))
                rows.tokens.extend(range(at, at + count))
            elif is_last and (turn.limit != 0 or turn.request.state):
                rows.tokens.append(at + count - 1)
            if is_last:
                rows.last.append((turn, len(rows.tokens) - 1))
            at += count
            if turn in drafts:
                size = len(drafts[turn].ids)
                rows.drafts[turn] = len(rows.tokens)
                rows.tokens.extend(range(at, at + size))
                at += size
        return rows
