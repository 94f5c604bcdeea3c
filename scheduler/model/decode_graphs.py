"""CUDA graphs of decode steps, in which every session feeds one token.

A graph is captured for a fixed number of rows and a longest history, a bucket; if a step has fewer sessions the other
rows are padding. All buckets are captured at load, within a budget; one that is left is captured when it has occurred a
few times. A graph is used only if its logits agree with those of the uncaptured step. If the code of a step reads
values from the device it cannot be captured.

Where attention reads pages in place histories of all lengths have one graph. Elsewhere a graph gathers the keys of the
longest history that it is for, so there are some for each length.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cache.attention.decode import DecodeStep, Tables
from cache.attention.decode_rows import RowsStep
from cache.error_line import first_line
from cache.memory.memory_tier import MemoryTier
from cache.memory.stream import put
from cache.pages import state as states
from cache.pages.packed import PackedStep
from cache.pages.pool import Page
from cache.pages.session import SessionCache
from scheduler.accel.gpu.captured_experts import grouped_products_wait, waitless_experts
from scheduler.accel.gpu.constants import waitless_constants
from scheduler.forward.mode import Mode
from scheduler.model.cuda_capture import Step
from scheduler.model.mixed_steps import longest_beside

log = logging.getLogger("warmturn.engine")

_WARM = 3  # steps of a bucket before it is captured
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 6e-2}  # as the load-time probe allows
_TYPICAL = 16  # sessions that decode beside a prompt
_SHORTEST = 512  # tokens: keys that a graph gathers at least
_GATHERED = 256 << 20  # bytes: keys and values of a layer that a graph gathers at most
_LOOKS = frozenset({"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "bincount"})
_WAITS = frozenset({"equal", "unique_consecutive", "_grouped_mm", "grouped_mm_fallback"})  # inside, unseen


class Capture(Protocol):
    """How steps are captured, see ``CudaCapture``."""

    def watched(self) -> AbstractContextManager[None]:
        """Within it, whatever waits for the device raises ``RuntimeError``."""

    def __call__(self, step: Step) -> Callable[[], Any]:
        """The captured step."""


class CaptureBudget(NamedTuple):
    """What captures at load may take: seconds, and bytes of the device's memory."""

    seconds: float = 60.0
    nbytes: int = 1 << 30


class DeviceRead(Exception):
    """The code of a step reads values from the device."""


class DeviceReadWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises ``DeviceRead`` where code waits for the device or depends on computed values. Does not work in inference
    mode, which hides the operations.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Every operation of a step."""
        name = func.overloadpacket.__name__
        waits = name in _WAITS and (name != "_grouped_mm" or grouped_products_wait(args[0].device, args[0].dtype))
        if waits or name in _LOOKS or (name == "repeat_interleave" and func._overloadname == "Tensor"):
            raise DeviceRead(name)
        tensors = [a for a in (*args, *(kwargs or {}).values()) if isinstance(a, torch.Tensor)]
        if name in ("index", "index_put", "index_put_") and any(
            i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1]
        ):
            raise DeviceRead(f"{name} by a mask")
        out = func(*args, **(kwargs or {}))
        copied = name in ("_to_copy", "copy_") and isinstance(out, torch.Tensor)
        if copied and any(t.device != out.device and t.numel() > 0 for t in tensors):
            raise DeviceRead("a copy between host and device")
        return out


class GraphBucket(NamedTuple):
    """What a graph is for: up to so many ``rows``, each a session of up to so many ``pages``."""

    rows: int
    pages: int


class DecodeGraph(NamedTuple):
    """The graph of a bucket: its step and logit rows, whose tensors must live as long as the graph, and ``run``, which
    launches it.
    """

    step: DecodeStep
    keep: torch.Tensor
    run: Callable[[], Any]


def buckets(most: int) -> list[int]:
    """The numbers of rows for which graphs are made: few, and never many more than are needed."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, most + 64, 64)]
    return [size for size in sizes if size < most] + [most]


class DecodeGraphs:
    """The graphs of one model over the pages of one tier; ``most`` rows, sessions of up to ``context`` tokens.

    All graphs leave their logits in one place: what one says is read before the next runs.
    """

    def __init__(
        self, mode: Mode, tier: MemoryTier, most: int, context: int, capture: Capture, state_bytes: int = 0
    ) -> None:
        """``state_bytes``: what the states of a graph's sessions may take, where sessions have states."""
        self._mode, self._tier, self._capture, self._state_bytes = mode, tier, capture, state_bytes
        self._rows_of, self._context = buckets(most), context
        self._pages = -(-context // tier.page_size) + 1
        self._graphed = mode.graphed
        self._learning = self._graphed is not None
        gathers = self._learning and self._graphed is not mode
        self._buckets = [GraphBucket(rows, self._pages) for rows in self._rows_of] if not gathers else self._gathering()
        self._tables: list[Tables] = []  # for each part of pages
        self._logits: torch.Tensor | None = None
        self._graphs: dict[GraphBucket, DecodeGraph] = {}
        self._met: Counter[GraphBucket] = Counter()
        self._failed: set[GraphBucket] = set()
        self.reserved = 0  # bytes of the states of sessions that graphs run for
        self.refused = ""  # why buckets have no graph, where a capture has failed
        self.beside = 0  # the most tokens of prompts beside which a graph is worth a forward of its own

    def __len__(self) -> int:
        return len(self._graphs)

    def run(self, work: Sequence[tuple[SessionCache, int]]) -> torch.Tensor | None:
        """The logits ``[len(work), V]`` of a step in which each session feeds one token, valid until the next; None
        where there is no graph for it.
        """
        bucket = self._bucket(work)
        graph = self._graphs.get(bucket) if bucket is not None else None
        if bucket is None or graph is None:
            return None
        sessions = [session for session, _ in work]
        rows = self._rows(sessions, bucket.rows)
        if rows is None:
            return None
        graph.step.fill(_arrange(sessions, rows))
        graph.run()
        assert self._logits is not None
        logits = self._logits[: len(work)]
        return logits if rows == sorted(rows) else logits.index_select(0, put(np.array(rows), logits.device))

    def parts(self, work: Sequence[tuple[SessionCache, int]]) -> list[list[int]]:
        """The numbers of the sessions for whose next tokens there is a graph, and of the others, which feed prompts;
        empty where all of a step run together.
        """
        prompts = [at for at, (session, count) in enumerate(work) if count != 1 or not _is_graphable(session)]
        tokens = sum(work[at][1] for at in prompts)
        if not 0 < len(prompts) < len(work) or tokens > self.beside:
            return []
        decodes = sorted({*range(len(work))} - {*prompts})
        return [decodes, prompts] if self._bucket([work[at] for at in decodes]) in self._graphs else []

    def learn(self, work: Sequence[tuple[SessionCache, int]]) -> None:
        """Such a step has run without a graph, and its sessions' lengths have not grown yet: capture one, if it is time
        to. Where sessions have states, which have gone on, graphs are captured at load only.
        """
        bucket = self._bucket(work)
        if bucket is None or not self._learning or self._mode.stateful:
            return
        if bucket in self._graphs or bucket in self._failed:
            return
        self._met[bucket] += 1
        if self._met[bucket] >= _WARM:
            self._try(bucket, work)

    def capture_all(
        self,
        budget: CaptureBudget = CaptureBudget(),  # noqa: B008  # a tuple
        tell: Callable[[int, int], None] = lambda done, all_of_them: None,
        used: Callable[[], int] = lambda: 0,
    ) -> None:
        """Capture all buckets at load, the most rows first, whose memory the others share. ``tell`` is called with the
        number of graphs before each capture, ``used`` gives the bytes of the device that are in use.
        """
        if not self._learning:
            return
        began, before = time.monotonic(), used()
        with torch.inference_mode():
            pages, work = self._make_sessions()
            try:
                self._make_rows(work)
                for bucket in sorted(self._buckets, key=lambda bucket: (bucket.pages, -bucket.rows)):
                    if time.monotonic() - began > budget.seconds or used() - before > budget.nbytes:
                        self.refused = self.refused or "the budget of load time or memory was spent"
                        break
                    if bucket in self._failed or not self._learning:
                        continue
                    tell(len(self._graphs), len(self._buckets))
                    self._try(bucket, work[: bucket.rows])
                if self._graphs:
                    some = work[: min(_TYPICAL, max(self.captured))]
                    self.beside = longest_beside(self.run, self._mode, self._tier, some, self._context)
            finally:
                for page in pages:
                    self._tier.release(page.slot)
                    self._tier.release(page.near, near=True)

    @property
    def captured(self) -> tuple[int, ...]:
        """The numbers of rows for which there are graphs."""
        return tuple(sorted({bucket.rows for bucket in self._graphs}))

    def _try(self, bucket: GraphBucket, work: Sequence[tuple[SessionCache, int]]) -> None:
        """Capture a bucket, whose sessions' states are then used up. What fails for lack of memory is not tried again,
        nor are larger ones; any other failure would meet all.
        """
        try:
            self._graphs[bucket] = self._capture_checked(bucket, work)
            return
        except torch.OutOfMemoryError as error:
            self._failed |= {one for one in self._buckets if one.rows >= bucket.rows and one.pages >= bucket.pages}
            reason = first_line(error, 160)
        except (DeviceRead, RuntimeError, ValueError, TypeError, AttributeError, IndexError) as error:
            self._learning = False
            reason = first_line(error, 160)
        self.refused = self.refused or reason
        log.info("decode steps of %d sessions and more run without a CUDA graph: %s", bucket.rows, reason)

    def _make_rows(self, work: Sequence[tuple[SessionCache, int]]) -> None:
        """Where sessions have states, make rows for those of as many sessions as ``state_bytes`` allow."""
        if not self._mode.stateful:
            return
        one = max((states.nbytes(session.state) for session, _ in work), default=self._state_bytes + 1)
        self._buckets = [bucket for bucket in self._buckets if bucket.rows * one <= self._state_bytes]
        if self._buckets:
            most = self._buckets[-1].rows
            self._mode.rows.reserve(work[0][0].state, most)
            self.reserved = most * one
        else:
            self._learning, self.refused = False, "the states of sessions take too much memory"

    def _make_sessions(self) -> tuple[list[Page], list[tuple[SessionCache, int]]]:
        """Sessions of a few tokens, up to the number of rows, whose next tokens a step feeds; and their pages."""
        pages: list[Page] = []
        work = []
        for number in range(self._rows_of[-1]):
            if not self._tier.fits(1, 1):
                break
            session = SessionCache("", None, self._mode.stateful)
            length = 1 + number % (self._tier.page_size - 1)
            session.token_ids = array("i", [1 + number % 7] * (length + 1))
            session.pages = [Page(self._tier, self._tier.alloc(), self._tier.alloc(near=True))]
            pages.append(session.pages[0])
            work.append((session, length))
        keep = torch.zeros(1, dtype=torch.int64, device=self._tier.device)
        self._mode.forward(PackedStep(work, self._tier), keep)
        for session, length in work:
            session.on_fed(length)
        return pages, [(session, 1) for session, _ in work]

    def _gathering(self) -> list[GraphBucket]:
        """The buckets of graphs that gather keys: lengths double."""
        shapes = self._tier.shapes.values()
        page = max((shape.nbytes for shape in shapes), default=1) * self._tier.page_size
        pages = [min(-(-_SHORTEST // self._tier.page_size), self._pages)]
        while pages[-1] < self._pages:
            pages.append(min(2 * pages[-1], self._pages))
        return [GraphBucket(rows, most) for rows in self._rows_of for most in pages if rows * most * page <= _GATHERED]

    def _bucket(self, work: Sequence[tuple[SessionCache, int]]) -> GraphBucket | None:
        """The smallest bucket for this step; None where it is not one for a graph."""
        if any(count != 1 or not _is_graphable(session) for session, count in work):
            return None
        if any(len(session.slots) > self._pages for session, _ in work):
            return None
        pages = 1 + max(session.length for session, _ in work) // self._tier.page_size
        fitting = (one for one in self._buckets if one.rows >= len(work) and one.pages >= pages)
        return next(fitting, None)

    def _capture_checked(self, bucket: GraphBucket, work: Sequence[tuple[SessionCache, int]]) -> DecodeGraph:
        """A graph that says the same as a step without one, and leaves the same states. Raises whatever is in its way.

        What is compiled is watched as it is, since kernels show less than operations, and captured compiled. What waits
        for the device inside of torch's functions is found by ``Capture.watched``, before the capture: torch recovers
        badly from one that fails.
        """
        before = [states.clone(session.state) for session, _ in work]
        logits = self._mode.forward(PackedStep(work, self._tier), self._numbers(len(work))).float()
        after = [states.clone(session.state) for session, _ in work]
        graphed, place = self._graphed, self._place(logits)[: bucket.rows]
        assert graphed is not None
        step, keep = self._make_step(bucket), self._numbers(bucket.rows)
        self._fill(step, work, before)

        def forward() -> torch.Tensor:
            try:
                with waitless_experts(self._mode.model), waitless_constants(self._tier.device):
                    return place.copy_(graphed.forward(step, keep))
            finally:
                step.origins.clear()

        forward()  # whatever is made the first time
        with torch.inference_mode(False), torch.no_grad(), self._mode.uncompiled(), DeviceReadWatch():
            forward()
        with self._capture.watched():
            forward()
        run = self._capture(forward)
        place.fill_(float("nan"))
        rows = self._fill(step, work, before)
        run()
        found = [place[rows], *(t for session, _ in work for t in states.tensors_of(session.state).values())]
        wanted = [logits, *(t for state in after for t in states.tensors_of(state).values())]
        error = max(_difference(one, other) for one, other in zip(found, wanted, strict=True))
        if not error <= _TOLERANCE.get(self._mode.model.dtype, 6e-2):
            raise ValueError(f"the results differ by {error:.1e}")
        return DecodeGraph(step, keep, run)

    def _place(self, logits: torch.Tensor) -> torch.Tensor:
        """Where all graphs leave their logits, which are like ``logits``; made with the page tables at first."""
        if self._logits is None:
            parts = (False, True) if self._tier.near_layers else (False,)
            most = self._buckets[-1].rows
            self._tables = [Tables(self._tier, most, self._pages, near) for near in parts]
            with torch.inference_mode(False):  # a step that is watched writes there, and is not in inference mode
                self._logits = logits.new_empty(most, logits.shape[1])
        return self._logits

    def _make_step(self, bucket: GraphBucket) -> DecodeStep:
        """A step that a graph of this bucket reads."""
        if self._graphed is self._mode:
            return DecodeStep(self._tier, self._tables, bucket.rows)
        return RowsStep(self._tier, self._tables, bucket.rows, bucket.pages)

    def _numbers(self, count: int) -> torch.Tensor:
        return torch.arange(count, device=self._tier.device)

    def _fill(self, step: DecodeStep, work: Sequence[tuple[SessionCache, int]], before: Sequence[Any]) -> list[int]:
        """Set the step to the next tokens of sessions whose states are as ``before``; returns their rows. Raises
        ``ValueError`` where their states cannot be there.
        """
        for (session, _), state in zip(work, before, strict=True):
            session.state = states.clone(state)
        sessions = [session for session, _ in work]
        rows = self._rows(sessions, step.tokens)
        if rows is None:
            raise ValueError("the states of sessions cannot be one batch")
        step.fill(_arrange(sessions, rows))
        return rows

    def _rows(self, sessions: Sequence[SessionCache], bucket: int) -> list[int] | None:
        """The rows of ``sessions`` in a step of a graph, with their states; None where their states cannot be there."""
        return self._mode.rows.bind(sessions, bucket) if self._mode.stateful else [*range(len(sessions))]


def _is_graphable(session: SessionCache) -> bool:
    """Whether a graph knows such sessions: positions are indices, no tokens are hidden, and there is no adapter."""
    return not session.hidden and session.media is None and session.key is None


def _arrange(sessions: Sequence[SessionCache], rows: Sequence[int]) -> list[SessionCache]:
    """``sessions`` in the order of their ``rows``."""
    return [session for _, session in sorted(zip(rows, sessions, strict=True), key=lambda pair: pair[0])]


def _difference(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The RMS of the difference relative to the deviation of ``wanted``; NaN counts as endless."""
    error = (found - wanted).float().square().mean().sqrt() / wanted.float().std().clamp(min=1e-6)
    return float(error) if not torch.isnan(error) else float("inf")
