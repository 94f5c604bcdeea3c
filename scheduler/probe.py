"""The load-time probe: which mode runs this model right, measured on the model itself, about a second.

Three made-up sessions of different lengths are prefilled, prefilled in chunks, decoded and resumed in shared
steps; every logit is compared with a from-scratch forward of that session alone through the model's own
attention. The first mode that agrees is used; a model that no mode serves right is refused with the reasons.
No table of names.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from transformers.cache_utils import DynamicCache

from cache import state as states
from cache import transfer
from cache.attention import Unsupported
from cache.layers import Layer
from cache.pages import PagePool
from cache.ranks import RankLost
from cache.session import SessionCache
from cache.store import SessionStore
from cache.tier import MemoryTier, PageShape
from scheduler.compiled import Compiling
from scheduler.followers import Followers
from scheduler.linear import Packing
from scheduler.modes import LAST_RESORT, MODES, AloneMode, Mode, installed
from scheduler.rope import LongRope
from scheduler.runner import ModelRunner
from scheduler.seq2seq import ENCODER_DECODER, ENCODER_DECODER_LAST, plain_forward
from scheduler.trace import UNTRACED, trace

log = logging.getLogger("warmturn.engine")

# What rounding alone may do: root mean square of the difference over the standard deviation of the logits.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 6e-2}

# A model's own cached path may differ that much from its recompute before it counts as wrong (clamped time
# steps of Mamba-2).
DRIFT = 2e-2

# Lengths of the three sessions, and the steps: (session, tokens) fed together, in shuffled order.
_LENGTHS = (22, 42, 18)
_HEAD = 10  # tokens that are run on their own, to see whether later ones change them
_RECORDED = (23, 19)  # tokens of the steps that are recorded, together no more than the longest session
_ROUNDS = 3  # in which steps with and without compiled modules are timed
_SOURCES = (9, 14, 9)  # what the encoder reads, if there is one
_STEPS = (
    ((0, 5),),
    ((0, 1), (1, 17)),
    ((1, 13), (0, 1), (2, 11)),
    *(((2, 1), (0, 1), (1, 1)),) * 4,
    ((0, 8), (1, 5), (2, 1)),
    *(((0, 1), (2, 1), (1, 1)),) * 2,
    ((1, 1),),
)


@dataclass(frozen=True)
class Verdict:
    """The mode that was chosen and installed, its error, what its layers store in pages, the bytes that a token takes
    in all, a state of some session (``skeleton``), and the measured error of each mode tried.
    """

    mode: Mode
    error: float
    shapes: dict[int, PageShape]
    token_bytes: int
    skeleton: Any
    report: str


class _Measured(NamedTuple):
    """``error`` is relative to the spread of the logits, ``worst`` the largest difference relative to the
    largest logit.
    """

    error: float
    worst: float
    shapes: dict[int, PageShape]
    token_bytes: int
    skeleton: Any


class Refused(Exception):
    """No mode runs this model right; the message says why, mode by mode."""


def probe(
    model: Any,
    layers: list[Layer],
    page_size: int,
    rope: LongRope | None = None,
    first: str = "",
    packing: Packing | None = None,
    followers: Followers | None = None,
    compiling: Compiling | None = None,
) -> Verdict:
    """Choose and install the mode for ``model``. Raises ``Refused``; the model is then as it was.

    ``first`` is what ``describe`` said of the mode that was chosen at an earlier load: it is measured before
    all others. ``packing``: weights that programs may read; without it modules run as they are. ``followers`` have the
    other parts of a model that is divided: only ``packed`` without states can be. ``compiling``: how torch compiles
    layers; without it they are not compiled.
    """
    two = bool(model.config.is_encoder_decoder)
    modes, last = (ENCODER_DECODER, ENCODER_DECODER_LAST) if two else (MODES, LAST_RESORT)
    try:
        trial = _Trial(model, layers, page_size, rope, followers)
    except RankLost:
        raise
    except Exception as error:  # whatever the model raises: it cannot run text alone
        raise Refused(f"a plain forward fails: {_brief(error)}") from error
    if followers is not None:
        return trial.divided()
    verdict = (
        trial.choose((*modes, *last), trial.rounding, only=first)
        or trial.choose(modes, trial.rounding)
        or trial.choose(modes, trial.drift(modes[:1] if two else (AloneMode,)))
        or trial.choose(last, trial.rounding)
    )
    if verdict is None:
        reasons = "; ".join(dict.fromkeys(trial.tried))
        raise Refused(reasons if trial.is_causal() else f"what it says of a token depends on later ones; {reasons}")
    if packing is not None:
        packing.settle()
        fused = trial.fuse(verdict.mode, verdict.error, packing)
        verdict = replace(verdict, report=f"{verdict.report}, {fused} modules run as programs")
    if compiling is not None and verdict.mode.compiles:
        compiled = trial.compile(verdict.mode, verdict.error, compiling)
        verdict = replace(verdict, report=f"{verdict.report}, {compiled} modules run compiled")
    return verdict


class _Trial:
    """One model, its made-up sessions and what a from-scratch forward says about them."""

    def __init__(
        self,
        model: Any,
        layers: list[Layer],
        page_size: int,
        rope: LongRope | None,
        followers: Followers | None,
    ) -> None:
        self.tried: list[str] = []
        self._model = model
        self._layers = layers
        self._page_size = page_size
        self._rope = rope
        self._followers = followers
        two = bool(model.config.is_encoder_decoder)
        sources = _made_up(model, _SOURCES) if two else [None] * len(_LENGTHS)
        self._sessions = [_session(t, s) for t, s in zip(_made_up(model, _LENGTHS), sources, strict=True)]
        self._expected = [alone(model, session) for session in self._sessions]
        self._trace = UNTRACED if two else trace(model)
        self.rounding = TOLERANCE.get(self._expected[0].dtype, 6e-2)

    def is_causal(self) -> bool:
        """Whether what the model says of a token does not depend on later ones."""
        pairs = zip(self._sessions, self._expected, strict=True)
        return all(torch.allclose(alone(self._model, _head(s)), e[:_HEAD], atol=1e-2) for s, e in pairs)

    def choose(self, kinds: tuple[type[Mode], ...], tolerance: float, only: str | None = None) -> Verdict | None:
        """The first mode of ``kinds`` whose error is within ``tolerance``, installed; None where there is none.

        ``only``: none but the mode that ``describe`` calls that.
        """
        for mode in self._candidates(kinds):
            if only is not None and describe(mode) != only:
                continue
            try:
                with installed(mode):
                    measured = self._measure(mode)
                    if measured.error > tolerance:
                        raise Unsupported(f"error {measured.error:.1e}")
                    if mode.learn() and self._measure(mode).error > tolerance:
                        mode.in_place = frozenset()
                    self.tried.append(f"{describe(mode)}: {_agrees(self._model.dtype, tolerance)} {measured.error:.1e}")
                    report = ", ".join(self.tried)
                    return Verdict(
                        mode, measured.error, measured.shapes, measured.token_bytes, measured.skeleton, report
                    )
            except Exception as error:  # whatever a mode raises on this model is its verdict on it
                self.tried.append(f"{describe(mode)}: {_brief(error)}")
        return None

    def divided(self) -> Verdict:
        """The verdict on a model that is divided among ranks. Raises ``Refused``."""
        if self._trace.stateful or type(self._trace.cache) is not DynamicCache:
            raise Refused("what it keeps is more than keys and values, and only these can be divided among ranks")
        verdict = self.choose(MODES[:1], self.rounding)
        if verdict is None:
            raise Refused(f"only the packed mode can be divided among ranks; {'; '.join(self.tried)}")
        return verdict

    def drift(self, kinds: tuple[type[Mode], ...]) -> float:
        """What to allow a model whose own cached path differs from its own recompute, by design and a little;
        else 0.
        """
        measured = []
        for mode in self._candidates(kinds):
            with suppress(Exception):  # this model has no cached path of its own
                measured.append(self._measure(mode))
        errors = sorted(one.error for one in measured)
        if not errors or (min(one.worst for one in measured) > DRIFT and not _agree(errors)):
            return 0.0
        return 2 * errors[0]

    def _candidates(self, kinds: tuple[type[Mode], ...]) -> Iterator[Mode]:
        for kind in kinds:
            for token_by_token in (False, True):
                mode = kind(self._model, self._layers, self._trace)
                mode.token_by_token = token_by_token
                if mode.stateful or not token_by_token:
                    yield mode

    def _runner(self, mode: Mode) -> tuple[ModelRunner, SessionStore]:
        """Room for all sessions."""
        size = self._page_size
        slots = sum(-(-n // size) for n in _LENGTHS)
        tier = MemoryTier(slots, size, self._model.device)
        if self._followers is not None:
            self._followers.room(slots, 0, size, known=False)
        pool = PagePool(tier, MemoryTier(0, size, torch.device("cpu")))
        threshold = self._rope.threshold if self._rope is not None else None
        runner = ModelRunner(mode, tier, self._rope, followers=self._followers)
        return runner, SessionStore(pool, 0 if mode.stateful else None, threshold)

    def _begun(self, like: SessionCache, mode: Mode, store: SessionStore) -> SessionCache:
        """A session with the tokens of ``like``, none of them fed."""
        session = _session(like.token_ids, like.source)
        session.stateful = mode.stateful
        session.warm = session.running = True
        session.long = store.is_long(len(session.token_ids))
        store.reserve(session, len(session.token_ids))
        return session

    def _measure(self, mode: Mode) -> _Measured:
        """The worst error of any session over all steps, and what a token stores."""
        runner, store = self._runner(mode)
        tier = runner.tier
        sessions = [self._begun(like, mode, store) for like in self._sessions]
        got: list[list[torch.Tensor]] = [[] for _ in sessions]
        for work in _STEPS:
            logits = runner.run([(sessions[i], count) for i, count in work], range(sum(count for _, count in work)))
            parts = torch.split(logits, [count for _, count in work])
            for (i, _), part in zip(work, parts, strict=True):
                got[i].append(part)
        if self._followers is not None:
            length = sessions[0].length
            self._followers.compare(tier, transfer.rows_of(sessions[0].pages, self._page_size, 0, length))
        errors = [_error(torch.cat(g), want.float()) for g, want in zip(got, self._expected, strict=True)]
        paged = sum(shape.nbytes for shape in tier.shapes.values())
        long, short = (states.nbytes(sessions[i].state) for i in (1, 2))
        grown = (long - short) // (_LENGTHS[1] - _LENGTHS[2])
        return _Measured(
            max(e for e, _ in errors), max(w for _, w in errors), tier.shapes, paged + max(0, grown), sessions[0].state
        )

    def fuse(self, mode: Mode, error: float, packing: Packing) -> int:
        """Let ``mode``, which has that error, run as programs what can be, if the model is as right then as before; how
        many modules."""
        allowed = max(self.rounding, 2 * error)  # a mode may have been taken for its own drift
        fused = mode.fuse(packing, lambda: self._steps(mode))
        if not fused or mode.fusion is None or self._measure(mode).error <= allowed:
            return fused
        mode.fusion.unlink()
        if self._measure(mode).error <= allowed:
            return fused
        log.info("modules run as they are: as programs they were not right together")
        mode.unfuse()
        return 0

    def compile(self, mode: Mode, error: float, compiling: Compiling) -> int:
        """Let ``mode``, which has that error, run compiled what can be, if the model is as right then as before and no
        slower; how many modules."""
        compiling.tell()
        allowed = max(self.rounding, 2 * error)
        try:
            compiled = mode.compile(compiling.backend, lambda: self._measure(mode))
            if not compiled:
                why = mode.compiled.refused if mode.compiled is not None else ""
                raise Unsupported(f"they cannot be compiled: {why or 'there are none'}")
            if not (found := self._measure(mode).error) <= allowed:
                raise Unsupported(f"compiled they say something else, by {found:.1e}")
            if (times := self._times(mode)) > compiling.most:
                raise Unsupported(f"compiled they take {times:.2f} times as long")
            return compiled
        except Exception as problem:  # whatever a compiler or its code raises
            log.info("layers run as they are, slower on a GPU: %s", _brief(problem))
            mode.uncompile()
            return 0

    def _times(self, mode: Mode) -> float:
        """How many times as long as without them a step takes with compiled modules: one that decodes, or one that
        feeds a prompt, whichever is the worse."""
        compiled, plain = [], []
        for _ in range(_ROUNDS):
            compiled.append(self._seconds(mode))
            with mode.plainly():
                plain.append(self._seconds(mode))
        best = [[min(column) for column in zip(*rows, strict=True)] for rows in (compiled, plain)]
        return float(max(mine / theirs for mine, theirs in zip(*best, strict=True)))

    def _seconds(self, mode: Mode) -> tuple[float, float]:
        """Of a step in which all sessions feed a prompt, and of the quickest of some in which they decode."""
        runner, store = self._runner(mode)
        sessions = [self._begun(like, mode, store) for like in self._sessions]
        seconds = []
        for count in (1, 8, *[1] * 8):
            started = time.perf_counter()
            float(runner.run([(session, count) for session in sessions], [0])[0, 0])  # waits for the device
            seconds.append(time.perf_counter() - started)
        return seconds[1], min(seconds[2:])

    def _steps(self, mode: Mode) -> Iterator[None]:
        """Two steps of one session, of lengths that no size of the model has by chance."""
        like = max(self._sessions, key=lambda session: len(session.token_ids))
        runner, store = self._runner(mode)
        session = self._begun(like, mode, store)
        for count in _RECORDED:
            runner.run([(session, count)], range(count))
            yield


def _agree(errors: list[float]) -> bool:
    """Whether resuming whole and token by token are off by the same small amount: then no state is forgotten,
    only clamped.
    """
    return len(errors) > 1 and errors[-1] <= 1.01 * errors[0] and errors[-1] <= 5 * DRIFT


def _head(session: SessionCache) -> SessionCache:
    """The first tokens of a session on their own."""
    return _session(session.token_ids[:_HEAD], session.source)


def describe(mode: Mode) -> str:
    """The mode and its resume rule in words."""
    return f"{mode.name}, token by token" if mode.token_by_token else mode.name


def _agrees(dtype: torch.dtype, allowed: float) -> str:
    """What is said in front of the error of a mode that is right."""
    kind = str(dtype).removeprefix("torch.")
    return f"agrees with a plain forward up to rounding in {kind}; allowed {allowed:.1e}, measured"


def _brief(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:160] if lines else type(error).__name__


def _made_up(model: Any, lengths: tuple[int, ...]) -> list[array[int]]:
    generator = torch.Generator().manual_seed(sum(lengths))
    width = model.get_input_embeddings().num_embeddings
    text = model.config.get_text_config(decoder=True)
    special = [getattr(text, f"{name}_token_id", None) for name in ("pad", "bos")]  # some give padding no position
    tokens = [i for i in range(min(width, 4096)) if i not in special]
    draws = [torch.randint(0, len(tokens), (n,), generator=generator).tolist() for n in lengths]
    return [array("i", [tokens[i] for i in draw]) for draw in draws]


def _session(tokens: array[int], source: array[int] | None) -> SessionCache:
    session = SessionCache("probe", None)
    session.token_ids, session.source = tokens, source
    return session


@torch.inference_mode()
def alone(model: Any, session: SessionCache) -> torch.Tensor:
    """The oracle: logits ``[tokens, V]`` of a from-scratch forward of one timeline, no cache."""
    if session.source is not None:
        return plain_forward(model, session)
    tokens = torch.tensor([list(session.token_ids)], device=model.device)
    logits: torch.Tensor = model(input_ids=tokens, use_cache=False, return_dict=True).logits[0]
    return logits


def _error(got: torch.Tensor, want: torch.Tensor) -> tuple[float, float]:
    """Root mean square over the spread, and the largest difference over the largest logit."""
    want = want[: got.shape[0]]
    error = (got - want).square().mean().sqrt() / want.std()
    worst = (got - want).abs().max() / want.abs().max()
    return float(error.nan_to_num(nan=torch.inf)), float(worst.nan_to_num(nan=torch.inf))  # NaN would compare as right
