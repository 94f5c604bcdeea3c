"""Builds the grammar of a reply that calls tools, in the model's call form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from server.chat.call_form import CallForm, ParameterForm
from server.chat.typed import kinds_of
from server.constraints.enforceable import prepare
from server.constraints.grammars import HEAD, WHITESPACE, argument_schema, atoms, quote, set_layout

SAYS_NOTHING = {"type", "title", "description", "default", "examples"}  # what bounds no text


def call_grammar(
    form: CallForm,
    tools: Sequence[Mapping[str, Any]],
    *,
    required: bool,
    parallel: bool,
    special: Mapping[str, int],
    thought: str = "",
    instead: Mapping[str, Any] | None = None,
) -> str:
    """The grammar of a reply that calls ``tools`` (as in OpenAI's requests), more than once if ``parallel`` and if the
    form allows it. Unless ``required``, text may come instead of or before the calls, or ``instead`` of them JSON of
    this schema. With ``thought``, the reply begins within reasoning, which ends with that text. ``special`` maps the
    tokenizer's special tokens by text: marks that contain them use these tokens. Raises ValueError.
    """
    rules = [f"ws: WS?\nWS: /{WHITESPACE}/", "ANY: /(?s:.*)/", r"SPACE: /\s{1,8}/"]
    bodies = []
    for number, tool in enumerate(tools):
        rules += body(f"call_{number}", form, tool["function"], special)
        bodies.append(f"call_{number}")
    rules.append("body: " + " | ".join(bodies))
    again = " ".join(atoms(form.separator + form.opening, special))
    more = f"({again} body)*" if parallel and form.several else ""
    rules.append(f"calls: body {more} {' '.join(atoms(form.end, special))}")
    before = ""
    if thought:
        before = "thought SPACE?"
        rules += until_mark("thought", thought, special)
    if instead is not None:
        rules.append(f"instead: %json {quote(set_layout(prepare(instead)))}")
    return HEAD + "\n".join([*rules, *begin_rules(form, before, required, instead is not None, special)])


def body(rule: str, form: CallForm, function: Mapping[str, Any], special: Mapping[str, int]) -> list[str]:
    """The rules of a call from its name on."""
    schema = argument_schema(function.get("parameters"))
    head = " ".join(atoms(function["name"] + form.middle, special))
    closing = " ".join(atoms(form.closing, special))
    if form.parameter is None:
        rules = [f"{rule}_arguments: %json {quote(set_layout(schema))}"]
        return [f"{rule}: {head} {rule}_arguments {closing}", *rules]
    required = schema.get("required") or []
    members, rules = [], []
    for number, (key, value) in enumerate((schema.get("properties") or {}).items()):
        member = f"{rule}_{number}"
        rules += parameter(member, form.parameter, key, value, bool(function.get("strict")), special)
        members.append(member if key in required else f"({member})?")
    return [f"{rule}: {head} {' '.join(members)} {closing}", *rules]


def parameter(
    rule: str, form: ParameterForm, key: str, schema: object, strict: bool, special: Mapping[str, int]
) -> list[str]:
    """The rules of one parameter: JSON of its schema, or text up to the form's closing mark. Raises ValueError."""
    head = " ".join(atoms(form.opening + key + form.middle, special))
    words = texts_of(schema)
    if words is not None:
        choice = " | ".join(quote(word) for word in words)
        return [f"{rule}: {head} {rule}_value {' '.join(atoms(form.closing, special))}", f"{rule}_value: {choice}"]
    if kinds_of(schema) - {"string"} and "string" not in kinds_of(schema):
        value = f"{rule}_value: %json {quote(set_layout(schema if isinstance(schema, dict) else {}))}"
        return [f"{rule}: {head} {rule}_value {' '.join(atoms(form.closing, special))}", value]
    if strict and isinstance(schema, dict) and set(schema) - SAYS_NOTHING:
        raise ValueError("limits a text in a way that cannot be enforced in this model's format of calls")
    return [f"{rule}: {head} {rule}_value", *until_mark(f"{rule}_value", form.closing, special)]


def texts_of(schema: object) -> list[str] | None:
    """The strings that a schema enumerates; None if it does not enumerate strings only."""
    if not isinstance(schema, dict):
        return None
    words = [schema["const"]] if "const" in schema else schema.get("enum")
    return words if isinstance(words, list) and words and all(isinstance(word, str) for word in words) else None


def until_mark(rule: str, mark: str, special: Mapping[str, int]) -> list[str]:
    """The rules of any text up to and including the first ``mark``."""
    first, *rest = atoms(mark, special)
    if first.startswith("<["):
        return [f"{rule}: ANY {first} {' '.join(rest)}"]
    return [f"{rule}: {rule}_text {' '.join(rest)}", f"{rule}_text[lazy]: ANY {first}"]


def begin_rules(form: CallForm, before: str, required: bool, instead: bool, special: Mapping[str, int]) -> list[str]:
    """The rules from the start of a reply to where ``calls`` begin."""
    lead = form.start + form.opening
    if required:
        return [f"start: {before} {' '.join(atoms(lead.lstrip(), special))} calls"]
    if instead:
        return [f"start: {before} ({' '.join(atoms(lead.lstrip(), special))} calls | instead)"]
    if not form.mark:
        return [f"start: {before} (TEXT | {' '.join(atoms(lead, special))} calls)", r"TEXT: /(\s*[^\s{\[](?s:.*))?/"]
    rest = " ".join(atoms(lead.lstrip().removeprefix(form.mark), special))
    first, *others = atoms(form.mark, special)
    if first.startswith("<["):
        return [f"start: {before} (ANY | ANY {first} {' '.join(others)} {rest} calls)"]
    return [
        f"start: {before} (TEXT | opened {' '.join(others)} {rest} calls)",
        "TEXT: ANY & ~SPOKEN",
        f"SPOKEN: ANY {first} ANY",
        f"opened[lazy]: ANY {first}",
    ]
