"""``python triton_truncation.py``: the kernel of truncation by Triton's interpreter, against a sort; prints a JSON
object for each case: its width, and the rows whose threshold keeps other tokens.
"""

from __future__ import annotations

import json
import os

os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported

import torch

from scheduler.accel.gpu.truncation_kernel import TruncationKernel
from scheduler.core.truncation import min_probabilities
from scheduler.sampling_params import Sampling

ASKED = (
    Sampling(top_k=7),
    Sampling(top_p=0.9),
    Sampling(top_k=40, top_p=0.5),
    Sampling(top_p=1e-6),
    Sampling(top_k=1, min_p=1.0),
    Sampling(top_p=0.999, min_p=0.02),
    Sampling(top_k=10**6),
)


def different(width: int, spread: float) -> list[int]:
    """The rows in which the kernel keeps other tokens than a sort."""
    logits = torch.randn(len(ASKED), width, generator=torch.Generator().manual_seed(3)) * spread * 4
    probs = torch.softmax((logits.round() if spread == 0.5 else logits) / 4, -1)  # with equals, and without
    found = TruncationKernel().find(
        probs,
        torch.tensor([min(w.top_k or width, width) for w in ASKED]),
        torch.tensor([w.top_p if w.top_p < 1.0 else 2.0 for w in ASKED], dtype=torch.float64),
        torch.tensor([w.min_p for w in ASKED], dtype=torch.float32),
    )
    same = (probs >= found) == (probs >= min_probabilities(probs, ASKED))
    return [row for row, equal in enumerate(same.all(-1).tolist()) if not equal]


if __name__ == "__main__":
    for width in (1, 300, 9001):
        for spread in (0.0, 0.5, 3.0):
            print(json.dumps({"width": width, "different": different(width, spread)}), flush=True)
