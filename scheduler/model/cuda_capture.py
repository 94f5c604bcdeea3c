"""``CudaCapture``: captures steps as CUDA graphs, all of them in one pool of memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

Step = Callable[[], torch.Tensor]


class CudaCapture:
    """How steps are captured on the current GPU."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Within it, whatever waits for the device raises ``RuntimeError``: inside of torch's functions too, which no
        dispatch mode sees.
        """
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)

    def __call__(self, step: Step) -> Callable[[], Any]:
        """The captured step. Raises what the capture raises; torch can then capture and free memory as before."""
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        # Other threads copy pages meanwhile: what they ask of the device is none of this capture's business.
        try:
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                step()
        except BaseException:
            # torch 2.11 leaves the pool recording where the end of a capture fails: no memory could be freed after it.
            # Where torch has ended that itself it raises here.
            with suppress(RuntimeError, AttributeError):
                torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self._pool)
            self._pool = torch.cuda.graph_pool_handle()  # what was begun there is not used again
            raise
        finally:
            torch.cuda.set_stream(stream)  # which torch forgets where a capture fails
        return graph.replay
