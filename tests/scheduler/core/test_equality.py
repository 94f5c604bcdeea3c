"""Correctness is equality: the engine's tokens are those of a from-scratch forward, whatever is shared,
evicted or preempted.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_kit import ALL, ATTENTION, make_parts, merged, save_adapter
from engine_kit import Kit
from tiny_models import ARCHITECTURES, OTHERS, RECURRENT, greedy, logits, make_model, model_of
from wide import widely

from cache.tier import Tier
from scheduler.protocol import FinishReason
from scheduler.sampling_params import Sampling

NARROW = "llama gemma3 deepseek_v3 qwen3_next falcon bloom longrope"  # one of each kind of storage and mode
PRESSURE: dict[str, dict[str, Any]] = {
    "roomy": {"pages": 512},
    "dropped": {"pages": 28},
    "to the host": {"pages": 28, "host_pages": 24},
    "all on the host": {"pages": 28, "host_pages": 400},
    "preempted": {"pages": 20, "host_pages": 6, "step_tokens": 16},
    "to disk": {"pages": 28, "folder": True},
    "through a small disk": {"pages": 28, "host_pages": 8, "folder": True, "disk_space": 60_000},
}
STORED = "llama qwen3_next"  # KV and states: they meet every pressure
BRIEF = "preempted", "to disk"  # what all others meet, as KV moves there


def _pressures() -> Iterator[Any]:
    """Names and pressures."""
    for name in ARCHITECTURES + RECURRENT + OTHERS + ("longrope",):
        for pressure in PRESSURE:
            narrow = name in NARROW.split() and (name in STORED.split() or pressure in BRIEF)
            yield pytest.param(name, pressure, marks=() if narrow else pytest.mark.wide)


def _conversation(kit: Kit, seed: int, clients: int, turns: int, name: bool) -> dict[int, list[int]]:
    """``clients`` chats of ``turns`` turns, interleaved at random; an earlier message is edited now and then. Returns
    what each has said in the end.
    """
    rng = random.Random(seed)
    history: dict[int, list[int]] = {c: [rng.randrange(200) for _ in range(rng.randint(3, 9))] for c in range(clients)}
    left = dict.fromkeys(history, turns)
    running: dict[str, tuple[int, int]] = {}
    while any(left.values()) or running:
        idle = [c for c in history if left[c] and c not in {client for client, _ in running.values()}]
        for client in rng.sample(idle, k=rng.randint(0, len(idle))):
            if rng.random() < 0.2:
                cut = rng.randrange(1, len(history[client]))
                history[client][cut:] = []
            history[client] += [rng.randrange(200) for _ in range(rng.randint(1, 9))]
            session = f"s{client}" if name and client % 2 else None
            count = rng.randint(1, 6)
            running[kit.send(history[client], count, session=session)] = (client, count)
            left[client] -= 1
        if not kit.engine.idle:
            kit.step()
        for turn, (client, count) in list(running.items()):
            outcome = kit.outcomes[turn]
            if outcome.finish_reason is None:
                continue
            assert outcome.finish_reason is FinishReason.LENGTH
            assert outcome.tokens == greedy(kit.model, history[client], count, outcome.tokens)
            history[client] += outcome.tokens
            del running[turn]
    return history


@pytest.mark.parametrize("name", widely(ARCHITECTURES + RECURRENT + OTHERS + ("longrope",), NARROW))
def test_the_oracle_is_the_same_whatever_the_draft(name: str) -> None:
    model, prompt = model_of(name), list(range(40, 62))  # longrope's threshold is crossed by the third token
    one_by_one = greedy(model, prompt, 6)
    wrong = [*one_by_one[:3], one_by_one[3] ^ 1, 7, 7]
    assert greedy(model, prompt, 6, one_by_one) == greedy(model, prompt, 6, wrong) == one_by_one
    assert greedy(model, prompt, 6, one_by_one[:2]) == greedy(model, prompt, 6, [*one_by_one, 9]) == one_by_one


@pytest.mark.parametrize(("name", "pressure"), [*_pressures()])
def test_conversations_under_pressure(name: str, pressure: str, tmp_path: Path) -> None:
    options = PRESSURE[pressure]
    if "disk_space" in options and name not in ("llama", "gemma3", "qwen3_next", "bloom", "longrope"):
        pytest.skip("one of each kind of storage is enough here")
    kit = Kit(name, **options | ({"folder": tmp_path} if "folder" in options else {}))
    turns = 4 if pressure in ("preempted", "all on the host") else 3  # before that nobody has to wait or to come back
    history = _conversation(kit, seed=1, clients=5, turns=turns, name=True)
    stats = kit.engine.stats()
    assert stats.running == stats.waiting == 0
    if pressure != "roomy":
        assert stats.tier(Tier.DEVICE).evictions > 0
    if pressure == "preempted":
        assert stats.preemptions > 0
    if pressure == "all on the host":
        assert any(o.admitted and o.receipt.count_reused(Tier.HOST) for o in kit.outcomes.values())
    if "folder" in options:
        kit.settle()
        files = sum(path.stat().st_size for path in tmp_path.rglob("*.kv"))
        assert files == kit.archive.disk.space.used <= options.get("disk_space", 1 << 30)
        assert kit.archive.disk.damaged == stats.disk_errors == 0
    if pressure == "to disk":  # by now everything is written, however slow the disk was: one more round finds it there
        for prompt in history.values():
            assert kit.ask([*prompt, 7], 2).tokens == greedy(kit.model, [*prompt, 7], 2)
            kit.settle()
        assert any(o.admitted and o.receipt.count_reused(Tier.DISK) for o in kit.outcomes.values())


@pytest.mark.parametrize("pressure", ["roomy", "preempted", "to the host"])
@pytest.mark.parametrize("name", widely(["llama", "gemma3", "qwen3_next", "longrope"], "llama qwen3_next longrope"))
def test_conversations_whose_steps_overlap(name: str, pressure: str) -> None:
    kit = Kit(name, **PRESSURE[pressure], overlaps=True)
    _conversation(kit, seed=3, clients=5, turns=3, name=True)
    assert (kit.engine.stats().tier(Tier.DEVICE).evictions > 0) is (pressure != "roomy")


@pytest.mark.parametrize("name", widely(ARCHITECTURES, NARROW))
def test_gathered_layers_equal_layers_read_in_place(name: str) -> None:
    kit = Kit(name, in_place=False)
    _conversation(kit, seed=2, clients=3, turns=3, name=False)


@pytest.mark.parametrize("name", widely(ARCHITECTURES + RECURRENT + OTHERS + ("longrope",), NARROW))
def test_logits_of_a_resumed_turn(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kit = Kit(name)
    first = kit.ask(list(range(30)), 5)
    prompt = [*range(30), *first.tokens, 7, 8, 9, 10, 11]
    turn = kit.send(prompt, 1)
    seen: list[torch.Tensor] = []
    run = kit.runner.run

    def watch(work: Any, rows: Any, **options: Any) -> torch.Tensor:
        seen.append(run(work, rows, **options))
        return seen[-1]

    monkeypatch.setattr(kit.runner, "run", watch)
    kit.run()
    want = logits(kit.model, prompt)[-1]
    assert kit.outcomes[turn].receipt.cached == 34
    assert (seen[-1][0] - want).abs().max() <= 1e-4 * want.abs().max()


def test_company_does_not_change_a_seeded_draw() -> None:
    wanted = Sampling(temperature=1.0, top_p=0.9, seed=5)
    alone = Kit().ask([1, 2, 3], 12, sampling=wanted).tokens
    kit = Kit()
    for i in range(6):
        kit.send([9, i, i + 1], 15, sampling=Sampling(temperature=1.0))
    turn = kit.send([1, 2, 3], 12, sampling=wanted)
    kit.run()
    assert kit.outcomes[turn].tokens == alone


def test_hidden_tokens_are_not_attended_to() -> None:
    kit = Kit()
    prompt = list(range(40, 60))
    kit.ask(prompt, 1, session="s")
    (session,) = kit.store.residency.warm
    session.hide(5, 9)
    new = [3, 4, 5]
    longer = [*prompt, *new]
    turn = kit.send(longer, 1, session="s")
    kit.run()
    model = model_of("llama")
    mask = torch.ones(1, len(longer))
    # Tokens fed before the span was hidden have seen it; only the later ones have not.
    with torch.no_grad():
        past = model(input_ids=torch.tensor([prompt]), use_cache=True).past_key_values
        mask[0, 5:9] = 0
        out = model(
            input_ids=torch.tensor([new]),
            position_ids=torch.arange(20, 23)[None],
            attention_mask=mask,
            past_key_values=past,
        ).logits[0, -1]
    assert kit.outcomes[turn].tokens == [int(out.argmax())]
    assert kit.outcomes[turn].receipt.cached == 20
    other = kit.ask(longer, 1)
    assert other.receipt.cached == 5  # nobody else may reuse what comes after a hidden token


@pytest.mark.parametrize("name", widely(ARCHITECTURES + RECURRENT + OTHERS, NARROW))
def test_branches_share_a_trunk_and_nothing_else(name: str) -> None:
    """Two branches and the trunk itself go on side by side, parted in the middle of a page."""
    kit = Kit(name)
    trunk = list(range(40, 62))
    first = kit.ask(trunk, 9, session="trunk")
    ends = {"trunk": [*trunk, *first.tokens, 5, 6], None: [*trunk, 7, 8, 9], "branch": [*trunk, 11, 12]}
    turns = {kit.send(prompt, 7, session=session): prompt for session, prompt in ends.items()}
    kit.run()
    said = {}
    for (turn, prompt), session in zip(turns.items(), ends, strict=True):
        outcome = kit.outcomes[turn]
        said[session] = outcome.tokens
        assert outcome.tokens == greedy(kit.model, prompt, 7, outcome.tokens)
        assert outcome.receipt.cached >= 21
    for session, prompt in ends.items():  # once more, over what the others have left of the shared pages
        longer = [*prompt, *said[session], 30]
        outcome = kit.ask_checked(longer, 5, session=session)
        assert outcome.receipt.cached == len(longer) - 2


@pytest.mark.parametrize("tier", ["device", "host"])
@pytest.mark.parametrize("name", widely(ARCHITECTURES + RECURRENT + OTHERS, NARROW))
def test_a_stored_session_goes_on_in_another_engine(name: str, tier: str, tmp_path: Path) -> None:
    kit = Kit(name, pages=40, host_pages=100, folder=tmp_path)
    prompt = list(range(30, 60))
    first = kit.ask(prompt, 5, session="s")
    if tier == "host":
        kit.ask(list(range(100)), 1, session="other")  # pushes the first one off the device
        kit.ask(list(range(100, 200)), 1, session="another")
    session = kit.find("s")
    assert session.warm == (tier == "device")
    kit.leave()
    fresh = Kit(name, folder=tmp_path)
    assert not len(fresh.store.residency)  # nothing is loaded until it is wanted
    longer = [*prompt, *first.tokens, 7, 8, 9]
    second = fresh.ask_checked(longer, 6, session="s")
    assert second.receipt.cached == second.receipt.count_reused(Tier.DISK) == 34
    assert fresh.archive.disk.damaged == 0
    edited = [*prompt[:-1], 3, 4, 5]  # and its checkpoints came along
    third = fresh.ask_checked(edited, 6, session="s")
    assert third.receipt.cached >= 29


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("llama", ALL),
        ("gemma3", ALL),
        ("llama4", ATTENTION),
        ("qwen3_next", (*ATTENTION, "o_proj", "in_proj_qkvz", "out_proj")),
        ("mamba2", ("in_proj", "out_proj")),
        ("falcon", ("query_key_value", "dense")),
        ("bloom", ("query_key_value", "dense_4h_to_h")),
    ],
)
def test_base_and_adapters_in_one_step(name: str, targets: tuple[str, ...], tmp_path: Path) -> None:
    """With adapters, in every way to run a model, whatever is beside a turn."""
    kit, plain = Kit(name), make_model(name)
    models = {"": plain}
    for seed, label in enumerate("ab"):
        parts = make_parts(plain, targets, 4, seed)
        kit.adapters.load(label, save_adapter(tmp_path / label, parts, 4, 8))
        models[label] = merged(plain, parts, 2.0)
    turns: dict[str, tuple[str, list[int]]] = {}
    for label in ["", "a", "b", "a", ""]:
        prompt = [*range(70, 81), 65 + len(turns), 66][len(turns) % 3 :]
        turns[kit.send(prompt, 4, adapter=label, logprobs=1)] = label, prompt
    kit.run()
    kit.adapters.remove()
    for turn, (label, prompt) in turns.items():
        outcome = kit.outcomes[turn]
        assert outcome.tokens == greedy(models[label], prompt, 4, outcome.tokens)
        want = logits(models[label], [*prompt, *outcome.tokens]).log_softmax(-1)
        got = [found.logprob for delta in outcome.deltas for found in delta.logprobs]
        assert got == pytest.approx(
            [float(want[len(prompt) - 1 + i, t]) for i, t in enumerate(outcome.tokens)], abs=1e-4
        )
    assert len({tuple(greedy(model, [*range(70, 81)], 2)) for model in models.values()}) > 1
