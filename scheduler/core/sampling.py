"""Sampling: tokens and log-probabilities from the logits of a batch, each row with its own parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from cache.memory.stream import HostCopy, put
from scheduler.core.token_counts import TokenCounts
from scheduler.core.truncation import truncate
from scheduler.core.turn import Turn

_STRETCH = 256  # tokens
_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")  # of each byte of a mask
_BARS = np.where(_BITS, np.float32(0), np.float32("-inf"))  # [256, 8]: what they add to the logits of 8 tokens


class SampledToken(NamedTuple):
    """A drawn token; ``logprob`` and ``top`` (ids with log-probabilities, most likely first) where they were
    asked for. ``usable``: its logits were numbers.
    """

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    usable: bool = True


class Sampler:
    """Draws one token per row. The draw of a row depends only on its own logits, parameters and random numbers."""

    def __init__(self, eos_token_ids: tuple[int, ...]) -> None:
        self._eos = eos_token_ids
        self._bars: torch.Tensor | None = None  # _BARS, on the device

    def draw(self, logits: torch.Tensor, turns: Sequence[Turn]) -> SamplerOutput:
        """Draw from ``logits [rows, V]`` float32, one row per turn. Does not wait for the device. A row whose token is
        forced is drawn too, so that a seed gives its later draws the same random numbers.
        """
        shaped = self._process(logits, turns)
        drawn = [i for i, turn in enumerate(turns) if not turn.request.sampling.greedy]
        if len(drawn) == len(turns):
            tokens = _draw(shaped, turns)
        else:
            tokens = _argmax(shaped)
            if drawn:
                rows = put(np.array(drawn), tokens.device)
                tokens[rows] = _draw(shaped[rows], [turns[i] for i in drawn])
        usable = _usable(logits, tokens if shaped is logits and not drawn else None)
        _force(tokens, turns)
        return SamplerOutput(logits, tokens, [turn.request.logprobs for turn in turns], usable)

    def _process(self, logits: torch.Tensor, turns: Sequence[Turn]) -> torch.Tensor:
        """Penalties, biases, forbidden ends and words, and grammars; where no row has any, nothing is copied."""
        changed = logits
        bound: list[int] = []
        penalised = [row for row, turn in enumerate(turns) if turn.request.sampling.penalised]
        if penalised:
            changed = logits.clone()
            _penalise(changed, turns, penalised)
        for row, turn in enumerate(turns):
            wanted, ends = turn.request.sampling, self._find_forbidden(turn)
            if turn.constraint is not None:
                bound.append(row)
                ends = []  # its mask knows them
            elif wanted.bad_words:
                ends = [*ends, *_find_bad_words(turn)]
            if not (wanted.logit_bias or ends):
                continue
            if changed is logits:
                changed = logits.clone()
            if wanted.logit_bias:
                ids = put(np.array(list(wanted.logit_bias)), logits.device)
                changed[row, ids] += put(np.array(list(wanted.logit_bias.values()), np.float32), logits.device)
            if ends:
                changed[row, put(np.array(ends), logits.device)] = float("-inf")
        return self._constrain(logits.clone() if changed is logits else changed, turns, bound) if bound else changed

    def _constrain(self, logits: torch.Tensor, turns: Sequence[Turn], bound: list[int]) -> torch.Tensor:
        """Set the logits of tokens that the grammars of the rows in ``bound`` do not allow to -inf, in place.

        The masks are computed on the host while a GPU still computes the logits, and unpacked on the device.
        """
        masks = [
            c.compute_mask(self._find_forbidden(turns[i])) for i in bound if (c := turns[i].constraint) is not None
        ]
        if self._bars is None:
            self._bars = put(_BARS, logits.device)
        packed = put(np.stack(masks).view(np.uint8), logits.device)
        bars = torch.nn.functional.embedding(packed.int(), self._bars).flatten(1)
        width = min(bars.shape[1], logits.shape[1])
        rows = put(np.array(bound), logits.device) if len(bound) < len(turns) else slice(None)
        part = logits[rows]
        part[:, :width] += bars[:, :width]
        part[:, width:] = float("-inf")
        logits[rows] = part
        return logits

    def _find_forbidden(self, turn: Turn) -> list[int]:
        """Tokens that would end the turn before it may end. With a grammar an end of sequence always ends it: where
        that is to be ignored, it comes last.
        """
        stopping = turn.request.stopping
        early = not turn.may_end
        ends = early and not stopping.ignore_eos
        if turn.constraint is not None:
            ends = early or stopping.ignore_eos
        return [*(stopping.stop_token_ids if early else ()), *(self._eos if ends else ())]


class SamplerOutput:
    """Each row's token with its log-probability under the model itself (before penalties and temperature), and the top
    ones, on their way from the device.
    """

    def __init__(
        self,
        logits: torch.Tensor,
        tokens: Sequence[int] | torch.Tensor,
        tops: Sequence[int | None],
        usable: torch.Tensor | None = None,
    ) -> None:
        """``logits [rows, V]``, one token a row. ``tops[i]`` None: no log-probabilities for row i. ``usable``: bool
        ``[rows]``, found where it is not given.
        """
        chosen = tokens if isinstance(tokens, torch.Tensor) else put(np.array(tokens, np.int64), logits.device)
        self._tops = tops
        self._wanted = [i for i, top in enumerate(tops) if top is not None]
        found = [chosen, _usable(logits) if usable is None else usable]
        if self._wanted:
            rows = put(np.array(self._wanted), logits.device)
            scores = torch.log_softmax(logits[rows], -1)
            best, ids = scores.topk(min(max(top or 0 for top in tops), scores.shape[-1]), -1)
            found += [scores.gather(1, chosen[rows, None])[:, 0], best, ids]
        self._copied = HostCopy(*found)

    def read(self) -> list[SampledToken]:
        """All rows; waits for the device once."""
        drawn, usable, *reported = (part.tolist() for part in self._copied.wait())
        out = [SampledToken(token, usable=fine) for token, fine in zip(drawn, usable, strict=True)]
        for i, score, best_of, ids_of in zip(self._wanted, *reported, strict=True) if self._wanted else ():
            top = tuple(zip(ids_of, best_of, strict=True))[: self._tops[i] or 0]
            out[i] = SampledToken(drawn[i], score, top, usable[i])
        return out


def _force(tokens: torch.Tensor, turns: Sequence[Turn]) -> None:
    """Set the tokens of the turns that have to take a given one, in place."""
    forced = [(row, token) for row, turn in enumerate(turns) if (token := turn.forced) is not None]
    if forced:
        rows, chosen = zip(*forced, strict=True)
        tokens[put(np.array(rows), tokens.device)] = put(np.array(chosen, np.int64), tokens.device)


def _find_bad_words(turn: Turn) -> list[int]:
    """Tokens that would complete one of the turn's bad words, all of which it would have generated itself."""
    found = []
    for *before, last in turn.request.sampling.bad_words:
        size = len(before)
        if size <= turn.generated and turn.ids[len(turn.ids) - size :].tolist() == before:
            found.append(last)
    return found


def _penalise(logits: torch.Tensor, turns: Sequence[Turn], rows: Sequence[int]) -> None:
    """OpenAI's presence and frequency penalties on generated tokens; the repetition penalty of Keskar et al. (2019) on
    all. In place, on the few logits that they change.
    """
    places, penalties = [], []
    for row in rows:
        turn, wanted = turns[row], turns[row].request.sampling
        if turn.token_counts is None:
            turn.token_counts = TokenCounts(turn.ids[: turn.prompt_length] if wanted.repetition_penalty != 1.0 else ())
        ids, counts = turn.token_counts.read(turn.ids[turn.prompt_length :])
        there = ids < logits.shape[1]  # some models embed more tokens than they say
        ids, counts = ids[there], counts[there]
        less = np.float32(wanted.frequency_penalty) * counts + np.float32(wanted.presence_penalty) * (counts > 0)
        places.append(np.stack([np.full_like(ids, row), ids]))
        penalties.append(np.stack([np.full_like(less, wanted.repetition_penalty), less]))
    row, token = put(np.concatenate(places, 1), logits.device)
    repeated, less = put(np.concatenate(penalties, 1), logits.device)
    scores = logits[row, token]
    logits[row, token] = torch.where(scores > 0, scores / repeated, scores * repeated) - less


def _draw(logits: torch.Tensor, turns: Sequence[Turn]) -> torch.Tensor:
    """One token a row by inverse transform: the first token at which the cumulative probability passes a random number.

    The number comes from the turn's own generator, so a seed gives the same draw in any company.
    """
    device = logits.device
    wanted = [turn.request.sampling for turn in turns]
    temperature = put(np.array([w.temperature for w in wanted], np.float32), device)[:, None]
    probs = torch.softmax(logits / temperature.clamp_min(1e-5), -1)
    cut = [row for row, w in enumerate(wanted) if w.top_k > 0 or w.top_p < 1.0 or w.min_p > 0.0]
    if len(cut) == len(wanted):
        probs = truncate(probs, wanted)
    elif cut:
        rows = put(np.array(cut), device)
        probs[rows] = truncate(probs[rows], [wanted[row] for row in cut])
    number = put(np.array([turn.random.random() for turn in turns]), device)[:, None]
    return _search_cumulative(probs, number)


def _usable(rows: torch.Tensor, largest: torch.Tensor | None = None) -> torch.Tensor:
    """Whether all of a row are numbers, or impossible, and some are possible: bool ``[rows]``. ``largest``: what
    ``_argmax`` has found in them, which is what is no number where there is such.
    """
    if rows.device.type == "cpu":
        values = rows.numpy()
        most = values.max(-1) if largest is None else values[np.arange(len(values)), largest.numpy()]
        return torch.from_numpy(np.isfinite(most))
    return torch.isfinite(rows.amax(-1))


def _argmax(rows: torch.Tensor) -> torch.Tensor:
    """``rows.argmax(-1)``, the first of equals. On a CPU numpy finds it ten times as fast as torch."""
    return torch.from_numpy(rows.numpy().argmax(-1)) if rows.device.type == "cpu" else rows.argmax(-1)


def _search_cumulative(probs: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
    """The first token ``[rows]`` at which the sum of ``probs [rows, V]`` passes ``number [rows, 1]`` of the whole sum.

    Summed in float64 in vocabulary order, by stretches first: only the one that is passed in is looked into.
    """
    rows, width = probs.shape
    stretch = min(_STRETCH, width)
    sums = probs.narrow(1, 0, width // stretch * stretch).view(rows, -1, stretch).sum(-1, dtype=torch.float64)
    rest = probs.narrow(1, width - stretch, stretch)  # what is left over, as the end of a whole stretch
    left = rest[:, stretch - width % stretch :].sum(-1, dtype=torch.float64)[:, None]
    sums = torch.cat([sums, left], 1)
    total = sums.cumsum(-1)
    wanted = number * total[:, -1:]
    last = (sums > 0) * torch.arange(1, sums.shape[1] + 1, device=probs.device)
    at = torch.minimum(torch.searchsorted(total, wanted, right=True)[:, 0], last.amax(-1) - 1)  # none of sum 0
    at = at.clamp(min=0)  # where there are no numbers
    first = torch.clamp(at * stretch, max=width - stretch)
    inside = probs.gather(1, first[:, None] + torch.arange(stretch, device=probs.device))
    inside = inside * (first[:, None] + torch.arange(stretch, device=probs.device) >= (at * stretch)[:, None])
    before = (total - sums).gather(1, at[:, None])
    picked = torch.searchsorted(inside.double().cumsum(-1), wanted - before, right=True)[:, 0]
    last = (inside > 0) * torch.arange(1, stretch + 1, device=probs.device)  # rounding must not pick one of
    return (first + torch.minimum(picked, last.amax(-1) - 1)).clamp(min=0)  # probability 0
