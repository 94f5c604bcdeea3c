"""Many kills, over live sessions and one data folder that goes through it all, see ``kills``."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from crash.client import Client, Tally
from crash.kills import CLIENTS, one_kill
from crash.victim import EXACT, Victim
from server_process import ServerProcess

KILLS = int(os.environ.get("CRASH_KILLS", "200"))
SEED = int(os.environ.get("CRASH_SEED", "1"))
SAMPLE = 2  # every so manieth client's replies are asked for again of a server that was never killed


def total(clients: list[Client]) -> Tally:
    return sum((client.tally for client in clients), Tally())


@pytest.mark.slow
def test_many_kills_lose_nothing(tmp_path: Path) -> None:
    data, reference = tmp_path / "data", tmp_path / "reference"
    data.mkdir()
    reference.mkdir()
    rng = random.Random(SEED)
    clients = [Client(f"c{n}", SEED * 1000 + n) for n in range(CLIENTS)]
    with Victim(data) as victim:
        while victim.deaths < KILLS:
            one_kill(victim, clients, rng)
            print(f"{victim.deaths} kills: {total(clients)}", flush=True)
        victim.stop()
        victim.start()
        victim.wait_healthy()
        for client in clients:
            client.compare(victim.url)
            client.compare_former(victim.url)
    with ServerProcess(None, reference, *EXACT) as never_killed:
        compared = sum(client.check_replies(never_killed.url) for client in clients[::SAMPLE])
    tally = total(clients)
    print(f"{victim.deaths} kills, {compared} replies compared: {tally}")
    assert (tally.lost, tally.wrong, tally.duplicated) == (0, 0, 0), str(tally)
    assert tally.acknowledged > victim.deaths
