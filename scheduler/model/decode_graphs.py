"""CUDA graphs of decode steps, in which every session feeds one token.

A graph is captured for a fixed number of rows, a bucket; if a step has fewer sessions the other rows are padding. All
buckets are captured at load, within a budget; one that is left is captured when it has occurred a few times. A graph is
used only if its logits agree with those of the uncaptured step. If the code of a step reads values from the device it
cannot be captured.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cache.attention.decode import DecodeStep, Tables
from cache.errors import first_line
from cache.memory.tier import MemoryTier
from cache.pages.packed import PackedStep
from cache.pages.pool import Page
from cache.pages.session import SessionCache
from scheduler.accel.gpu.experts import grouped_products_wait, waitless_experts
from scheduler.forward.mode import Mode
from scheduler.model.cuda_capture import Step

log = logging.getLogger("warmturn.engine")

_WARM = 3  # steps of a bucket before it is captured
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 6e-2}  # as the load-time probe allows
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

    def __init__(self, mode: Mode, tier: MemoryTier, most: int, context: int, capture: Capture) -> None:
        self._mode, self._tier, self._capture = mode, tier, capture
        self._buckets = buckets(most)
        self._pages = -(-context // tier.page_size) + 1
        self._tables: Tables | None = None
        self._logits: torch.Tensor | None = None
        self._graphs: dict[int, DecodeGraph] = {}
        self._met: Counter[int] = Counter()
        self._failed: set[int] = set()
        self.refused = ""  # why buckets have no graph, where a capture has failed
        stored = {index for index, layer in enumerate(mode.layers) if layer.stores}
        self._learning = bool(stored) and stored <= mode.in_place and not mode.stateful

    def __len__(self) -> int:
        return len(self._graphs)

    def run(self, work: Sequence[tuple[SessionCache, int]]) -> torch.Tensor | None:
        """The logits ``[len(work), V]`` of a step in which each session feeds one token, valid until the next; None
        where there is no graph for it.
        """
        graph = self._graphs.get(self._bucket(work))
        if graph is None:
            return None
        graph.step.fill([session for session, _ in work])
        graph.run()
        assert self._logits is not None
        return self._logits[: len(work)]

    def learn(self, work: Sequence[tuple[SessionCache, int]], logits: torch.Tensor) -> None:
        """``logits`` are what such a step has said without a graph, and its sessions' lengths have not grown yet:
        capture one, if it is time to.
        """
        bucket = self._bucket(work)
        if not bucket or not self._learning or bucket in self._graphs or bucket in self._failed:
            return
        self._met[bucket] += 1
        if self._met[bucket] >= _WARM:
            self._try(bucket, work, logits)

    def capture_all(
        self,
        budget: CaptureBudget = CaptureBudget(),  # noqa: B008  # a tuple
        tell: Callable[[int, int], None] = lambda done, all_of_them: None,
        used: Callable[[], int] = lambda: 0,
    ) -> None:
        """Capture all buckets at load, the largest first, whose memory the others share. ``tell`` is called with the
        number of graphs before each capture, ``used`` gives the bytes of the device that are in use.
        """
        if not self._learning:
            return
        began, before = time.monotonic(), used()
        with torch.inference_mode():
            pages, work = self._made_up()
            try:
                for bucket in reversed(self._buckets):
                    if time.monotonic() - began > budget.seconds or used() - before > budget.nbytes:
                        self.refused = self.refused or "the budget of load time or memory was spent"
                        break
                    if bucket in self._failed or not self._learning:
                        continue
                    tell(len(self._graphs), len(self._buckets))
                    chosen = work[:bucket]
                    keep = torch.arange(len(chosen), device=self._tier.device)
                    self._try(bucket, chosen, self._mode.forward(PackedStep(chosen, self._tier), keep).float())
            finally:
                for page in pages:
                    self._tier.release(page.slot)

    @property
    def captured(self) -> tuple[int, ...]:
        """The numbers of rows for which there are graphs."""
        return tuple(sorted(self._graphs))

    def _try(self, bucket: int, work: Sequence[tuple[SessionCache, int]], logits: torch.Tensor) -> None:
        """Capture a bucket. What fails for lack of memory is not tried again, nor are larger ones; any other failure
        would meet all.
        """
        try:
            self._graphs[bucket] = self._captured(bucket, work, logits)
            return
        except torch.OutOfMemoryError as error:
            self._failed |= {size for size in self._buckets if size >= bucket}
            reason = first_line(error, 160)
        except (DeviceRead, RuntimeError, ValueError, TypeError, AttributeError, IndexError) as error:
            self._learning = False
            reason = first_line(error, 160)
        self.refused = self.refused or reason
        log.info("decode steps of %d sessions and more run without a CUDA graph: %s", bucket, reason)

    def _made_up(self) -> tuple[list[Page], list[tuple[SessionCache, int]]]:
        """Sessions of a few tokens, up to the number of rows, whose next tokens a step feeds; and their pages."""
        pages: list[Page] = []
        work = []
        for number in range(min(self._buckets[-1], self._tier.free)):
            session = SessionCache("", None)
            length = 1 + number % (self._tier.page_size - 1)
            session.token_ids = array("i", [1 + number % 7] * (length + 1))
            session.pages = [Page(self._tier, self._tier.alloc())]
            pages.append(session.pages[0])
            work.append((session, length))
        keep = torch.zeros(1, dtype=torch.int64, device=self._tier.device)
        self._mode.forward(PackedStep(work, self._tier), keep)
        for session, length in work:
            session.fed(length)
        return pages, [(session, 1) for session, _ in work]

    def _bucket(self, work: Sequence[tuple[SessionCache, int]]) -> int:
        """The rows of the graph for this step; 0 where it is not one for a graph."""
        if len(work) > self._buckets[-1] or any(count != 1 or s.hidden for s, count in work):
            return 0
        if any(len(session.slots) > self._pages for session, _ in work):
            return 0
        return next(size for size in self._buckets if size >= len(work))

    def _captured(self, bucket: int, work: Sequence[tuple[SessionCache, int]], logits: torch.Tensor) -> DecodeGraph:
        """A graph that says the same as ``logits``. Raises whatever is in its way.

        What is compiled is watched as it is, since kernels show less than operations, and captured compiled. What waits
        for the device inside of torch's functions is found by ``Capture.watched``, before the capture: torch recovers
        badly from one that fails.
        """
        if self._tables is None or self._logits is None:
            self._tables = Tables(self._tier, self._buckets[-1], self._pages)
            with torch.inference_mode(False):  # a step that is watched writes there, and is not in inference mode
                self._logits = logits.new_empty(self._buckets[-1], logits.shape[1])
        place = self._logits[:bucket]
        step = DecodeStep(self._tier, self._tables, bucket)
        step.fill([session for session, _ in work])
        keep = torch.arange(bucket, device=self._tier.device)

        def forward() -> torch.Tensor:
            try:
                with waitless_experts(self._mode.model):
                    return place.copy_(self._mode.forward(step, keep))
            finally:
                step.origins.clear()

        forward()  # whatever is made the first time
        with torch.inference_mode(False), torch.no_grad(), self._mode.uncompiled(), DeviceReadWatch():
            forward()
        with self._capture.watched():
            forward()
        run = self._capture(forward)
        place.fill_(float("nan"))
        run()
        error = (place[: len(work)] - logits).float().square().mean().sqrt() / logits.float().std()
        if not float(error) <= _TOLERANCE.get(self._mode.model.dtype, 6e-2):
            raise ValueError(f"the results differ by {float(error):.1e}")
        return DecodeGraph(step, keep, run)
