"""No step waits for a grammar to compile; a turn may end meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Event

import pytest
from engine_kit import Kit
from llguidance import LLMatcher

from scheduler.core.constraint import Grammars
from scheduler.protocol import FinishReason
from scheduler.sampling_params import Sampling

HEAD = '%llguidance {"no_forcing": true}\n'
LETTERS = HEAD + "start: /[a-c]{2,6}/"


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Event]:
    """Compiles wait until it is set."""
    opened = Event()
    compile_ = Grammars._compile

    def wait(self: Grammars, grammar: str) -> LLMatcher:
        assert opened.wait(60)
        return compile_(self, grammar)

    monkeypatch.setattr(Grammars, "_compile", wait)
    yield opened
    opened.set()


def test_no_step_waits_for_a_compile(gate: Event) -> None:
    kit = Kit()
    late = kit.send([65], 20, sampling=Sampling(temperature=1.0, seed=1), grammar=LETTERS)
    neighbour = kit.send([70, 71], 10)
    kit.step(10)
    assert kit.outcomes[neighbour].finish_reason is FinishReason.LENGTH
    assert not kit.outcomes[late].deltas
    gate.set()
    kit.run()
    assert 2 <= len(kit.outcomes[late].text) <= 6


@pytest.mark.parametrize("grammar", [LETTERS, "none"])
def test_a_turn_may_leave_while_its_grammar_compiles(gate: Event, grammar: str) -> None:
    kit = Kit()
    late = kit.send([65], 20, grammar=grammar)
    kit.step()
    kit.cancel(late)
    gate.set()
    kit.grammars.submit(grammar).exception()
    kit.step()
    assert kit.outcomes[late].finish_reason is FinishReason.CANCELLED
    assert not kit.refused


def test_what_nobody_waits_for_any_more_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    kit = Kit()
    busy, begun, go = [HEAD + f'start: "{letter}"' for letter in "abc"], Event(), Event()
    compiled: list[str] = []
    real = kit.grammars._compile

    def slow(grammar: str) -> LLMatcher:
        compiled.append(grammar)
        begun.set()
        assert go.wait(30)
        return real(grammar)

    monkeypatch.setattr(kit.grammars, "_compile", slow)
    first, *others = [kit.send([65], 5, grammar=grammar) for grammar in (busy[0], busy[1], busy[1], busy[2])]
    assert begun.wait(30)
    kit.step()
    kit.cancel(others[0])
    kit.cancel(others[2])
    kit.step()
    assert kit.grammars._pool._work_queue.qsize() <= 2
    assert busy[2] not in kit.grammars._kept
    assert busy[1] in kit.grammars._kept, "its other turn still waits"
    again = kit.send([65], 5, grammar=busy[2])
    kit.cancel(again)
    kit.step()
    go.set()
    kit.run()
    assert compiled == busy[:2]
    assert [kit.outcomes[turn].text for turn in (first, others[1])] == ["a", "b"]
    assert not kit.grammars._users
    assert kit.grammars._bytes == sum(map(len, kit.grammars._kept))
