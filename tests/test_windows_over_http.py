"""Windows of real sizes, over HTTP: with memory for few sessions every reply is that of a forward from scratch, to its
logits, though the keys that windowed layers do not see have left: after a rewind, in a fork, after a restart.
"""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from windows_kit import LAYER, TEXT, Case, Site, crowd, served

pytestmark = pytest.mark.wide

CASES = (
    Case("gemma3", 1024),
    pytest.param(Case("mistral", 4096, 2 * LAYER, 0), marks=pytest.mark.slow),
    pytest.param(Case("llama4", 1024, LAYER), marks=pytest.mark.slow),
    pytest.param(Case("gpt_oss", 1024), marks=pytest.mark.slow),
    pytest.param(Case("gemma4", 1024, LAYER, 2 * LAYER), marks=pytest.mark.slow),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_windows_are_crossed_rewound_forked_and_restarted(case: Case, tmp_path: Path) -> None:
    server, model = served(case, tmp_path)
    with Site(server, model) as site:
        site.say("a", case.window + 500)
        site.say("a", case.window // 2)  # another part of the window is not seen any more
        site.stored("a")
        tokens, _ = site.held("a")
        crowd(site, case, 2)
        kept, nbytes = site.held("a")
        assert kept == tokens
        assert nbytes < 0.95 * case.token * tokens  # keys have left, and their session has not
        assert server.metric("warmturn_evictions_total", tier="device") == 0
        receipt = site.say("a", 30)
        assert receipt["reused"]["device"] >= tokens - TEXT, receipt

        forked = site.post("/v1/sessions/a/fork", {"id": "b", "turn": 1})
        site.talks["b"] = site.talks["a"][:2]
        assert forked["turns"] == 1
        receipt = site.say("b", 40)
        assert receipt["recomputed"] <= TEXT  # from the disk, where no session has it in memory
        site.say("a", 20)

        site.stored("a")
        crowd(site, case, 3)
        site.talks["a"] = site.talks["a"][:2]  # a rewind behind a window
        receipt = site.say("a", 50)
        assert receipt["recomputed"] <= TEXT
        assert receipt["reused"]["disk"] + receipt["reused"]["device"] > case.window
        site.stored("a")
    assert server.process.returncode == 0
    server, _ = served(case, tmp_path)
    with Site(server, model) as again:
        again.talks = site.talks
        receipt = again.say("a", 60)
        assert receipt["reused"]["disk"] > case.window + 500
        assert receipt["recomputed"] <= TEXT
        again.say("b", 60)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES[:1], ids=lambda case: case.name)
def test_what_no_tier_holds_is_computed_again_and_told(case: Case, tmp_path: Path) -> None:
    server, model = served(case, tmp_path, "--disk-space", "0")
    with Site(server, model) as site:
        site.say("a", case.window + 500)
        site.say("a", case.window)
        for number in range(2):
            site.say(f"crowd-{number}", case.window + 300)
        assert server.metric("warmturn_evictions_total", tier="device") == 0
        assert site.held("a")[1] < 0.95 * case.token * site.held("a")[0]
        site.talks["a"] = site.talks["a"][:2]
        receipt = site.say("a", 50)
        assert receipt["miss"]["reason"] == "window_freed"
        assert receipt["recomputed"] > 0
        assert sum(receipt["reused"].values()) + receipt["recomputed"] + receipt["new"] + 1 >= receipt["prompt_tokens"]


def test_bytes_of_a_token_are_told(tmp_path: Path) -> None:
    case = Case("gemma3", 1024)
    server, _ = served(case, tmp_path)
    with server:
        (model,) = httpx.get(f"{server.url}/v1/models").json()["data"]
    told = model["warmturn"]
    assert told["kv_bytes_per_token"] == case.token
    for length in (1024, 8192, 32768):
        seen = min(length, case.window - 1 + (case.window - 1) // 16)
        assert told["kv_bytes_by_length"][str(length)] == int(case.whole + case.windowed * seen / length)
