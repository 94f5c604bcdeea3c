"""``Measurement``: the made-up sessions and steps on which the probe measures the error of a mode."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

import torch

from cache.memory.frames import UNDIVIDED, Division, Frames
from cache.memory.memory_tier import MemoryTier, PageShape, divide
from cache.memory.stream import put
from cache.pages import near_ends
from cache.pages import state as states
from cache.pages.layers import AttentionLayer
from cache.pages.pool import PagePool
from cache.pages.session import SessionCache
from cache.store import SessionStore
from cache.tiers import transfer
from scheduler.expert_choices import ExpertChoices
from scheduler.forward.mode import Mode
from scheduler.forward.rope import LongRope
from scheduler.forward.seq2seq import plain_forward
from scheduler.forward.trace import UNTRACED, trace
from scheduler.model.known_model import MeasuredVerdict
from scheduler.model.measured_steps import (
    CHECKED,
    HEAD,
    LENGTHS,
    LONGEST,
    OBSERVED,
    RECORDED,
    SOURCES,
    STEPS,
    asked,
    rows_of,
)
from scheduler.model.runner import ModelRunner
from scheduler.parallel.followers import Followers

# What rounding alone may do: root mean square of the difference over the standard deviation of the logits.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 6e-2}

# A model's own cached path may differ that much from its recompute before it counts as wrong (clamped time
# steps of Mamba-2).
DRIFT = 2e-2

_COLUMNS = 1024  # of logits that are kept, at most

_LEAST_WRONG = 1e-2  # what depends on other tokens than it should is off by more, in any type

MOST_SENSITIVE, MOST_ROUTED = 0.25, 0.5  # what is wrong has an error of about 1; of models with routers


class MeasuredError(NamedTuple):
    """What ``Measurement.measure`` found: ``error`` is relative to the spread of the logits, ``worst`` the largest
    difference relative to the largest logit.
    """

    error: float
    worst: float
    shapes: dict[int, PageShape]
    token_bytes: int
    skeleton: Any

    @property
    def kept(self) -> tuple[float, dict[int, PageShape], int, Any]:
        """What a verdict tells of it."""
        return self.error, self.shapes, self.token_bytes, self.skeleton


class Measurement:
    """A model, its made-up sessions, and their logits from a from-scratch forward."""

    def __init__(
        self,
        model: Any,
        layers: list[AttentionLayer],
        page_size: int,
        rope: LongRope | None,
        followers: Followers | None = None,
        known: MeasuredVerdict | None = None,
    ) -> None:
        """``followers`` have the other parts of a model that is divided. ``known``: what was measured at an earlier
        load; a from-scratch forward is then not run before it is asked for. Raises what a plain forward does.
        """
        self.model = model
        self.layers = layers
        self.page_size = page_size
        self.rope = rope
        self.followers = followers
        two = bool(model.config.is_encoder_decoder)
        sources = random_tokens(model, SOURCES) if two else [None] * len(LENGTHS)
        self.sessions = [make_session(t, s) for t, s in zip(random_tokens(model, LENGTHS), sources, strict=True)]
        self.input_rounding = 0.0  # of products: relative
        self._choices = ExpertChoices()  # of a from-scratch forward
        self._routed = True  # whether modes are given these
        self.rounding = self._allowed() if known is None else known.rounding
        shown = known.trace.restored(model) if known is not None and known.trace is not None else None
        self.trace = UNTRACED if two else shown or trace(model)

    @cached_property
    def expected(self) -> list[torch.Tensor]:
        """For each session the logits ``[tokens, V]`` of a from-scratch forward."""
        found = []
        for session in self.sessions:
            with self._choices.noted(len(session.token_ids)) if session.source is None else nullcontext():
                found.append(reference_logits(self.model, session))
        return found

    def _allowed(self) -> float:
        """What rounding may do: some models that compute in 16 bits give logits in float32."""
        return max(TOLERANCE.get(dtype, 6e-2) for dtype in (self.expected[0].dtype, self.model.dtype))

    @property
    def is_routed(self) -> bool:
        """Whether the model chooses, as routers of experts do."""
        return bool(self._choices)

    @property
    def most_sensitive(self) -> float:
        """The largest error that rounding may explain."""
        return MOST_ROUTED if self.is_routed else MOST_SENSITIVE

    @contextmanager
    def unrouted(self) -> Iterator[None]:
        """Modes choose for themselves meanwhile."""
        self._routed = False
        try:
            yield
        finally:
            self._routed = True

    def is_causal(self) -> bool:
        """Whether what the model says of a token does not depend on later ones, with the experts chosen as they were:
        rounding may choose others.
        """
        for number, (session, expected) in enumerate(zip(self.sessions, self.expected, strict=True)):
            with self._choices.repeated([(number, 0, HEAD)]) if self.is_routed else nullcontext():
                said = reference_logits(self.model, beginning(session, HEAD))
            if not self.is_same(said, expected[:HEAD]):
                return False
        return True

    def is_same(self, got: torch.Tensor, want: torch.Tensor) -> bool:
        """Whether logits ``[T, V]`` that were computed in two ways differ by rounding alone, in each row."""
        errors = (got.float() - want.float()).square().mean(-1).sqrt()
        return bool((errors <= max(_LEAST_WRONG, self.rounding) * want.float().std()).all())

    def drift(self, kinds: tuple[type[Mode], ...]) -> float:
        """What to allow a model whose own cached path differs from its own recompute, by design and a little;
        else 0.
        """
        measured = []
        for mode in self.candidates(kinds):
            with suppress(Exception):  # this model has no cached path of its own
                measured.append(self.measure(mode))
        errors = sorted(one.error for one in measured)
        if not errors or (min(one.worst for one in measured) > DRIFT and not _agree(errors)):
            return 0.0
        return 2 * errors[0]

    def candidates(self, kinds: tuple[type[Mode], ...]) -> Iterator[Mode]:
        for kind in kinds:
            for token_by_token in (False, True):
                mode = kind(self.model, self.layers, self.trace)
                mode.token_by_token = token_by_token
                if mode.stateful or not token_by_token:
                    yield mode

    def make_runner(
        self,
        mode: Mode,
        shapes: dict[int, PageShape] | None = None,
        division: Division = UNDIVIDED,
    ) -> tuple[ModelRunner, SessionStore]:
        """Room for all sessions. ``shapes``: what layers store, if it is known; with them pages can be divided."""
        size = self.page_size
        pages = sum(-(-n // size) for n in LENGTHS)
        slots = Frames(0, division.each).count_needed(pages, pages)
        tier = MemoryTier(slots, size, self.model.device, shapes, division=division)
        if self.followers is not None:
            self.followers.create_tiers(slots, 0, size, known=shapes is not None, division=division)
        pool = PagePool(tier, MemoryTier(0, size, torch.device("cpu")), mode.windows if division.near else None)
        threshold = self.rope.threshold if self.rope is not None else None
        runner = ModelRunner(mode, tier, self.rope, followers=self.followers)
        return runner, SessionStore(pool, 0 if mode.stateful else None, threshold)

    def begin_session(self, like: SessionCache, mode: Mode, store: SessionStore) -> SessionCache:
        """A session with the tokens of ``like``, none of them fed."""
        session = make_session(like.token_ids, like.source)
        session.stateful = mode.stateful
        session.warm = session.running = True
        session.long = store.is_long(len(session.token_ids))
        store.reserve(session, len(session.token_ids))
        return session

    def measure(self, mode: Mode) -> MeasuredError:
        """The worst error of any session over all steps, and what a token stores."""
        runner, store = self.make_runner(mode)
        tier = runner.tier
        sessions = [self.begin_session(like, mode, store) for like in self.sessions]
        errors = self._errors(runner, sessions)
        if self.followers is not None:
            length = sessions[0].length
            self.followers.compare(tier, transfer.rows_of(sessions[0].pages, self.page_size, 0, length))
        paged = sum(shape.nbytes for shape in tier.shapes.values())
        long, short = (states.nbytes(sessions[i].state) for i in (1, 2))
        grown = (long - short) // (LENGTHS[1] - LENGTHS[2])
        return MeasuredError(
            max(e for e, _ in errors), max(w for _, w in errors), tier.shapes, paged + max(0, grown), sessions[0].state
        )

    def sensitivity(self, mode: Mode, seed: int) -> float:
        """The error of ``mode`` without programs where the embeddings differ by a unit in the last place, or by
        ``input_rounding``: what rounding alone may do to a model whose results are sensitive, as those with routers
        are, which choose for themselves here. At most ``MOST_SENSITIVE``, or ``MOST_ROUTED``.
        """
        generator = torch.Generator(self.model.device).manual_seed(seed)

        def change(module: torch.nn.Module, args: Any, found: torch.Tensor) -> torch.Tensor:
            up = torch.rand(found.shape, generator=generator, device=found.device) < 0.5
            unit = max(torch.finfo(found.dtype).eps, self.input_rounding)
            return found * (1 + torch.where(up, 1, -1) * unit).to(found.dtype)

        hook = self.model.get_input_embeddings().register_forward_hook(change)
        try:
            with self.unrouted(), mode.uncompiled(programs=False):
                return min(self.measure(mode).error, self.most_sensitive)
        finally:
            hook.remove()

    def sample(self) -> bytes:
        """What ``check`` compares with, of a from-scratch forward: float32 ``[tokens, columns]``."""
        return _columns(self.expected[LONGEST][[*range(sum(CHECKED[:-1])), sum(CHECKED) - 1]]).numpy().tobytes()

    def check(self, mode: Mode, known: MeasuredVerdict) -> MeasuredError:
        """The error over some steps of one session, compared with what was ``known`` of them; the rest as then."""
        runner, store = self.make_runner(mode)
        session = self.begin_session(self.sessions[LONGEST], mode, store)
        steps = [(count, range(count)) for count in CHECKED[:-1]] + [(CHECKED[-1], range(CHECKED[-1])[-1:])]
        got = _columns(torch.cat([runner.run([(session, count)], rows) for count, rows in steps]))
        want = torch.frombuffer(bytearray(known.logits), dtype=torch.float32)
        error, worst = _error(got, want.view_as(got)) if want.numel() == got.numel() else (torch.inf, torch.inf)
        return MeasuredError(error, worst, runner.tier.shapes, known.token_bytes, session.state)

    def measure_divided(self, mode: Mode, shapes: dict[int, PageShape]) -> float | None:
        """The worst error over pages in two parts, if after every step sessions release the near parts that their next
        tokens do not see, which are then NaN. None if pages of this model cannot be divided. ``shapes``: what layers
        store.
        """
        if mode.windows is None or not (division := divide(shapes, mode.windows.layers, self.page_size)).near:
            return None
        runner, store = self.make_runner(mode, shapes, division)
        sessions = [self.begin_session(like, mode, store) for like in self.sessions]

        def release() -> None:
            for session in sessions:
                slots = session.near_slots
                near_ends.release(store.pool, session, session.length, all_unseen=True)
                for layer in division.near if session.released else ():
                    for pool in (runner.tier.keys[layer], runner.tier.values[layer]):
                        # In records, bytes of 255 are NaN.
                        nothing = torch.nan if pool.is_floating_point() else 255
                        pool[put(slots[: session.released][slots[: session.released] >= 0], pool.device)] = nothing

        return max(error for error, _ in self._errors(runner, sessions, release))

    def _errors(
        self, runner: ModelRunner, sessions: list[SessionCache], after: Callable[[], None] = lambda: None
    ) -> list[tuple[float, float]]:
        """For each session its error over all steps, and the worst difference. ``after`` is called after each step."""
        got = self._logits(runner, sessions, after)
        wanted = zip(got, self.expected, asked(), strict=True)
        return [_error(one, want[places].float()) for one, want, places in wanted]

    def compare(self, mode: Mode, shapes: dict[int, PageShape], others: dict[int, PageShape]) -> tuple[float, float]:
        """What changes if layers store ``others`` and not ``shapes``: the error of the logits, and the part of tokens
        whose likeliest next one is the same.
        """
        made = []
        for stored in (shapes, others):
            runner, store = self.make_runner(mode, stored)
            sessions = [self.begin_session(like, mode, store) for like in self.sessions]
            with self.unrouted():  # where a verdict is known, no choices are
                made.append(torch.cat(self._logits(runner, sessions)).float())
        before, after = made
        return relative_error(after, before), float((after.argmax(-1) == before.argmax(-1)).float().mean())

    def _logits(
        self, runner: ModelRunner, sessions: list[SessionCache], after: Callable[[], None] = lambda: None
    ) -> list[torch.Tensor]:
        """For each session the logits ``[tokens, V]`` over all steps, of the tokens that ``asked`` names."""
        got: list[list[torch.Tensor]] = [[] for _ in sessions]
        for number, work in enumerate(STEPS):
            spans = [(i, sessions[i].length, sessions[i].length + count) for i, count in work]
            routed = self._routed and self._choices and runner.mode.compiled is None and self.followers is None
            with self._choices.repeated(spans) if routed else nullcontext():
                logits = runner.run([(sessions[i], count) for i, count in work], [*chain(*rows_of(number))])
            parts = torch.split(logits, [*map(len, rows_of(number))])
            for (i, _), part in zip(work, parts, strict=True):
                got[i].append(part)
            after()
        return [torch.cat(parts) for parts in got]

    def steps(self, mode: Mode, recorded: bool = True, count: int = 2) -> Iterator[None]:
        """So many steps of one session, at most 3, of lengths that no size of the model has by chance if they are
        ``recorded``.
        """
        like = max(self.sessions, key=lambda session: len(session.token_ids))
        runner, store = self.make_runner(mode)
        session = self.begin_session(like, mode, store)
        sizes = _sizes(self.model) if recorded else set()
        lengths = [n for n in RECORDED if n not in sizes] if recorded else OBSERVED
        for length in lengths[:count]:
            runner.run([(session, length)], range(length))
            yield


def _columns(logits: torch.Tensor) -> torch.Tensor:
    """Some of the columns of logits ``[T, V]``, evenly, as float32."""
    return logits[:, :: -(-logits.shape[1] // _COLUMNS)].float().contiguous()


def _sizes(model: Any) -> set[int]:
    """The numbers that may be sizes of its tensors: those of parameters and of its config, and what one is of another
    (queries for a key).
    """
    found = {size for parameter in model.parameters() for size in parameter.shape}
    found.update(v for v in vars(model.config.get_text_config(decoder=True)).values() if type(v) is int and v > 0)
    return found | {one // other for one in found for other in found if one % other == 0}


def _agree(errors: list[float]) -> bool:
    """Whether resuming whole and token by token are off by the same small amount: then no state is forgotten,
    only clamped.
    """
    return len(errors) > 1 and errors[-1] <= 1.01 * errors[0] and errors[-1] <= 5 * DRIFT


def beginning(session: SessionCache, count: int) -> SessionCache:
    """The first ``count`` tokens of a session on their own."""
    return make_session(session.token_ids[:count], session.source)


def describe(mode: Mode) -> str:
    """The mode and its resume rule in words."""
    return f"{mode.name}, token by token" if mode.token_by_token else mode.name


def random_tokens(model: Any, lengths: tuple[int, ...], without: Collection[int] = frozenset()) -> list[array[int]]:
    """Timelines of these lengths. ``without``: tokens that are in none."""
    generator = torch.Generator().manual_seed(sum(lengths))
    width = model.get_input_embeddings().num_embeddings
    text = model.config.get_text_config(decoder=True)
    special = [getattr(text, f"{name}_token_id", None) for name in ("pad", "bos")]  # some give padding no position
    tokens = [i for i in range(min(width, 4096)) if i not in special and i not in without]
    draws = [torch.randint(0, len(tokens), (n,), generator=generator).tolist() for n in lengths]
    return [array("i", [tokens[i] for i in draw]) for draw in draws]


def make_session(tokens: array[int], source: array[int] | None) -> SessionCache:
    session = SessionCache("probe", None)
    session.token_ids, session.source = tokens, source
    return session


@torch.inference_mode()
def reference_logits(model: Any, session: SessionCache) -> torch.Tensor:
    """The oracle: logits ``[tokens, V]`` of a from-scratch forward of one timeline, no cache."""
    if session.source is not None:
        return plain_forward(model, session)
    tokens = torch.tensor([list(session.token_ids)], device=model.device)
    logits: torch.Tensor = model(input_ids=tokens, use_cache=False, return_dict=True).logits[0]
    return logits


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Of logits ``[T, V]``: root mean square of the difference over the spread; infinite where there are no numbers."""
    return _error(got, want)[0]


def _error(got: torch.Tensor, want: torch.Tensor) -> tuple[float, float]:
    """Root mean square over the spread, and the largest difference over the largest logit."""
    error = (got - want).square().mean().sqrt() / want.std()
    worst = (got - want).abs().max() / want.abs().max()
    return float(error.nan_to_num(nan=torch.inf)), float(worst.nan_to_num(nan=torch.inf))  # NaN would compare as right
