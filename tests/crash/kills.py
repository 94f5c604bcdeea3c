"""kill -9 at random moments, while clients talk."""

from __future__ import annotations

import random
import time
from threading import Event, Thread

from crash.client import Client
from crash.victim import Victim

CLIENTS = 8
ENGINE = 0.6  # of the kills hit the engine: it comes back sooner
EARLY = 0.15  # of the kills of a server are followed by another one while it starts
LONGEST = 2.5  # seconds of traffic before a kill


def traffic(clients: list[Client], url: str, seconds: float, kill: Event) -> list[Thread]:
    """Let every client act until it is not answered any more, or ``kill`` is set and its request is over."""

    def work(client: Client) -> None:
        while client.act(url) and not kill.is_set():
            pass

    threads = [Thread(target=work, args=(client,)) for client in clients]
    for thread in threads:
        thread.start()
    time.sleep(seconds)
    return threads


def one_kill(victim: Victim, clients: list[Client], rng: random.Random, engine: float = ENGINE) -> None:
    """Traffic, a kill in the middle of it, and everything compared once the server is back. ``engine``: how likely it
    is the engine that is killed.
    """
    kill = Event()
    threads = traffic(clients, victim.url, rng.uniform(0, LONGEST), kill)
    if rng.random() < engine:
        victim.kill_engine()
        kill.set()
    else:
        kill.set()
        victim.kill_server()
        victim.start()
        if rng.random() < EARLY:
            time.sleep(rng.uniform(0, 6))
            victim.kill_server()
            victim.start()
    for thread in threads:
        thread.join()
    victim.wait_healthy()
    for client in clients:
        client.compare(victim.url)
