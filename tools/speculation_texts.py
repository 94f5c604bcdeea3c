"""The conversations of ``bench_speculation``: what is asked, and what the scripted model answers."""

from __future__ import annotations

import inspect
import json
import queue
import random
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Conversation:
    """``turns``: what the user says, or a tool, and the reply. ``more``: further fields of each request."""

    name: str
    turns: list[tuple[str, str]]
    more: dict[str, Any] = field(default_factory=dict)

    def prompts(self) -> list[tuple[Messages, str]]:
        """The messages of each request, and its reply."""
        messages: Messages = []
        found = []
        for asked, reply in self.turns:
            messages = [*messages, {"role": "user", "content": asked}]
            found.append((messages, reply))
            messages = [*messages, {"role": "assistant", "content": reply}]
        return found


def edit() -> Conversation:
    """A file of 200 lines, repeated with changes: a name, a comment in each 15th line, lines that go and come."""
    lines = inspect.getsource(queue).splitlines()[:200]
    changed = []
    for number, line in enumerate(lines):
        line = line.replace("maxsize", "capacity").replace("not_full", "has_room")
        if number % 15 == 7 and line.strip():
            line += f"  # checked, see item {number * 7 % 89}"
        if number % 40 == 33:
            changed.append(" " * (len(line) - len(line.lstrip())) + f"self.trace({number}, 'reached')")
        if number % 50 != 21:
            changed.append(line)
    asked = "Rename maxsize to capacity and not_full to has_room, and send the whole file.\n\n" + "\n".join(lines)
    return Conversation("a: a file edited", [(asked, "\n".join(changed))])


def agent() -> Conversation:
    """An agent that reads a file and a failing test, and quotes both."""
    lines = inspect.getsource(shlex).splitlines()
    listing = "\n".join(f"{number + 1:5} {line}" for number, line in enumerate(lines[60:150], 60))
    fails = [
        "FAILED tests/test_shlex.py::test_punctuation_in_a_word - AssertionError: ['a', '&&', 'b'] != ['a&&b']",
        "tests/test_shlex.py:118: in test_punctuation_in_a_word",
        "    assert list(shlex(text, punctuation_chars=True)) == expected",
        "lib/shlex.py:138: in read_token",
        "    nextchar = self.instream.read(1)",
    ]
    part, edited = lines[112:136], [line.replace("nextchar", "upcoming") for line in lines[112:136]]
    first = "Two tests fail. I begin with the file that the traceback names.\n\n> " + "\n> ".join(fails[1:])
    second = (
        "The loop reads a character too far. This is the part that has to change:\n\n"
        + "\n".join(part)
        + "\n\nAnd this is how it should be, with another name so that the state is not confused with the buffer:\n\n"
        + "\n".join(edited)
    )
    third = (
        "The tests pass now, except one that has nothing to do with the change:\n\n> "
        + "\n> ".join(fails[:2])
        + "\n\nThe reason is in these lines, which I left as they were:\n\n"
        + "\n".join(lines[100:112])
        + "\n\nShall I change them too? It would break callers that rely on words with punctuation in them."
    )
    turns = [
        ("Find out why the tests fail.\n$ pytest -x tests/test_shlex.py\n" + "\n".join(fails), first),
        ("$ sed -n 61,150p lib/shlex.py\n" + listing + "\n\nand without numbers:\n" + "\n".join(lines[90:150]), second),
        ("$ pytest tests/test_shlex.py\n" + "\n".join(fails[:2]) + "\n1 failed, 38 passed in 0.41s", third),
    ]
    return Conversation("b: an agent that quotes", turns)


_FIELDS = {
    "customer_name": {"type": "string"},
    "order_number": {"type": "integer"},
    "shipping_address": {"type": "string"},
    "payment_method": {"enum": ["card", "invoice", "transfer"]},
    "total_amount": {"type": "number"},
    "is_delivered": {"type": "boolean"},
}


def extraction() -> Conversation:
    """Records read out of a text, as JSON of a schema."""
    draw = random.Random(3)
    names = ["Ann Berg", "Luis Ortega", "Mei Tanaka", "Omar Haddad", "Ida Holm", "Ravi Nair", "Zoe Keller", "Jan Novak"]
    orders = [
        {
            "customer_name": name,
            "order_number": draw.randrange(10000, 99999),
            "shipping_address": f"{draw.randrange(1, 99)} {draw.choice(['Mill', 'Lake', 'Hill', 'Park'])} Road",
            "payment_method": draw.choice(["card", "invoice", "transfer"]),
            "total_amount": draw.randrange(100, 90000) / 100,
            "is_delivered": draw.random() < 0.5,
        }
        for name in names
    ]
    text = "\n".join(
        f"{one['customer_name']} ordered no. {one['order_number']} to {one['shipping_address']}, "
        f"{one['total_amount']} by {one['payment_method']}, {'delivered' if one['is_delivered'] else 'on its way'}."
        for one in orders
    )
    record = {"type": "object", "properties": _FIELDS, "required": [*_FIELDS], "additionalProperties": False}
    schema = {
        "type": "object",
        "properties": {"orders": {"type": "array", "items": record, "minItems": 8, "maxItems": 8}},
        "required": ["orders"],
        "additionalProperties": False,
    }
    shape = {"type": "json_schema", "json_schema": {"name": "orders", "schema": schema, "strict": True}}
    reply = json.dumps({"orders": orders}, separators=(",", ":"))
    return Conversation(
        "c: JSON by a schema", [(f"List the orders as JSON.\n\n{text}", reply)], {"response_format": shape}
    )


def random_words(words: list[str]) -> Conversation:
    """Words drawn from many: no three of them stand together twice."""
    draw = random.Random(4)
    return Conversation("d: random text", [("Write at random.", " ".join(draw.choices(words, k=500)))])


def babble() -> Conversation:
    """Words drawn from a few: what has stood there before is everywhere, and what follows is another word."""
    words = inspect.cleandoc(str(queue.Queue.__doc__) + str(shlex.__doc__) + str(json.__doc__)).split()[:48]
    draw = random.Random(6)
    return Conversation("e: random words of 48", [("Write at random.", " ".join(draw.choices(words, k=600)))])


def all_conversations(words: list[str]) -> dict[str, Callable[[], Conversation]]:
    """By letter. ``words``: many, of about a token each."""
    return {"a": edit, "b": agent, "c": extraction, "d": lambda: random_words(words), "e": babble}
