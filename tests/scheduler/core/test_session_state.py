"""The state of a session: what the output head reads behind its last token, from the KV that is there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_kit import Kit

from cache.tier import Tier
from scheduler.protocol import Submit, pack_ids
from scheduler.sampling_params import Stopping

PROMPT = [65 + i % 23 for i in range(13)]


def ask(kit: Kit, ids: list[int], session: str | None = "s") -> tuple[Any, Any]:
    """The state behind a timeline, and the receipt."""
    kit._sent += 1
    request = Submit(f"state-{kit._sent}", "a", pack_ids(ids), session, stopping=Stopping(max_tokens=0), state=True)
    assert kit.engine.submit(request) is None
    kit.run()
    outcome = kit.outcomes[request.turn]
    return np.frombuffer(outcome.deltas[-1].state, "<f4"), outcome.receipt


def want(kit: Kit, ids: list[int]) -> Any:
    """The last hidden state of a forward from scratch: the oracle."""
    with torch.inference_mode():
        asked = kit.model(input_ids=torch.tensor([ids]), output_hidden_states=True, use_cache=False)
    return asked.hidden_states[-1][0, -1].numpy()


@pytest.mark.parametrize("name", ["llama", "bloom"])
def test_it_is_that_of_a_forward_from_scratch(name: str) -> None:
    """Also where the model keeps its own cache for each session, and beside turns that generate."""
    kit = Kit(name)
    said = [*PROMPT, *kit.ask(PROMPT, 4, session="s").tokens]
    beside = kit.send([1, 2, 3], 5, logprobs=1)
    state, receipt = ask(kit, said)
    assert receipt.cached == len(said) - 1
    assert np.allclose(state, want(kit, said), rtol=1e-4, atol=1e-4)
    assert kit.outcomes[beside].deltas[-1].state == b""
    other, _ = ask(kit, [*said[:-1], 67], None)
    assert not np.allclose(state, other, atol=1e-2)
    went_on = kit.ask([*said, 66], 2, session="s")
    assert went_on.receipt.cached == len(said)  # the last token has its KV now


def test_it_comes_from_disk_after_a_restart(tmp_path: Path) -> None:
    first = Kit(folder=tmp_path / "kv")
    said = [*PROMPT, *first.ask(PROMPT, 4, session="s").tokens]
    first.leave()
    kit = Kit(folder=tmp_path / "kv")
    state, receipt = ask(kit, said)
    assert receipt.loaded == {Tier.DISK: len(said) - 1}
    assert np.allclose(state, want(kit, said), rtol=1e-4, atol=1e-4)
    kit.leave()


def test_two_parts_have_none() -> None:
    kit = Kit("t5")
    refused = kit.engine.submit(Submit("t", "a", pack_ids(PROMPT), "s", stopping=Stopping(max_tokens=0), state=True))
    assert refused is not None
    assert refused.code == "invalid_prompt"
