"""A little of every crash test, on one server: the long ones are run by ``make test-crash``."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from crash.client import Client
from crash.kills import one_kill
from crash.races import RACES, all_rounds, twenty_at_once
from crash.sweep import Sweep
from crash.tracer import usable
from crash.victim import Victim


@pytest.fixture(scope="module")
def victim(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Victim]:
    with Victim(tmp_path_factory.mktemp("data")) as running:
        yield running


@pytest.mark.wide
@pytest.mark.parametrize("kind", RACES)
def test_a_turn_and_a_verb_leave_what_some_order_leaves(victim: Victim, kind: str) -> None:
    all_rounds(victim.url, kind, 3)


def test_twenty_equal_turns_at_once_are_turns_in_a_row_or_refused(victim: Victim) -> None:
    twenty_at_once(victim.url, "twenty")


@pytest.mark.wide
@pytest.mark.skipif(not usable(), reason="needs strace, and leave to attach to other processes")
def test_a_kill_at_a_rename_loses_nothing(victim: Victim, tmp_path: Path) -> None:
    sweep = Sweep(victim, victim.url, "engine", tmp_path / "strace")
    sweep.point("renameat", 2)
    assert (sweep.kills, sweep.wrong) == (1, [])


def test_a_kill_of_the_server_loses_nothing(victim: Victim) -> None:
    clients = [Client(f"c{n}", n) for n in range(4)]
    assert all(client.act(victim.url) for client in clients)
    one_kill(victim, clients, random.Random(4), engine=0.0)
    for client in clients:
        tally = client.tally
        assert (tally.lost, tally.wrong, tally.duplicated) == (0, 0, 0), str(tally)
