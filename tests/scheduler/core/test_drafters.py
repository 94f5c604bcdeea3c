"""Where a reply that has left the client's prediction meets it again."""

from __future__ import annotations

from array import array
from typing import Any

from scheduler.core.drafters import PredictionDrafter
from scheduler.core.turn import Turn
from scheduler.protocol import Submit, pack_ids
from scheduler.sampling_params import Sampling, Stopping

TEXT: Any = None  # it is not decoded
PREDICTION = array("i", [1, 2, 3, 4, 5, 2, 3, 6, 7, 2, 3, 8])


def said(*replies: list[int]) -> list[Any]:
    """What is proposed after each part of a reply."""
    turn = Turn(Submit("t", "a", pack_ids([9]), None, Sampling(), Stopping(max_tokens=50)), TEXT)
    drafter, found = PredictionDrafter(PREDICTION), []
    for reply in replies:
        turn.ids.extend(reply)
        draft = drafter.propose(turn, 2)
        found.append(draft and list(draft.ids))
    return found


def test_it_is_followed_and_found_again_behind_the_expected_place_first() -> None:
    assert said([1], [2], [3], [50], [2], [3]) == [[2, 3], [3, 4], [4, 5], None, None, [6, 7]]
    assert said([1], [2], [3], [4, 5, 2, 3, 6], [50, 2, 3], [50, 2, 3]) == [
        [2, 3],
        [3, 4],
        [4, 5],
        [7, 2],
        [8],
        [4, 5],  # none behind it: the first
    ]


def test_what_is_nowhere_in_it_is_not_found() -> None:
    assert said([50], [51], [3], [2]) == [None, None, None, None]
    assert said([7, 2]) == [[3, 8]]
