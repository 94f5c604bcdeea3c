"""What of a request was taken otherwise is counted per rule and parameter."""

from __future__ import annotations

import contextvars

from server.schemas.adaptations import MOST, Adaptation, adapt, adaptations, begin_adaptations


def test_adaptations_are_counted_in_the_order_in_which_they_came() -> None:
    begin_adaptations()
    adapt("folded", "system")
    adapt("left_out", "web_search")
    adapt("folded", "system")
    assert adaptations() == [Adaptation("folded", "system", 2), Adaptation("left_out", "web_search")]


def test_another_request_begins_without_any() -> None:
    begin_adaptations()
    adapt("folded")
    begin_adaptations()
    assert adaptations() == []


def test_what_a_thread_notes_in_a_copy_of_the_context_is_there() -> None:
    begin_adaptations()
    contextvars.copy_context().run(adapt, "folded")
    assert adaptations() == [Adaptation("folded")]


def test_a_receipt_names_so_many_at_most() -> None:
    begin_adaptations()
    for number in range(MOST + 5):
        adapt("folded", f"messages[{number}]")
    assert len(adaptations()) == MOST


def test_outside_of_a_request_nothing_is_noted() -> None:
    def outside() -> list[Adaptation]:
        adapt("folded")
        return adaptations()

    assert contextvars.Context().run(outside) == []
