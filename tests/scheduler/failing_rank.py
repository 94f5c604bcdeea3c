"""An engine process whose rank 0 fails alone when a file is there: ``python failing_rank.py FILE``.

The other ranks are in the middle of that step then, and rank 0 has asked them for pages, as it does when it writes KV
to disk beside the steps.
"""

from __future__ import annotations

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from scheduler import __main__ as engine
from scheduler.forward.modes import PackedMode

BESIDE = ThreadPoolExecutor(1)


def main(file: Path) -> None:
    """Run the engine, as ``python -m scheduler`` does."""
    forward = PackedMode.forward

    def failing(mode: PackedMode, step: Any, keep: torch.Tensor) -> torch.Tensor:
        if file.exists():
            BESIDE.submit(step.tier.gather, torch.arange(4))
            time.sleep(0.5)
            raise RuntimeError("planted")
        return forward(mode, step, keep)

    PackedMode.forward = failing  # type: ignore[method-assign,assignment]
    engine.run()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
