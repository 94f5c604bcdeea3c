"""Sampling: logits to tokens and log-probabilities, a batch at once, each row by its own parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from scheduler.messages import Sampling
from scheduler.turn import Turn


class Sampled(NamedTuple):
    """A drawn token; ``logprob`` and ``top`` (ids with log-probabilities, most likely first) where they were
    asked for.
    """

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class Sampler:
    """Draws one token per row. A row's draw depends on its own logits, parameters and random numbers only."""

    def __init__(self, eos_token_ids: tuple[int, ...]) -> None:
        self._eos = eos_token_ids

    def sample(self, logits: torch.Tensor, turns: Sequence[Turn]) -> list[Sampled]:
        """``logits [rows, V]`` float32, one row per turn."""
        shaped = self._processed(logits, turns)
        tokens = shaped.argmax(-1)
        drawn = [i for i, turn in enumerate(turns) if turn.request.sampling.temperature > 0]
        if drawn:
            picked = _draw(shaped[drawn], [turns[i] for i in drawn])
            tokens[torch.tensor(drawn, device=tokens.device)] = picked
        chosen = tokens.tolist()
        tops = [turn.request.logprobs for turn in turns]
        return report(logits, chosen, tops)

    def _processed(self, logits: torch.Tensor, turns: Sequence[Turn]) -> torch.Tensor:
        """Penalties, biases and forbidden ends; rows without any are not copied."""
        changed = logits
        for row, turn in enumerate(turns):
            wanted, ends = turn.request.sampling, self._forbidden(turn)
            penalised = wanted.presence_penalty or wanted.frequency_penalty or wanted.repetition_penalty != 1.0
            if not (penalised or wanted.logit_bias or ends):
                continue
            if changed is logits:
                changed = logits.clone()
            if penalised:
                _penalise(changed[row], turn)
            if wanted.logit_bias:
                ids = torch.tensor(list(wanted.logit_bias), device=logits.device)
                changed[row, ids] += torch.tensor(list(wanted.logit_bias.values()), device=logits.device)
            if ends:
                changed[row, torch.tensor(ends, device=logits.device)] = float("-inf")
        return changed

    def _forbidden(self, turn: Turn) -> list[int]:
        """Tokens that would end the turn before ``min_tokens``."""
        stopping = turn.request.stopping
        if turn.generated >= stopping.min_tokens:
            return []
        return [*stopping.stop_token_ids, *(() if stopping.ignore_eos else self._eos)]


def report(logits: torch.Tensor, tokens: Sequence[int], tops: Sequence[int | None]) -> list[Sampled]:
    """Each row's token with its log-probability under the model itself (before penalties and temperature), and
    the top ones.

    ``tops[i]`` None: no log-probabilities for row i.
    """
    wanted = [i for i, top in enumerate(tops) if top is not None]
    if not wanted:
        return [Sampled(token) for token in tokens]
    rows = torch.log_softmax(logits[wanted], -1)
    widest = max(tops[i] or 0 for i in wanted)
    best, ids = rows.topk(min(widest, rows.shape[-1]), -1)
    out = [Sampled(token) for token in tokens]
    for at, i in enumerate(wanted):
        count = tops[i] or 0
        top = tuple(zip(ids[at, :count].tolist(), best[at, :count].tolist(), strict=True))
        out[i] = Sampled(tokens[i], float(rows[at, tokens[i]]), top)
    return out


def _penalise(row: torch.Tensor, turn: Turn) -> None:
    """OpenAI's presence and frequency penalties on generated tokens; the repetition penalty of Keskar et al.
    (2019) on all.
    """
    wanted = turn.request.sampling
    counts, seen = _counted(turn, row)
    if wanted.repetition_penalty != 1.0:
        met = seen | (counts > 0)
        scaled = torch.where(row > 0, row / wanted.repetition_penalty, row * wanted.repetition_penalty)
        torch.where(met, scaled, row, out=row)
    row -= wanted.frequency_penalty * counts + wanted.presence_penalty * (counts > 0)


def _counted(turn: Turn, row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """How often each token was generated ``[V]``, and whether it is in the prompt; kept on the turn, grown by
    one a step.
    """
    width = row.shape[0]
    if turn.counts is None or turn.seen is None:
        prompt = torch.tensor(turn.ids[: turn.prompt_length], device=row.device)
        turn.seen = torch.zeros(width, dtype=torch.bool, device=row.device)
        turn.seen[prompt] = True
        made = torch.tensor(turn.ids[turn.prompt_length :], dtype=torch.int64, device=row.device)
        turn.counts = torch.bincount(made, minlength=width)
    elif turn.generated:
        turn.counts[turn.ids[-1]] += 1
    return turn.counts, turn.seen


def _draw(logits: torch.Tensor, turns: Sequence[Turn]) -> torch.Tensor:
    """One token a row by inverse transform: the first token at which the cumulative probability passes a random number.

    The number comes from the turn's own generator, so a seed gives the same draw in any company.
    """
    device = logits.device
    wanted = [turn.request.sampling for turn in turns]
    temperature = torch.tensor([w.temperature for w in wanted], device=device)[:, None]
    probs = torch.softmax(logits / temperature.clamp_min(1e-5), -1)
    if any(w.top_k > 0 or w.top_p < 1.0 or w.min_p > 0.0 for w in wanted):
        probs = _truncate(probs, wanted)
    total = probs.double().cumsum(-1)
    number = torch.tensor([turn.random.random() for turn in turns], dtype=torch.float64, device=device)[:, None]
    picked = torch.searchsorted(total, number * total[:, -1:], right=True)
    last = (
        probs.shape[-1] - 1 - probs.flip(-1).gt(0).int().argmax(-1)
    )  # rounding must not pick a token of probability 0
    return torch.minimum(picked[:, 0], last)


def _truncate(probs: torch.Tensor, wanted: Sequence[Sampling]) -> torch.Tensor:
    """Zero what top-k, then nucleus (Holtzman et al., 2019), then min-p cut off; ``probs [rows, V]``, at least
    one token stays.
    """
    device = probs.device
    sorted_probs, order = probs.sort(-1, descending=True)
    rank = torch.arange(probs.shape[-1], device=device)[None]
    top_k = torch.tensor([w.top_k or probs.shape[-1] for w in wanted], device=device)[:, None]
    kept = torch.where(rank < top_k, sorted_probs, 0.0)
    mass = kept.cumsum(-1) / kept.sum(-1, keepdim=True)
    before = torch.cat([torch.zeros_like(mass[:, :1]), mass[:, :-1]], -1)  # mass of the more likely tokens
    top_p = torch.tensor([w.top_p for w in wanted], device=device)[:, None]
    min_p = torch.tensor([w.min_p for w in wanted], device=device)[:, None]
    # A float32 sum reaches 1 before the rarest tokens: top_p 1 must still keep them.
    keep = ((before < top_p) | (top_p >= 1.0)) & (sorted_probs >= min_p * sorted_probs[:, :1])
    keep[:, 0] = True
    return torch.zeros_like(probs).scatter_(-1, order, torch.where(keep, kept, 0.0))
