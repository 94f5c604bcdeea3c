"""One fixed piece of work with every verb that writes, and what must be there after each of its steps."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

import httpx
from crash.wire import PATIENCE, Outcome, messages_of, say

TOKENS = 40
NAMES = ("a", "b", "c")

Pairs = list[tuple[str, str]]
State = dict[str, Pairs | None]  # what each session holds
Step = Callable[[str, str], Outcome]  # url and suffix of the sessions' names


def turn(name: str, text: str, stream: bool = False) -> Step:
    asked = [{"role": "user", "content": text}]
    return lambda url, suffix: say(url, name + suffix, asked, TOKENS, stream).outcome


def verb(method: str, path: str, body: dict[str, object] | None = None) -> Step:
    """Any other request below /v1/sessions/; a % stands for the suffix."""

    def step(url: str, suffix: str) -> Outcome:
        sent = None if body is None else json.loads(json.dumps(body).replace("%", suffix))
        whole = f"{url}/v1/sessions/{path.replace('%', suffix)}"
        try:
            answer = httpx.request(method, whole, json=sent, timeout=PATIENCE)
        except httpx.TransportError:
            return Outcome.CUT
        if answer.status_code < 300:
            return Outcome.ACKNOWLEDGED
        assert answer.status_code == 503, answer.text
        return Outcome.CUT  # an engine that died does not undo what the log has

    return step


STEPS: tuple[Step, ...] = (
    turn("a", "My name is Walter."),
    turn("b", "I live in Paris.", stream=True),
    turn("a", "Add milk to my shopping list.", stream=True),
    turn("b", "I like rice."),
    turn("a", "What is my name?"),
    verb("POST", "a%/fork", {"id": "c%", "turn": 2}),
    turn("c", "Where do I live?"),
    verb("POST", "b%/rewind", {"turn": 1}),
    turn("b", "Where do I live?", stream=True),
    verb("DELETE", "a%"),
    turn("c", "What is my name?", stream=True),
)


@dataclass(frozen=True)
class Progress:
    """How far the work came: ``done`` steps are acknowledged; the next one failed as ``last`` says, None: none did."""

    done: int
    last: Outcome | None


def work(url: str, suffix: str, between: Callable[[], None]) -> Progress:
    """Every step in order, up to one that fails; ``between`` is called after each."""
    for number, step in enumerate(STEPS):
        if (outcome := step(url, suffix)) is not Outcome.ACKNOWLEDGED:
            return Progress(number, outcome)
        between()
    return Progress(len(STEPS), None)


def states(url: str, suffix: str) -> list[State]:
    """The work on a server that nobody kills: the state before the first step, and after each."""
    found = [held(url, suffix)]
    for step in STEPS:
        assert step(url, suffix) is Outcome.ACKNOWLEDGED
        found.append(held(url, suffix))
    return found


def held(url: str, suffix: str) -> State:
    return {name: messages_of(url, name + suffix) for name in NAMES}


def allowed(progress: Progress, expected: list[State]) -> list[State]:
    """The states that a server may come back with."""
    if progress.last is Outcome.CUT:
        return expected[progress.done : progress.done + 2]
    return [expected[progress.done]]


def goes_on(url: str, suffix: str, state: State, reference: str) -> str | None:
    """A further turn on every session must get the reply that ``reference``, another server, gives to its messages;
    what is wrong, or None.
    """
    question = "What is my name?"
    for name, pairs in state.items():
        past = [{"role": role, "content": content} for role, content in pairs or ()]
        asked = {"role": "user", "content": question}
        wanted = say(reference, None, [*past, asked], TOKENS, False)
        given = say(url, name + suffix, [asked], TOKENS, False)
        if (given.outcome, given.text) != (Outcome.ACKNOWLEDGED, wanted.text):
            return f"{name}: {given}, not {wanted.text!r}"
    return None
