"""KV at a byte a number (``--kv-dtype``) behind windows of real sizes, over HTTP: what a server says whose memory is
short, whose chats are rewound and forked and which is restarted, is what one says where no KV ever moved.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from windows_kit import TEXT, Case, Said, Site, crowd, served

pytestmark = pytest.mark.wide

RECORDS = 2 * (16 + 2 * 16)  # bytes of a token in a layer: K and V, each the scales of two heads, then their numbers
GEMMA3 = Case("gemma3", 1024, 2 * RECORDS, RECORDS)
MISTRAL = Case("mistral", 4096, 2 * RECORDS, 0)
GPT_OSS = Case("gpt_oss", 1024, 2 * RECORDS, RECORDS)
LLAMA = Case("llama", 1024, 0, 2 * RECORDS)  # has no windows
MOVED = 2e-5  # what a log-probability may differ by after KV has moved
DRIFT = {"int8": 0.5, "fp8": 1.5}  # and from that of exact KV


class Moving(Site):
    """Remembers what was said in checked turns."""

    said: list[Said]

    def check(self, said: Said) -> None:
        """Tell nothing yet."""
        self.said.append(said)


def serving(case: Case, codec: str, folder: Path, said: list[Said], *flags: str) -> Moving:
    site = Moving(*served(case, folder, "--kv-dtype", codec, *flags))
    site.said = said
    return site


def chains(said: list[Said]) -> Iterator[list[Said]]:
    """For each turn that nothing followed, all turns from the first one of its chat to it."""
    for last in said:
        if not any(other is not last and other.talk[: len(last.talk)] == last.talk for other in said):
            yield sorted((one for one in said if last.talk[: len(one.talk)] == one.talk), key=lambda one: len(one.talk))


def evict(site: Site, case: Case, session: str) -> None:
    """Let others take the memory of a session that is on disk."""
    for _ in range(4):
        if not site.held(session)[0]:
            break
        site.talks = {name: talk for name, talk in site.talks.items() if not name.startswith("crowd")}
        crowd(site, case, 3, checked=False)
    assert site.held(session)[0] == 0
    assert site.server.metric("warmturn_evictions_total", tier="device") > 0


def move(site: Site, case: Case) -> None:
    """Turns whose windows are crossed and whose keys leave; a fork and a rewind behind a window; an eviction."""
    site.say("a", case.window + 500)
    site.say("a", case.window // 2)
    site.stored("a")
    tokens, _ = site.held("a")
    crowd(site, case, 2, checked=False)
    receipt = site.say("a", 30)
    assert receipt["reused"]["device"] + receipt["reused"].get("disk", 0) >= tokens - TEXT, receipt
    site.post("/v1/sessions/a/fork", {"id": "b", "turn": 1})
    site.talks["b"] = site.talks["a"][:2]
    assert site.say("b", 40)["recomputed"] <= TEXT
    site.say("a", 20)
    site.stored("a")
    crowd(site, case, 3, checked=False)
    site.talks["a"] = site.talks["a"][:2]  # a rewind behind a window
    assert site.say("a", 50)["recomputed"] <= TEXT
    site.stored("a")
    evict(site, case, "a")
    receipt = site.say("a", 70)
    assert receipt["recomputed"] <= TEXT
    assert receipt["reused"]["disk"] > case.window + 500
    site.stored("a")
    site.stored("b")


def compare(site: Site, codec: str, said: list[Said]) -> None:
    """Each chat of ``said`` says the same from its beginning, in memory that has room for all; and not quite what it
    says over exact KV.
    """
    changed, evicted = 0.0, site.server.metric("warmturn_evictions_total", tier="device")
    for number, chain in enumerate(chains(said)):
        for turn, one in enumerate(chain):
            again, receipt = site.turn(f"still-{number}", one.talk)
            reused = {tier: tokens for tier, tokens in receipt["reused"].items() if tokens}
            assert [*reused] == (["device"] if turn else []), receipt
            assert again.ids == one.ids
            assert float((again.told - one.told).abs().max()) <= MOVED
        changed = max(changed, drift(site, chain[-1]))
        site.server.forget_sessions()
    assert 10 * MOVED < changed < DRIFT[codec]
    assert site.server.metric("warmturn_evictions_total", tier="device") == evicted


def drift(site: Site, said: Said) -> float:
    """The most that a log-probability of the reply differs from that of exact KV."""
    exact = torch.log_softmax(site.rows(said), -1)[range(len(said.ids)), said.ids]
    return float((said.told - exact).abs().max())


@pytest.mark.slow
def test_rounded_kv_that_moved_says_what_kv_says_that_never_moved(tmp_path: Path) -> None:
    """By one server, which is not restarted: each start costs seconds."""
    said: list[Said] = []
    with serving(GEMMA3, "int8", tmp_path, said) as site:
        move(site, GEMMA3)
        assert sorted(len(chain) for chain in chains(said)) == [2, 3, 4]
        site.server.forget_sessions()
        compare(site, "int8", said)


@pytest.mark.slow
@pytest.mark.parametrize("codec", DRIFT)
@pytest.mark.parametrize("case", [GEMMA3, MISTRAL, GPT_OSS, LLAMA], ids=lambda case: case.name)
def test_a_restarted_server_says_what_one_says_that_never_moved_kv(case: Case, codec: str, tmp_path: Path) -> None:
    said: list[Said] = []
    with serving(case, codec, tmp_path, said) as site:
        move(site, case)
    with serving(case, codec, tmp_path, said) as again:
        again.talks = site.talks
        for session in ("a", "b"):
            receipt = again.say(session, 60)
            assert receipt["recomputed"] <= TEXT
            assert sum(receipt["reused"].values()) > case.window + 500
            assert receipt["reused"]["disk"] > (case.window if session == "a" else 0)  # they share their first turn
    assert sorted(len(chain) for chain in chains(said)) == [3, 4, 4]
    folder = tmp_path / "apart"
    folder.mkdir()
    with serving(case, codec, folder, [], "--kv-memory", "64M") as still:
        compare(still, codec, said)
