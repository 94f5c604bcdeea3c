"""``HeadsDrafter``: the served model's own layers for multi-token prediction (MTP) propose tokens."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.utils.hooks import RemovableHandle

from scheduler.core.drafters import Draft
from scheduler.core.turn import Turn
from scheduler.protocol import DraftSource

_SEEN = 256  # tokens before the reply that the layers see
_WEIGHT = 0.1  # of a measurement


@dataclass
class _Fed:
    """What is known of one turn: ``hidden``, parts ``[n, H]`` in a row, of the positions in front of ``stop``; and the
    layers' own keys of the ``cached`` positions in front of those.
    """

    cache: Any
    stop: int = 0
    cached: int = 0
    hidden: list[torch.Tensor] = field(default_factory=list)

    @property
    def start(self) -> int:
        """The position of the first hidden state that is kept."""
        return self.stop - sum(len(part) for part in self.hidden)


class HeadsDrafter:
    """Greedy proposals of the MTP layers, for one turn after the other.

    A layer reads the model's last hidden state at a position and the token behind it. So it needs the hidden states of
    what the steps have fed: they are taken where the decoder returns them. They are kept for tokens that were fed in
    this turn only, and for no more than the last ``_SEEN`` in front of the reply: what was cached before has none. The
    layers' keys last as long as the turn. None of that changes a reply: a proposal is worse where less is seen.
    """

    def __init__(self, heads: Any, decoder: torch.nn.Module) -> None:
        """``heads``: transformers' ``MtpModel``, which is given attention of transformers' own. ``decoder``: of the
        served model, which returns hidden states.
        """
        heads.set_attn_implementation("eager")
        self.source = DraftSource.HEADS
        self.most = len(heads.layers)
        self.seconds = 0.0  # for each token that it drafts; 0: not measured
        self._heads = heads
        self._turns: WeakKeyDictionary[Turn, _Fed] = WeakKeyDictionary()
        self._returned: list[torch.Tensor] | None = None  # [T, H] of the step's forwards
        self.hook: RemovableHandle = decoder.register_forward_hook(self._keep)

    def begin(self) -> None:
        """A step begins."""
        self._returned = []

    def read(self, fed: Sequence[tuple[Turn, int, int]]) -> None:
        """A step was verified. ``fed``: its turns in the packed order, each with the length of its session before the
        step, and how many tokens were fed. A step of several forwards teaches nothing.
        """
        rows = self._returned[0] if self._returned is not None and len(self._returned) == 1 else None
        row = 0
        for turn, before, count in fed:
            if turn.session is None or not turn.request.speculate:
                self._turns.pop(turn, None)
            elif rows is not None:
                right = min(count, turn.session.length - before)
                self._add(turn, before, rows[row : row + right])
            row += count
        self._returned = None

    @torch.inference_mode()
    def propose(self, wanted: Mapping[Turn, int], room: int) -> dict[Turn, Draft]:
        """Up to that many tokens for each of the turns of which the last hidden state is known, as far as what the
        layers must read before fits in ``room`` tokens.
        """
        started, drafts = time.perf_counter(), {}
        for turn, most in wanted.items():
            fed = self._turns.get(turn)
            if fed is None or fed.stop != len(turn.ids) - 1 or not 0 < fed.stop - fed.start <= room:
                continue
            room -= fed.stop - fed.start
            drafts[turn] = Draft(DraftSource.HEADS, self._say(turn, fed)[:most])
        if drafts:
            spent = (time.perf_counter() - started) / sum(len(draft.ids) for draft in drafts.values())
            self.seconds += (spent - self.seconds) * (_WEIGHT if self.seconds else 1.0)
        return drafts

    def poll(self, idle: bool) -> None:
        """Nothing is stored."""

    def _keep(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        if self._returned is not None:
            self._returned.append(output.last_hidden_state[0])

    def _add(self, turn: Turn, before: int, rows: torch.Tensor) -> None:
        fed = self._turns.get(turn)
        if fed is None or fed.stop != before:  # the first of the turn, or it was preempted
            fed = self._turns[turn] = _Fed(self._empty(), before)
        fed.hidden.append(rows.clone())
        fed.stop += len(rows)
        if fed.stop - fed.start > _SEEN:  # the keys of those in between are never made: begin anew behind them
            fed.hidden = [torch.cat(fed.hidden)[-_SEEN:]]
            fed.cache, fed.cached = self._empty(), 0

    def _empty(self) -> Any:
        from transformers.cache_utils import MtpCache

        cache = MtpCache(config=self._heads.config)
        cache.activate_past_recording()
        return cache

    def _say(self, turn: Turn, fed: _Fed) -> list[int]:
        """Feed what is new; the likeliest token of each layer. Those that a layer read of what was drafted here are
        taken back, and read again in the next call.
        """
        first, device = fed.start, fed.hidden[0].device
        hidden = torch.cat(fed.hidden)
        positions = torch.arange(first + 1, fed.stop + 1, device=device)[None]
        ids = torch.tensor([turn.ids[first + 1 : fed.stop + 1]], device=device)
        said: list[int] = self._heads(ids, hidden[None], None, positions, fed.cache)[0][0].tolist()
        again = min(self.most - 1, len(hidden))
        if again:
            fed.cache.crop(-again)
        fed.cached += len(hidden) - again
        fed.hidden = [hidden[len(hidden) - again :]] if again else []
        return said
