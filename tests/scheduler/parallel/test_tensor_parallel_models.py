"""Models of other kinds divided between two ranks, and ranks that fail."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import pytest
import torch
from ranks_kit import Driver, config_of, conversations, loaded, prompt_of
from tiny_models import greedy, model_of

from cache.tier import Tier
from scheduler.model.loader import LoadFailed, load
from scheduler.parallel import followers
from scheduler.parallel.ranks import RankLost

pytestmark = [
    pytest.mark.wide,
    pytest.mark.skipif(torch.cuda.is_available(), reason="ranks on a CPU are for machines without a GPU"),
]


@pytest.mark.parametrize(
    "name",
    [
        "deepseek_v3",  # latents that every rank keeps
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3", "gemma2", "llama4", "longrope")),
    ],
)
def test_other_kinds_of_attention(name: str, tmp_path: Path) -> None:
    with loaded(name, tmp_path, 2) as (found, model):
        assert found.followers is not None
        assert bool(found.followers.split) is (name not in ("deepseek_v3", "longrope"))  # else all heads on all ranks
        driver = Driver(found, config_of(model, 2, pages=24, host_pages=80, kv_folder=str(tmp_path / "kv")))
        conversations(driver, name, sessions=3, turns=2)
        session = driver.store.find("a", "s1")
        assert session is not None
        talk = list(session.cached)
        driver.leave()
        one = Driver(
            load(config_of(model, 1), lambda message: None), config_of(model, 1, kv_folder=str(tmp_path / "kv"))
        )
        again = [*talk, 1, 2, 3]
        outcome = one.ask(again, 6, "s1")
        # Without ranks layers attend to latents, whose files are others.
        assert outcome.receipt.count_reused(Tier.DISK) == (0 if name == "deepseek_v3" else len(talk))
        assert outcome.tokens == greedy(model_of(name), again, 6, outcome.tokens)
        one.leave()


@pytest.mark.slow
def test_states_cannot_be_divided(tmp_path: Path) -> None:
    with (
        pytest.raises(LoadFailed, match="it keeps states besides keys and values"),
        loaded("qwen3_next", tmp_path, 2),
    ):
        pass


@pytest.mark.slow
def test_a_rank_that_hangs_ends_rank_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()
    monkeypatch.setattr(followers, "_EXCHANGE_TIMEOUT", 1.0)
    monkeypatch.setattr(followers, "_end", ended.set)
    with loaded("llama", tmp_path, 2) as (found, model):
        assert found.followers is not None
        driver = Driver(found, config_of(model, 2))
        found.followers.serving()
        driver.ask(prompt_of(5), 3)
        follower = found.followers._processes[0]
        follower.send_signal(signal.SIGSTOP)
        late = threading.Timer(60, follower.kill)  # if nobody else does
        late.start()
        with pytest.raises(RankLost):
            driver.ask(prompt_of(6), 3)
        late.cancel()
        assert ended.wait(60)
        assert found.followers.lost == "the other ranks have kept rank 0 waiting for 1 seconds"
