"""Many races of a turn with each other verb, see ``races``."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from crash.races import RACES, all_rounds, twenty_at_once
from crash.victim import FLAGS
from server_process import ServerProcess

ROUNDS = int(os.environ.get("CRASH_RACES", "50"))  # of each kind

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(None, tmp_path_factory.mktemp("data"), *FLAGS) as running:
        yield running


@pytest.mark.parametrize("kind", RACES)
def test_a_turn_and_a_verb_leave_what_some_order_leaves(server: ServerProcess, kind: str) -> None:
    all_rounds(server.url, kind, ROUNDS)


def test_twenty_equal_turns_at_once_are_turns_in_a_row_or_refused(server: ServerProcess) -> None:
    for number in range(ROUNDS // 5):
        twenty_at_once(server.url, f"twenty-{number}")
