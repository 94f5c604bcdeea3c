"""Steps that are told while the next one runs, as on a GPU: the same news, a step later, whatever happens meanwhile."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from engine_kit import END, Kit, Outcome, failing
from tiny_models import greedy

from scheduler.core.engine_core import EngineCore
from scheduler.core.sampling import SamplerOutput
from scheduler.core.text import TextStream
from scheduler.model.runner import ModelRunner
from scheduler.process import ServingLoop
from scheduler.protocol import Cancel, FinishReason, Forget, Shutdown, StepOutputs, Submit, ToEngine, pack_ids
from scheduler.sampling_params import Sampling, Stopping

WORDS = "%llguidance {}\nstart: /[abc]{2,5}/"


def _requests(rng: random.Random) -> list[dict[str, Any]]:
    """Of all sorts, with everything that decides when a reply ends and what is told of it."""
    found = []
    for number in range(24):
        stopping = Stopping(
            max_tokens=rng.randint(0, 12),
            min_tokens=rng.choice([0, 0, 3]),
            stop=rng.choice([(), (), ("a",), ("e", "\n")]),
            stop_token_ids=rng.choice([(), (), tuple(range(40, 80))]),
            ignore_eos=rng.random() < 0.5,
        )
        temperature = rng.choice([0.0, 1.0, 1.5])
        sampling = Sampling(temperature=temperature, seed=number, presence_penalty=rng.choice([0.0, 0.5]))
        asked = {"logprobs": rng.choice([None, 0, 2]), "prompt_logprobs": rng.choice([None, None, 1])}
        grammar = rng.choice([None, None, WORDS])
        prompt = [rng.randrange(200) for _ in range(rng.randint(1, 40))]
        found.append({"prompt": prompt, "stopping": stopping, "sampling": sampling, "grammar": grammar} | asked)
    return found


def _told(outcome: Outcome) -> Any:
    receipt = outcome.receipt.prompt, outcome.receipt.cached
    told = [(d.tokens, d.text, d.finish_reason, d.stop, d.logprobs, d.prompt_logprobs) for d in outcome.deltas]
    return receipt, told


def test_the_same_is_told_of_turns_of_all_sorts() -> None:
    """One after the other, so that company changes no bit of a logit."""
    plain, overlapping = Kit(step_tokens=16), Kit(step_tokens=16, overlaps=True)
    ends = set()
    for request in _requests(random.Random(5)):
        one, other = plain.ask(**request), overlapping.ask(**request)
        assert _told(one) == _told(other)
        ends.add((one.finish_reason, type(one.deltas[-1].stop)))
    assert ends >= {(FinishReason.STOP, str), (FinishReason.STOP, int), (FinishReason.LENGTH, type(None))}


@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
@pytest.mark.parametrize("at", [0, 1, 3])
def test_a_turn_that_is_cancelled_during_a_step_ends_once(name: str, at: int, caplog: pytest.LogCaptureFixture) -> None:
    kit = Kit(name, overlaps=True)
    turn, other = kit.send([1, 2, 3], 8, session="s"), kit.send([4, 5], 8)
    kit.step(at)
    kit.meanwhile.append(lambda: kit.cancel(turn))
    kit.step()  # tells the step before
    before = len(kit.outcomes[turn].tokens)
    kit.run()
    assert kit.outcomes[turn].finish_reason is FinishReason.CANCELLED
    told = at - (at > 0 and name == "qwen3_next")  # its prompt takes two steps
    assert len(kit.outcomes[turn].tokens) == before == told
    assert kit.outcomes[other].tokens == greedy(kit.model, [4, 5], 8, kit.outcomes[other].tokens)
    assert not [record for record in caplog.records if record.name == "warmturn.engine"]
    prompt = [1, 2, 3, *kit.outcomes[turn].tokens, 9]
    kit.ask_checked(prompt, 5, session="s")


def test_a_session_that_is_forgotten_during_its_step_is_gone() -> None:
    kit = Kit(pages=24, overlaps=True)
    turn, other = kit.send([*range(30)], 8, session="s"), kit.send([4, 5], 20)
    kit.step()

    def forget() -> None:
        kit.engine.end("a", "s")
        kit.commands.forget(Forget("a", "s"))
        kit.send([9] * 40, 3)  # on the pages that are free now

    kit.meanwhile.append(forget)
    kit.run()
    assert kit.outcomes[turn].finish_reason is FinishReason.CANCELLED
    assert kit.store.find("a", "s") is None
    assert kit.outcomes[other].tokens == greedy(kit.model, [4, 5], 20, kit.outcomes[other].tokens)
    (third,) = set(kit.outcomes) - {turn, other}
    assert kit.outcomes[third].tokens == greedy(kit.model, [9] * 40, 3, kit.outcomes[third].tokens)


@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_a_step_that_fails_on_its_way_ends_its_turns(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kit = Kit(name, overlaps=True)
    turn = kit.send([1, 2, 3], 8, session="s")
    kit.step(2 if name == "qwen3_next" else 1)  # its prompt takes two steps
    with monkeypatch.context() as patch:
        patch.setattr(SamplerOutput, "read", failing(RuntimeError("lost")))
        kit.step()
    assert not kit.engine.idle
    kit.run()
    outcome = kit.outcomes[turn]
    assert (len(outcome.tokens), outcome.finish_reason) == (1, FinishReason.ERROR)
    kit.ask_checked([1, 2, 3, *outcome.tokens, 9], 4, session="s")


def test_steps_that_always_fail_on_their_way_end_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    kit = Kit(overlaps=True)
    monkeypatch.setattr(SamplerOutput, "read", failing(RuntimeError("lost")))

    def work() -> None:
        for _ in range(20):
            kit.send([1, 2, 3], 8)
            kit.step()

    with pytest.raises(RuntimeError, match="lost"):
        work()


@pytest.mark.parametrize("last", [False, True])
def test_a_token_that_cannot_be_decoded_ends_its_turn_during_the_next_step(
    last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    kit = Kit(overlaps=True)
    bad, good = kit.send([1, 2], 2 if last else 6), kit.send([3, 4], 6)
    kit.step()
    turn = kit.scheduler.find(bad)
    assert turn is not None
    kit.step()
    assert (kit.scheduler.find(bad) is None) is last
    monkeypatch.setattr(turn.text, "push", failing(ValueError("no text")))
    kit.run()
    assert kit.outcomes[bad].finish_reason is FinishReason.ERROR
    assert len(kit.outcomes[bad].tokens) == 1
    assert kit.outcomes[good].tokens == greedy(kit.model, [3, 4], 6, kit.outcomes[good].tokens)


def test_a_token_that_cannot_be_decoded_and_a_step_that_fails_are_one_end(monkeypatch: pytest.MonkeyPatch) -> None:
    kit = Kit(overlaps=True)
    turn = kit.send([1, 2], 6)
    kit.step()
    found = kit.scheduler.find(turn)
    assert found is not None
    monkeypatch.setattr(found.text, "push", failing(ValueError("no text")))
    with monkeypatch.context() as patch:
        patch.setattr(kit.mode, "forward", failing(RuntimeError("lost")))
        kit.step()
    kit.run()
    assert [delta.finish_reason for delta in kit.outcomes[turn].deltas if delta.finish_reason] == [FinishReason.ERROR]


def test_whether_steps_overlap() -> None:
    kit, cuda = Kit(), SimpleNamespace(device=torch.device("cuda"))
    assert not kit.engine.overlaps
    device: Any = cuda
    assert ModelRunner(kit.mode, device).overlaps
    ranks: Any = object()  # they are waited for in each step
    assert not ModelRunner(kit.mode, device, followers=ranks).overlaps


# -- the loop of the engine process -----------------------------------------------------------------------------------


class Event(NamedTuple):
    """``sent`` tokens of a turn, or a step ``launched`` or ``completed``."""

    kind: str
    tokens: int = 0


class Line:
    """A channel whose server sends what is left in ``messages``, one list at a time, then ``Shutdown``."""

    def __init__(self, messages: list[list[ToEngine]], events: list[Event]) -> None:
        self.messages, self.events = messages, events
        self.deltas: list[Any] = []

    def send(self, message: Any) -> None:
        assert isinstance(message, StepOutputs), message
        self.deltas += message.deltas
        if tokens := sum(len(delta.tokens) for delta in message.deltas):
            self.events.append(Event("sent", tokens))

    def receive(self, wait_ms: int) -> list[ToEngine]:
        under_way = [event.kind for event in self.events if event.kind in ("launched", "completed")][-1:] == [
            "launched"
        ]
        assert not (wait_ms and under_way), "a step waits for messages"
        if self.messages:
            return self.messages.pop(0)
        return [Shutdown(0.0)] if wait_ms else []


def _serve(
    monkeypatch: pytest.MonkeyPatch, overlaps: bool, messages: list[list[ToEngine]]
) -> tuple[Kit, Line, list[Event]]:
    kit, events = Kit(), list[Event]()
    launch, complete = kit.engine.launch, kit.engine.complete

    def launching() -> Any:
        step = launch()
        events.extend([Event("launched")] * (step is not None))
        return step

    def completing(step: Any) -> None:
        events.extend([Event("completed")] * (step is not None))
        complete(step)

    monkeypatch.setattr(EngineCore, "overlaps", overlaps)
    monkeypatch.setattr(kit.engine, "launch", launching)
    monkeypatch.setattr(kit.engine, "complete", completing)
    line: Any = Line(messages, events)
    kit.mode.install()
    try:
        with torch.inference_mode():
            ServingLoop(kit.engine, kit.commands, line).run()
    finally:
        kit.mode.remove()
    return kit, line, events


def _submit(turn: str, prompt: list[int], count: int) -> Submit:
    stopping = Stopping(max_tokens=count, ignore_eos=True)
    return Submit(turn, "a", pack_ids(prompt), None, Sampling(temperature=0.0), stopping)


@pytest.mark.parametrize("overlaps", [False, True])
def test_the_loop_tells_a_step_while_the_next_one_runs(overlaps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    kit, line, events = _serve(monkeypatch, overlaps, [[_submit("t", [1, 2, 3], 3)]])
    step, told = [Event("launched"), Event("completed")], Event("sent", 1)
    plain = [*step, told] * 3
    later = [*step, Event("launched"), told, Event("completed"), Event("launched"), told, Event("completed"), told]
    assert events == (later if overlaps else plain)
    assert [token for delta in line.deltas for token in delta.tokens] == greedy(kit.model, [1, 2, 3], 3)
    assert line.deltas[-1].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("overlaps", [False, True])
def test_the_loop_completes_a_step_before_it_sleeps(overlaps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    _, line, events = _serve(monkeypatch, overlaps, [[_submit("t", [1, 2, 3], 0)]])
    assert events == [Event("launched"), Event("completed")]
    assert line.deltas[-1].finish_reason is FinishReason.LENGTH
    monkeypatch.setattr(TextStream, "push", failing(ValueError("no text")))
    _, line, events = _serve(monkeypatch, overlaps, [[_submit("t", [1, 2, 3], 5)]])
    assert events == [Event("launched"), Event("completed")] * (1 + overlaps)  # the last turn ends while a step runs
    assert line.deltas[-1].finish_reason is FinishReason.ERROR


@pytest.mark.parametrize("overlaps", [False, True])
def test_the_loop_ends_every_turn_that_is_cut_off(overlaps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = [_submit("cancelled", [1, 2, 3], 50), _submit("cut", [END, 7], 50), _submit("done", [8], 2)]
    begun.append(_submit("nothing", [5] * 40, 0))
    messages: list[list[ToEngine]] = [[*begun], [], [], [Cancel("cancelled")], [], [Shutdown(0.0)]]
    _, line, events = _serve(monkeypatch, overlaps, messages)
    ends = [(delta.turn, delta.finish_reason) for delta in line.deltas if delta.finish_reason is not None]
    assert sorted(ends) == [
        ("cancelled", FinishReason.CANCELLED),
        ("cut", FinishReason.CANCELLED),
        ("done", FinishReason.LENGTH),
        ("nothing", FinishReason.LENGTH),
    ]
    assert events.count(Event("launched")) > 3
