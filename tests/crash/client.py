"""A client that remembers: it talks to one session after the other and knows what the server must still hold."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import httpx
from crash.wire import PATIENCE, Outcome, Said, facts_of, messages_of, say

from tools.dialogues import CITIES, COLORS, FOODS, GOODS, NAMES

EXCUSES = (0, 200, 503)  # the connection was cut, an error event in a stream, no engine
FULL = 1500  # tokens; then the client begins another session. The demo model's context is 2048
TELLING = (
    ("My name is {}.", NAMES),
    ("I live in {}.", CITIES),
    ("My favorite color is {}.", COLORS),
    ("I like {}.", FOODS),
    ("Add {} to my shopping list.", GOODS),
)
ASKING = ("What is my name?", "Where do I live?", "What is my favorite color?", "What is on my shopping list?")


@dataclass(frozen=True)
class Turn:
    """What was asked, and how. ``reply`` None: it is not known yet. ``tokens``: timeline at its end, 0: not told."""

    text: str
    max_tokens: int
    stream: bool
    key: str | None
    reply: str | None = None
    tokens: int = 0


@dataclass
class Tally:
    """What clients found. The first three must be zero."""

    lost: int = 0
    wrong: int = 0
    duplicated: int = 0
    acknowledged: int = 0
    cut: int = 0
    kept: int = 0  # cut turns that the log turned out to hold
    refused: int = 0
    replayed: int = 0
    deleted: int = 0
    notes: list[str] = field(default_factory=list)

    def note(self, kind: str, text: str) -> None:
        """Count a violation and say what it was."""
        setattr(self, kind, getattr(self, kind) + 1)
        self.notes.append(f"{kind}: {text}")

    def __add__(self, other: Tally) -> Tally:
        return Tally(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))

    def __str__(self) -> str:
        counts = ", ".join(f"{getattr(self, name)} {name}" for name in self.__dataclass_fields__ if name != "notes")
        return "\n".join([counts, *self.notes[:20]])


class Session:
    """A session as its client knows it: ``turns`` are acknowledged, ``pending`` may be in the log or not."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.turns: list[Turn] = []
        self.pending: Turn | None = None
        self.deleting = False  # asked for; gone only once the server says so
        self.gone = False

    @property
    def messages(self) -> list[tuple[str, str]]:
        """What the server must hold."""
        return [pair for turn in self.turns for pair in (("user", turn.text), ("assistant", turn.reply or ""))]


class Client:
    """Turns on a session of its own, one after the other; a full session is left or deleted for a new one."""

    def __init__(self, name: str, seed: int) -> None:
        self.tally = Tally()
        self.session = Session(f"{name}-0")
        self.former: list[Session] = []
        self._name = name
        self._rng = random.Random(seed)

    @property
    def sessions(self) -> list[Session]:
        return [*self.former, self.session]

    def act(self, url: str) -> bool:
        """The next request, a retry first; whether it was answered."""
        session = self.session
        if session.deleting or (session.turns and session.turns[-1].tokens > FULL and session.pending is None):
            return self._leave(url)
        turn = session.pending or self._next()
        keyed = [known for known in session.turns if known.key is not None]
        if keyed and session.pending is None and self._rng.random() < 0.15:
            return self._repeat(url, self._rng.choice(keyed))
        retry, session.pending = session.pending is not None, turn
        said = self._say(url, turn)
        self._conclude(turn, said, retry)
        return said.outcome is Outcome.ACKNOWLEDGED

    def compare(self, url: str) -> None:
        """Hold what the server has of the current session against what it acknowledged; settles what is pending."""
        session = self.session
        held = messages_of(url, session.name)
        if session.deleting and held is None:
            session.gone = True
            self._begin()
            return
        self._judge(session, held or [])
        if session.turns and session.pending is None and session.turns[-1].tokens:
            facts = facts_of(url, session.name)
            if (facts["turns"], facts["tokens"]) != (len(session.turns), session.turns[-1].tokens):
                self.tally.note("wrong", f"{session.name} has {facts['turns']} turns of {facts['tokens']} tokens")

    def compare_former(self, url: str) -> None:
        """The same for sessions that were left: deleted ones must be unknown."""
        for session in self.former:
            held = messages_of(url, session.name)
            if session.gone and held is not None:
                self.tally.note("wrong", f"{session.name} was deleted and is back")
            elif not session.gone:
                self._judge(session, held or [])

    def check_replies(self, url: str) -> int:
        """Say everything again to a server that never died; how many turns were compared."""
        compared = 0
        for session in self.sessions:
            for number, turn in enumerate(session.turns):
                again = say(url, session.name, [{"role": "user", "content": turn.text}], turn.max_tokens, False)
                compared += 1
                if again.outcome is not Outcome.ACKNOWLEDGED or again.text != turn.reply:
                    self.tally.note("wrong", f"{session.name} turn {number}: {turn.reply!r}, not {again.text!r}")
                    break  # what follows it differs by right
        return compared

    # -- steps ------------------------------------------------------------------------------------------------------

    def _next(self) -> Turn:
        form, words = self._rng.choice(TELLING)
        text = form.format(self._rng.choice(words)) if self._rng.random() < 0.6 else self._rng.choice(ASKING)
        key = f"{self._rng.getrandbits(64):x}" if self._rng.random() < 0.5 else None
        return Turn(text, self._rng.choice((8, 24, 60)), self._rng.random() < 0.5, key)

    def _say(self, url: str, turn: Turn) -> Said:
        messages = [{"role": "user", "content": turn.text}]
        return say(url, self.session.name, messages, turn.max_tokens, turn.stream, turn.key)

    def _conclude(self, turn: Turn, said: Said, retry: bool) -> None:
        session = self.session
        if said.outcome is Outcome.ACKNOWLEDGED:
            self.tally.acknowledged += 1
            self.tally.replayed += said.replayed
            session.turns.append(Turn(turn.text, turn.max_tokens, turn.stream, turn.key, said.text, said.tokens))
            session.pending = None
        elif said.outcome is Outcome.REFUSED:
            self.tally.refused += 1
            self._see_why(said)
            session.pending = turn if retry else None  # an earlier try may be in the log
        else:
            self.tally.cut += 1
            session.pending = Turn(turn.text, turn.max_tokens, turn.stream, turn.key, said.text)

    def _repeat(self, url: str, turn: Turn) -> bool:
        """The retry of a client that missed the answer: it must get the same one, and nothing may happen."""
        said = self._say(url, turn)
        if said.outcome is not Outcome.ACKNOWLEDGED:
            self._see_why(said)
            return False
        self.tally.replayed += said.replayed
        if not said.replayed:
            self.tally.note("duplicated", f"{self.session.name}: {turn.text!r} ran again under its key")
        elif said.text != turn.reply:
            self.tally.note("wrong", f"{self.session.name}: replayed {said.text!r}, not {turn.reply!r}")
        return True

    def _see_why(self, said: Said) -> None:
        """Nothing is wrong with any request here: only a server in trouble may refuse one."""
        if said.status not in EXCUSES:
            self.tally.note("wrong", f"{self.session.name}: status {said.status}")

    def _leave(self, url: str) -> bool:
        """Begin another session, half of the time after deleting this one."""
        if not self.session.deleting and self._rng.random() < 0.5:
            self._begin()
            return True
        self.session.deleting = True
        try:
            answer = httpx.delete(f"{url}/v1/sessions/{self.session.name}", timeout=PATIENCE)
        except httpx.TransportError:
            return False
        if answer.status_code in (200, 404):
            self.session.gone = True
            self.tally.deleted += 1
            self._begin()
        return answer.status_code in (200, 404)

    def _begin(self) -> None:
        self.former.append(self.session)
        self.session = Session(f"{self._name}-{len(self.former)}")

    # -- judging ----------------------------------------------------------------------------------------------------

    def _judge(self, session: Session, held: list[tuple[str, str]]) -> None:
        known, pending = session.messages, session.pending
        common = next(
            (i for i, (a, b) in enumerate(zip(held, known, strict=False)) if a != b), min(len(held), len(known))
        )
        if common < len(known):
            kind = "lost" if common == len(held) else "wrong"
            self.tally.note(kind, f"{session.name}: message {common} of {len(known)}, it holds {len(held)}")
            del session.turns[common // 2 :]
            session.pending = None
            return
        rest = held[len(known) :]
        if pending is None or not rest:
            if rest:
                self.tally.note("duplicated", f"{session.name} holds {rest}, which nobody was told of")
            if pending is not None and pending.key is None:
                session.pending = None
            return
        if len(rest) != 2 or rest[0] != ("user", pending.text) or not rest[1][1].startswith(pending.reply or ""):
            self.tally.note("wrong", f"{session.name} holds {rest} of {pending}")
        self.tally.kept += 1
        if pending.key is None:
            session.turns.append(Turn(pending.text, pending.max_tokens, pending.stream, None, rest[1][1]))
            session.pending = None
