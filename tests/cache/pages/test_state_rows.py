"""Rows of states: who holds them, what a session keeps that has lost its row, what refuses rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.cache_utils import LinearAttentionLayer

from cache.pages import state as states
from cache.pages.session import SessionCache
from cache.pages.state_rows import StateRows


def layer(value: float, width: int = 3) -> Any:
    """The state of one layer: a convolution's last inputs and a recurrence's matrix."""
    made = LinearAttentionLayer()
    made.update_conv_state(torch.full((1, 2, width), float(value)))
    made.update_recurrent_state(torch.full((1, 2, 2), float(value)))
    return made


def sessions(*values: float) -> list[SessionCache]:
    found = []
    for value in values:
        session = SessionCache("", None, stateful=True)
        session.state = [layer(value), layer(value + 0.5)]
        found.append(session)
    return found


def values(session: SessionCache) -> list[float]:
    """What the tensors of its state are full of."""
    tensors = states.tensors_of(session.state).values()
    assert all(bool((tensor == tensor.flatten()[0]).all()) for tensor in tensors)
    return [float(tensor.flatten()[0]) for tensor in tensors]


def advance(rows: StateRows, count: int, by: float = 10.0) -> None:
    """A step that leaves its results in place."""
    for tensor in states.tensors_of(rows.first(count)).values():
        assert tensor.shape[0] == count
        tensor.add_(by)
    rows.settle(count)


def test_a_session_keeps_its_row_and_a_step_is_in_its_state() -> None:
    rows, (a, b, c) = StateRows(), sessions(1, 2, 3)
    assert rows.bind([a, b, c]) == [0, 1, 2]
    advance(rows, 3)
    assert [values(one)[0] for one in (a, b, c)] == [11, 12, 13]
    state = b.state
    assert rows.bind([c, b]) == [0, 1]  # only who lay behind has moved
    assert b.state is state
    advance(rows, 2)
    assert [values(one) for one in (a, b, c)] == [
        [11, 11, 11.5, 11.5],
        [22, 22, 22.5, 22.5],
        [23, 23, 23.5, 23.5],
    ]
    assert rows.bind([a, c, b]) == [2, 0, 1]


def test_nobody_is_computed_with_who_is_not_in_the_step() -> None:
    rows, (a, b, c) = StateRows(), sessions(1, 2, 3)
    rows.reserve(a.state, 4)
    rows.bind([a, b, c])
    assert rows.bind([b], 4) == [0]
    advance(rows, 4)
    assert [values(one)[0] for one in (a, b, c)] == [1, 12, 3]


@pytest.mark.parametrize("moved", [False, True])
def test_a_state_of_another_object_over_the_same_tensors_is_kept(moved: bool) -> None:
    rows, (a, b, c) = StateRows(), sessions(1, 2, 3)
    rows.bind([a, b])
    if moved:
        a.move(torch.device("cpu"))  # a new object with the same tensors
    else:
        a.state = [a.state[0], layer(7)]
    kept = values(a)
    assert rows.bind([c, b]) == [0, 1]
    advance(rows, 2)
    assert values(a) == kept


def test_a_state_that_was_set_back_is_what_counts() -> None:
    rows, (a, b) = StateRows(), sessions(1, 2)
    rows.bind([a, b])
    before = a.draft([])
    advance(rows, 2)
    after = a.undraft(before, 0)
    assert rows.bind([a, b]) == [0, 1]
    advance(rows, 2, by=100)
    assert values(a)[0] == 101
    a.state = after.state  # where the first step had left it
    assert values(a)[0] == 11


def test_a_tensor_that_was_put_in_place_of_a_view_is_what_counts() -> None:
    rows, (a, b) = StateRows(), sessions(1, 2)
    rows.bind([a, b])
    a.state[0].conv_states[0] = torch.full((1, 2, 3), 5.0)
    rows.bind([a, b])
    advance(rows, 2)
    assert values(a) == [15, 11, 11.5, 11.5]


def test_more_rows_are_made_unless_their_addresses_are_fixed() -> None:
    rows, many = StateRows(), sessions(*range(7))
    for count in (2, 3, 7):
        assert rows.bind(many[:count]) is not None
        advance(rows, count, by=0)
    assert [values(one)[0] for one in many] == [*range(7)]
    rows.reserve(many[0].state, 3)
    assert rows.bind(many) is None
    assert rows.bind(many[:3]) == [0, 1, 2]
    assert [values(one)[0] for one in many] == [*range(7)]


def test_a_session_that_is_gone_leaves_its_row() -> None:
    rows, (a, b) = StateRows(), sessions(1, 2)
    rows.bind([a, b])
    del a
    assert rows.bind([*sessions(5), b]) == [0, 1]
    assert values(b)[0] == 2


def test_states_that_differ_are_no_batch() -> None:
    rows, (a, b) = StateRows(), sessions(1, 2)
    b.state[1] = layer(2.5, width=4)
    assert rows.bind([a, b]) is None
    b.state = None
    assert rows.bind([a, b]) is None
    fresh = sessions(3)[0]
    fresh.state[0].has_previous_state[0] = False
    assert rows.bind([a, fresh]) is None


@pytest.mark.parametrize("counts", [False, True])
def test_results_of_another_shape_and_counters_end_the_rows(counts: bool) -> None:
    """A step that replaces tensors or counts in Python: its results are right, and there are no rows any more."""
    rows, (a, b) = StateRows(), sessions(1, 2)
    rows.bind([a, b])
    part = rows.first(2)
    if counts:
        part[0].seen = 1
        part[1].recurrent_states[0].add_(10)
    else:
        part[1].recurrent_states[0] = part[1].recurrent_states[0].repeat(1, 2, 1) + 10
    rows.settle(2)
    assert (rows.refused, rows.bind([a, b])) == (True, None)
    assert [values(a)[-1], values(b)[-1]] == [11.5, 12.5]
    a.state[1].recurrent_states[0].add_(1)
    assert [values(a)[-1], values(b)[-1]] == [12.5, 12.5]


def test_results_elsewhere_are_brought_back_to_the_rows() -> None:
    """Those of one tensor may be where another was before."""
    rows, (a, b) = StateRows(), sessions(1, 2)
    rows.bind([a, b])
    view = a.state[0].recurrent_states[0]
    first, second = (layer.recurrent_states for layer in rows.first(2))
    first[0], second[0] = second[0], first[0]
    rows.settle(2)
    assert [values(one) for one in (a, b)] == [[1, 1.5, 1.5, 1], [2, 2.5, 2.5, 2]]
    assert a.state[0].recurrent_states[0] is view
    assert (rows.refused, rows.bind([a, b])) == (False, [0, 1])
    advance(rows, 2)
    assert [values(one)[0] for one in (a, b)] == [11, 12]
