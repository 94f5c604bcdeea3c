"""The load-time probe, which measures what mode gives correct results on a model. It takes about a second.

Three made-up sessions of different lengths are prefilled, prefilled in chunks, decoded and resumed in shared steps. All
logits are compared with a from-scratch forward of each session alone with the model's own attention. The same is done
on the model's twin, whose windows and other thresholds are small. The first mode that agrees is used. If none does the
model is refused, with the reason for each mode. Models are not looked up by name.
"""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from msgspec import structs
from transformers.cache_utils import DynamicCache

from cache.attention.packed_attention import Unsupported
from cache.error_line import first_line
from cache.memory.codec import Codec
from cache.pages.layers import AttentionLayer
from scheduler.accel.cpu.packing import Packing
from scheduler.accel.gpu.compiled import CompileOptions
from scheduler.forward.alone_modes import AloneMode
from scheduler.forward.mode import Mode, installed
from scheduler.forward.modes import LAST_RESORT, MODES
from scheduler.forward.rope import LongRope
from scheduler.forward.seq2seq import ENCODER_DECODER, ENCODER_DECODER_LAST
from scheduler.forward.trace import KnownTrace
from scheduler.model.known_model import KnownModel, MeasuredVerdict, measured_by
from scheduler.model.kv_rounding import round_kv
from scheduler.model.measurement import MOST_ROUTED, Measurement, describe
from scheduler.model.thresholds import Thresholds
from scheduler.model.verdict import Verdict
from scheduler.parallel.followers import Followers
from scheduler.parallel.ranks import RankLost

log = logging.getLogger("warmturn.engine")

_SEEDS, _SEEDS_ROUTED = 3, 12  # of roundings that are tried
_ROUNDS = 3  # in which steps with and without compiled modules are timed


class UnsupportedModel(Exception):
    """No mode runs this model right; the message has the reason for each mode."""


def probe(
    model: Any,
    layers: list[AttentionLayer],
    page_size: int,
    rope: LongRope | None = None,
    known: KnownModel | None = None,
    packing: Packing | None = None,
    followers: Followers | None = None,
    compiling: CompileOptions | None = None,
    context: int | None = None,
    codec: Codec = Codec.EXACT,
) -> Verdict:
    """Choose and install the mode for ``model``. Raises ``UnsupportedModel``; the model is then as it was.

    ``known`` is what an earlier load found out: its mode is measured before all others unless it is a last resort, with
    few tokens where this program measured it on the whole. ``packing``: weights that programs may read; without it
    modules run as they are. ``followers`` have the other parts of a model that is divided: only ``packed`` without
    states can be. ``compiling``: how torch compiles layers; without it they are not compiled. ``context``: tokens of
    the longest timelines; None: any length. ``codec``: how layers are to keep KV where that fits.
    """
    known = known or KnownModel()
    begin = partial(_begin, model, layers, page_size, rope, followers, context)
    maker = measured_by(context) if packing is not None and compiling is None else ""
    if packing is not None and known.measured is not None and known.measured.made_by == maker:
        trial = begin(known.measured)
        if (verdict := trial.recall(known.mode, packing, known.measured)) is not None:
            return trial.rounded(verdict, codec)
    trial = begin()
    if followers is not None:
        return trial.find_windowed(trial.probe_divided())
    last = {kind.name for kind in (*LAST_RESORT, *ENCODER_DECODER_LAST)}
    first = "" if known.mode in last else known.mode  # a model that had only that may run better now
    if packing is None:
        verdict = trial.absorb(trial.choose_any(first))
    else:
        trial.rounding, trial.input_rounding = max(trial.rounding, packing.tolerance), packing.input_rounding
        trial.fuses = True
        likely = trial.recall(first or MODES[0].name, packing) if compiling is None else None
        verdict = likely or trial.fused(trial.absorb(trial.choose_any(first)), packing)
    if compiling is not None and verdict.mode.compiles:
        compiled = trial.compile(verdict.mode, verdict.error, compiling)
        verdict = replace(verdict, report=f"{verdict.report}, {compiled} modules run compiled")
    verdict = trial.find_windowed(verdict)
    return trial.rounded(trial.remembered(verdict, maker) if maker else verdict, codec)


def _begin(*about: Any) -> _Trial:
    """A trial. Raises ``UnsupportedModel`` if the model does not run at all."""
    try:
        return _Trial(*about)
    except RankLost:
        raise
    except Exception as error:  # whatever the model raises: it cannot run text alone
        raise UnsupportedModel(f"a plain forward fails: {first_line(error, 160)}") from error


class _Trial(Measurement):
    """The modes that were tried on one model, and what they came to."""

    def __init__(
        self,
        model: Any,
        layers: list[AttentionLayer],
        page_size: int,
        rope: LongRope | None,
        followers: Followers | None = None,
        context: int | None = None,
        known: MeasuredVerdict | None = None,
    ) -> None:
        super().__init__(model, layers, page_size, rope, followers, known)
        self.tried: list[str] = []
        self.fuses = False  # ``fuse`` is called after ``choose``
        self._thresholds = Thresholds(self, context) if followers is None and known is None else None

    def recall(self, first: str, packing: Packing, known: MeasuredVerdict | None = None) -> Verdict | None:
        """The verdict on the mode that ``describe`` calls ``first``, if it is right with all that it can have: it is
        measured once, as it will run; with few tokens if its verdict is ``known``. None, with nothing changed, if it is
        not.
        """
        for mode in self.candidates((*MODES, *LAST_RESORT)):
            if describe(mode) != first:
                continue
            try:
                with installed(mode):
                    past = self._past(mode, self.rounding) if known is None else (known.crossed, known.unproven)
                    if known is None or not known.in_place:
                        list(self.steps(mode, recorded=False))
                    mode.learn()
                    mode.absorb(partial(self.steps, mode, False), packing.input_rounding)
                    packing.settle()
                    fused = mode.fuse(packing, partial(self.steps, mode), None if known is None else known.programs)
                    if known is not None and mode.programs != known.programs:
                        raise Unsupported("not the same modules run as programs")
                    measured = self.measure(mode) if known is None else self.check(mode, known)
                    if not measured.error <= self.rounding:
                        raise Unsupported(f"error {measured.error:.1e}")
                    how = first if known is None else f"{first} as before"
                    report = f"{how}: {_agrees(self.model.dtype, self.rounding)} {measured.error:.1e}"
                    windows = mode.windows if known is not None and known.windowed else None
                    verdict = Verdict(mode, *measured.kept, f"{report}, {fused} modules run as programs", *past)
                    return replace(verdict, windows=windows, measured=known)
            except Exception as error:  # whatever a mode raises on this model: all are measured
                mode.unfuse()
                mode.expand()
                log.debug("%s is not right at once: %s", first, first_line(error, 160))
        return None

    def remembered(self, verdict: Verdict, maker: str) -> Verdict:
        """The verdict with what the next load needs of it."""
        windowed, facts = verdict.windows is not None, (verdict.token_bytes, verdict.crossed, verdict.unproven)
        known = MeasuredVerdict(maker, self.rounding, *facts, windowed, self.sample())
        shown = KnownTrace.of(self.trace, self.model)
        more = {"in_place": verdict.mode.reads_in_place, "programs": verdict.mode.programs}
        return replace(verdict, measured=structs.replace(known, trace=shown, **more))

    def choose_any(self, first: str) -> Verdict:
        """``choose`` among all modes, with wider tolerances where none keeps the usual one. ``first``: what
        ``describe`` says of the one that is tried alone before. Raises ``UnsupportedModel``.
        """
        two = bool(self.model.config.is_encoder_decoder)
        modes, last = (ENCODER_DECODER, ENCODER_DECODER_LAST) if two else (MODES, LAST_RESORT)
        verdict = (
            self.choose((*modes, *last), self.rounding, only=first)
            or self.choose(modes, self.rounding)
            or self.choose(modes, self.drift(modes[:1] if two else (AloneMode,)))
            or self.choose(last, self.rounding)
        )
        if verdict is not None:
            return verdict
        reasons = "; ".join(dict.fromkeys(self.tried))
        if not self.is_causal():
            reasons = f"the result for a token depends on later tokens; {reasons}"
        raise UnsupportedModel(reasons)

    def choose(self, kinds: tuple[type[Mode], ...], tolerance: float, only: str | None = None) -> Verdict | None:
        """The first mode of ``kinds`` whose error is within ``tolerance``, installed; None where there is none.

        ``only``: none but the mode that ``describe`` calls that.
        """
        for mode in self.candidates(kinds):
            if only is not None and describe(mode) != only:
                continue
            try:
                with installed(mode):
                    measured = self.measure(mode)
                    if measured.error > tolerance:
                        raise Unsupported(f"error {measured.error:.1e}")
                    crossed, unproven = self._past(mode, tolerance)
                    if mode.learn() and not self.fuses and self.measure(mode).error > tolerance:
                        mode.in_place = frozenset()
                    self.tried.append(f"{describe(mode)}: {_agrees(self.model.dtype, tolerance)} {measured.error:.1e}")
                    report = ", ".join(self.tried)
                    return Verdict(mode, *measured.kept, report, crossed, unproven)
            except Exception as error:  # whatever a mode raises on this model is its verdict on it
                self.tried.append(f"{describe(mode)}: {first_line(error, 160)}")
        return None

    def _past(self, mode: Mode, tolerance: float) -> tuple[tuple[str, ...], str]:
        """What was crossed, and what could not be. Raises where ``mode`` is wrong past a threshold."""
        if self._thresholds is None:
            return (), "a model that is divided among ranks has no copy to measure"
        self._thresholds.check(mode, tolerance)
        return self._thresholds.crossed, self._thresholds.unproven

    def probe_divided(self) -> Verdict:
        """The verdict on a model that is divided among ranks. Raises ``UnsupportedModel``."""
        if self.trace.stateful or type(self.trace.cache) is not DynamicCache:
            raise UnsupportedModel("it keeps states besides keys and values, which cannot be divided among ranks")
        verdict = self.choose(MODES[:1], self.rounding)
        if verdict is None:
            raise UnsupportedModel(f"only the packed mode can be divided among ranks; {'; '.join(self.tried)}")
        return verdict

    def find_windowed(self, verdict: Verdict) -> Verdict:
        """The verdict with the windowed layers whose keys may leave when they are not seen."""
        mode, allowed = verdict.mode, max(self.rounding, 2 * verdict.error)
        try:
            error = self.measure_divided(mode, verdict.shapes)
            if error is None:
                return verdict
            if not error <= allowed:
                raise Unsupported(f"the results differ by {error:.1e}")
            if self._thresholds is not None and not self._thresholds.allows_release(mode, allowed):
                raise Unsupported(f"the results differ past {' or '.join(self._thresholds.crossed)}")
            return replace(verdict, windows=mode.windows)
        except RankLost:
            raise
        except Exception as problem:  # whatever a mode raises on pages in two parts
            log.info("windowed layers keep all keys: with pages in two parts %s", first_line(problem, 160))
            return verdict

    def rounded(self, verdict: Verdict, codec: Codec) -> Verdict:
        """The verdict with layers that keep KV as ``codec``."""
        if codec is Codec.EXACT:
            return verdict
        shapes, found = round_kv(self, verdict.mode, verdict.shapes, codec)
        saved = sum(shape.nbytes - shapes[at].nbytes for at, shape in verdict.shapes.items())
        return replace(verdict, shapes=shapes, token_bytes=verdict.token_bytes - saved, kv=found)

    def absorb(self, verdict: Verdict) -> Verdict:
        """The verdict with layers that attend in the space of their latents, if the model is as right then."""
        mode, allowed = verdict.mode, max(self.rounding, 2 * verdict.error)
        try:
            count = mode.absorb(partial(self.steps, mode, False), self.input_rounding)
            if not count:
                return verdict
            measured = self.measure(mode)
            if not measured.error <= allowed:
                raise Unsupported(f"the results differ by {measured.error:.1e}")
            report = f"{verdict.report}, with {count} layers over latents {measured.error:.1e}"
            kept = dict(zip(("error", "shapes", "token_bytes", "skeleton"), measured.kept, strict=True))
            return replace(verdict, report=report, **kept)
        except Exception as problem:  # whatever a model raises at rows that it did not store
            mode.expand()
            log.info("no layer attends to latents: %s", first_line(problem, 160))
            return verdict

    def fused(self, verdict: Verdict, packing: Packing) -> Verdict:
        """The verdict with modules that run as programs."""
        packing.settle()
        count = self.fuse(verdict.mode, verdict.error, packing)
        return replace(verdict, report=f"{verdict.report}, {count} modules run as programs")

    def fuse(self, mode: Mode, error: float, packing: Packing) -> int:
        """Let ``mode``, which has that error, run as programs what can be, if the model is as right then as before; how
        many modules. What the mode has learned is measured with them: each measurement takes as long as a prompt."""
        allowed = max(self.rounding, 2 * error)  # a mode may have been taken for its own drift
        try:
            fused = mode.fuse(packing, partial(self.steps, mode))
        except Exception:  # whatever a mode raises with what it has learned
            mode.unfuse()
            mode.in_place = frozenset()
            try:
                fused = mode.fuse(packing, partial(self.steps, mode))
            except Exception as problem:  # whatever a mode raises with programs
                log.info("modules run uncompiled: as programs they fail: %s", first_line(problem, 160))
                mode.unfuse()
                return 0
        if not (fused or mode.in_place):
            return fused
        found = self._error_of(mode)
        if found <= allowed:
            return fused
        with mode.uncompiled(programs=False):
            learned = self._is_right(mode, allowed)
        if learned and self._is_sensitive(mode, found):
            return fused
        if not learned:
            mode.in_place = frozenset()
            if self._is_right(mode, allowed):
                return fused
        if not fused or mode.fusion is None:
            return 0
        for simplify in (mode.fusion.unrecord, mode.fusion.unlink):
            simplify()
            if self._is_right(mode, allowed):
                return fused
        log.info("modules run uncompiled: as programs their results were wrong together")
        mode.unfuse()
        return 0

    def _is_right(self, mode: Mode, allowed: float) -> bool:
        return self._error_of(mode) <= allowed

    def _error_of(self, mode: Mode) -> float:
        """The measured error; infinite where the mode raises."""
        try:
            return self.measure(mode).error
        except Exception as error:  # whatever a mode raises with what it has learned
            log.debug("%s: %s", describe(mode), first_line(error, 160))
            return float("inf")

    def _is_sensitive(self, mode: Mode, found: float) -> bool:
        """Whether rounding makes the model be off by ``found`` too, as ``mode`` with programs is, and so allowed.
        Programs choose experts themselves, so their error is that of a few tokens with others or of none: rounding is
        tried more often.
        """
        if found > self.most_sensitive:
            return False
        with suppress(Exception):  # whatever a mode raises with what it has learned
            for seed in range(_SEEDS_ROUTED if self.is_routed else _SEEDS):
                if found <= (limit := self.sensitivity(mode, seed)):
                    log.info("the model is sensitive: rounding changes it by %.1e, programs by %.1e", limit, found)
                    self.rounding = max(self.rounding, limit)
                    return True
        return False

    def compile(self, mode: Mode, error: float, compiling: CompileOptions) -> int:
        """Let ``mode``, which has that error, run compiled what can be, if the model is as right then as before and no
        slower; how many modules."""
        compiling.tell()
        try:
            with self.unrouted():  # compiled layers choose experts themselves
                free = self.measure(mode).error if self.is_routed else error
            allowed = max(self.rounding, 2 * error, min(2 * free, MOST_ROUTED))
            compiled = mode.compile(compiling.backend, lambda: self.measure(mode))
            if not compiled:
                why = mode.compiled.refused if mode.compiled is not None else ""
                raise Unsupported(f"they cannot be compiled: {why or 'there are none'}")
            if not (found := self.measure(mode).error) <= allowed:
                raise Unsupported(f"compiled their results differ by {found:.1e}")
            if (times := self._times(mode)) > compiling.most:
                raise Unsupported(f"compiled they take {times:.2f} times as long")
            return compiled
        except Exception as problem:  # whatever a compiler or its code raises
            log.info("layers run uncompiled, which is slower on a GPU: %s", first_line(problem, 160))
            mode.uncompile()
            return 0

    def _times(self, mode: Mode) -> float:
        """How many times as long as without them a step takes with compiled modules: one that decodes, or one that
        feeds a prompt, whichever is the worse."""
        compiled, plain = [], []
        for _ in range(_ROUNDS):
            compiled.append(self._seconds(mode))
            with mode.uncompiled(programs=False):
                plain.append(self._seconds(mode))
        best = [[min(column) for column in zip(*rows, strict=True)] for rows in (compiled, plain)]
        return float(max(mine / theirs for mine, theirs in zip(*best, strict=True)))

    def _seconds(self, mode: Mode) -> tuple[float, float]:
        """Of a step in which all sessions feed a prompt, and of the quickest of some in which they decode."""
        runner, store = self.make_runner(mode)
        sessions = [self.begin_session(like, mode, store) for like in self.sessions]
        seconds = []
        for count in (1, 8, *[1] * 8):
            started = time.perf_counter()
            float(runner.run([(session, count) for session in sessions], [0])[0, 0])  # waits for the device
            seconds.append(time.perf_counter() - started)
        return seconds[1], min(seconds[2:])


def _agrees(dtype: torch.dtype, allowed: float) -> str:
    """What is said in front of the error of a mode that is right."""
    kind = str(dtype).removeprefix("torch.")
    return f"agrees with a plain forward up to rounding in {kind}; allowed {allowed:.1e}, measured"
