"""What penalties look at, against counting anew."""

from __future__ import annotations

import random
from array import array
from collections import Counter

from scheduler.core.token_counts import TokenCounts


def test_it_is_what_counting_anew_gives() -> None:
    rng = random.Random(1)
    for met in ([], [3, 3, 700, 5], range(100)):
        tally, made = TokenCounts(met), array("i")
        for _ in range(60):
            made.extend(rng.randrange(900) for _ in range(rng.randint(0, 9)))
            ids, counts = tally.read(made)
            got = dict(zip(ids.tolist(), counts.tolist(), strict=True))
            assert len(got) == len(ids)
            assert got == dict.fromkeys(met, 0) | Counter(made)
