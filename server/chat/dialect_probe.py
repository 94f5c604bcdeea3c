"""Measures a model's dialect: renders made-up conversations with its chat template and looks at what the template
writes around known words. Runs once, after the tokenizer is loaded; takes some 10 ms.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from server.chat.call_form import CallForm, ParameterForm
from server.chat.declared_parser import check_response_template
from server.chat.dialect import PROBE_ID, Dialect, TemplateMessage
from server.chat.dialect_parser import DialectParser, ReasoningMarks
from server.chat.reply_parser import ArgumentsPiece, CallStart

if TYPE_CHECKING:
    from transformers.utils.chat_parsing.response_templates import ResponseTemplate

DATA = Path(__file__).with_name("dialects.json")
MARKS = json.loads(DATA.read_text())
FILL_INS = [(before, behind, gap) for before, behind, gap in MARKS["fill_in"]]
QUESTION, SAID, THOUGHT, RESULT, FUNCTION = "zqquestion", "zqanswer", "zqthought", "zqresult", "zqfunction"
ARGUMENTS = {"zqfirst": "zqone", "zqsecond": "zqtwo"}
LONG_ID = "call_0123456789abcdef01234567"
THOUGHT_KEYS = ("reasoning_content", "thinking", "reasoning")
TAG = r"<[^<>\s]+>|\[[^\[\]\s]+\]"
TOOL = {
    "type": "function",
    "function": {
        "name": FUNCTION,
        "description": "zqdescription",
        "parameters": {"type": "object", "properties": {key: {"type": "string"} for key in ARGUMENTS}},
    },
}
USER: TemplateMessage = {"role": "user", "content": QUESTION}


@dataclass(frozen=True)
class ProbedTemplate:
    """A chat template to measure. ``apply`` renders messages with tools, with or without a generation prompt, and with
    the template's variables if some are passed; it raises ``refused``. ``source`` is the template's source, ``words``
    are the added tokens of the vocabulary, ``special`` those of them that are hidden in a reply's text; ``end`` ends a
    reply.
    """

    apply: Callable[..., str]
    refused: type[Exception]
    source: str
    words: frozenset[str]
    special: frozenset[str]
    end: str

    def render(self, *messages: TemplateMessage, tools: bool = False) -> str | None:
        """A rendered conversation; None if the template refuses it."""
        try:
            return self.apply(messages, [TOOL] if tools else [], False)
        except self.refused:
            return None


def measure(template: ProbedTemplate, declared: object = None) -> Dialect:
    """The dialect of a template; ``declared`` is a response template that is known to fit. Raises ValueError if that is
    invalid.
    """
    response = (
        check_response_template(declared)
        if declared is not None
        else find_declared_template(template, MARKS["templates"])
    )
    thought, key = measure_reasoning_marks(template)
    thought = thought or find_known_marks(template, MARKS["thoughts"])
    found = Dialect(
        thought=thought,
        thought_key=key,
        thought_inline=thought is not None and thought.closing in template.source,
        thought_end=measure_reasoning_end(template),
        declared=response,
        takes_system=template.render({"role": "system", "content": SAID}, USER) is not None,
    )
    found = measure_tools(template, found)
    return replace(found, special=marks_are_special(template, found, declared))


def find_declared_template(template: ProbedTemplate, entries: Sequence[Mapping[str, Any]]) -> ResponseTemplate | None:
    """The response template of the first entry whose marks all occur in the chat template's source."""
    for entry in entries:
        if all(mark in template.source for mark in entry["marks"]):
            return check_response_template(entry["response_template"])
    return None


def marks_are_special(template: ProbedTemplate, dialect: Dialect, declared: object) -> bool:
    """Whether the marks that parse a reply are special tokens."""
    if dialect.declared is not None:
        return bool(template.special)
    marks = [dialect.thought.opening, dialect.thought.closing] if dialect.thought else []
    if dialect.form is not None:
        form = dialect.form
        marks += [form.start, form.opening, form.middle, form.closing, form.separator, form.end]
        marks += [form.parameter.opening, form.parameter.middle, form.parameter.closing] if form.parameter else []
    return any(word in mark for word in template.special for mark in marks)


# --- reasoning ----------------------------------------------------------------------------------------------


def measure_reasoning_marks(template: ProbedTemplate) -> tuple[ReasoningMarks | None, str | None]:
    """The marks around reasoning, and the field of a message that the template reads it from."""
    for key in THOUGHT_KEYS:
        text = template.render(USER, {"role": "assistant", "content": SAID, key: THOUGHT}) or ""
        before, found, behind = text.partition(THOUGHT)
        if not found:
            continue
        opening, closing = re.search(rf"({TAG})\s*\Z", before), re.match(rf"\s*({TAG})", behind)
        if opening is not None and closing is not None and SAID in behind:
            return ReasoningMarks(opening[1], closing[1]), key
        return None, key
    return None, None


def measure_reasoning_end(template: ProbedTemplate) -> str | None:
    """What the template writes between reasoning and the answer; None if it does not write both."""
    for key in THOUGHT_KEYS:
        text = template.render(USER, {"role": "assistant", "content": SAID, key: THOUGHT}) or ""
        _, found, behind = text.partition(THOUGHT)
        between, said, _ = behind.partition(SAID)
        if found and said:
            return between
    return None


def find_known_marks(template: ProbedTemplate, pairs: Sequence[Sequence[str]]) -> ReasoningMarks | None:
    """The first pair of marks that occurs in the template or the vocabulary."""
    for opening, closing in pairs:
        if all(mark in template.source or mark in template.words for mark in (opening, closing)):
            return ReasoningMarks(opening, closing)
    return None


# --- calls --------------------------------------------------------------------------------------------------


def measure_tools(template: ProbedTemplate, dialect: Dialect) -> Dialect:
    """``dialect`` with how the template writes tools, calls and results, if it supports them."""
    listed = template.render(USER, tools=True) or ""
    if FUNCTION not in listed:
        return dialect
    for text_arguments in (False, True):
        for id in (LONG_ID, PROBE_ID):
            texts = render_calls(template, id, text_arguments)
            if texts is None:
                continue
            found = replace(dialect, native=True, text_arguments=text_arguments, short_ids=id == PROBE_ID)
            if dialect.declared is not None:
                return replace(found, form=None)
            form = form_of(*texts, id)
            if (
                form is not None
                and reads_back(form, texts[0], 1)
                and (not form.several or reads_back(form, texts[1] or "", 2))
            ):
                own = render_calls(template, PROBE_ID, text_arguments) or texts
                behind = own[0].rpartition([*ARGUMENTS.values()][-1])[2]
                return replace(found, form=form, behind=behind)
    return dialect


def render_calls(template: ProbedTemplate, id: str, text_arguments: bool) -> tuple[str, str | None] | None:
    """What the template writes for a reply with one call, and with two calls (None: it refuses that), without the text
    around every reply; None if it does not support such calls or their results.
    """
    arguments = json.dumps(ARGUMENTS) if text_arguments else ARGUMENTS
    call = {"id": id, "type": "function", "function": {"name": FUNCTION, "arguments": arguments}}
    said = template.render(USER, {"role": "assistant", "content": SAID}, tools=True)
    one: TemplateMessage = {"role": "assistant", "content": "", "tool_calls": [call]}
    alone = template.render(USER, one, tools=True)
    answered = template.render(USER, one, {"role": "tool", "tool_call_id": id, "content": RESULT}, tools=True)
    if said is None or alone is None or RESULT not in (answered or ""):
        return None
    head, _, tail = said.partition(SAID)
    both = template.render(USER, {**one, "tool_calls": [call, call]}, tools=True)
    texts = [
        strip_surroundings(text, head + SAID, SAID + tail, template.end) for text in (alone, both) if text is not None
    ]
    if any(word not in texts[0] for word in (FUNCTION, *ARGUMENTS, *ARGUMENTS.values())):
        return None
    return texts[0], texts[1] if len(texts) > 1 else None


def strip_surroundings(text: str, before: str, behind: str, end: str) -> str:
    """``text`` without the beginning that it shares with ``before`` and the end that it shares with ``behind``, or
    without ``end``.
    """
    start = count_shared_prefix(text, before)
    stop = len(text) - count_shared_prefix(text[::-1], behind[::-1])
    mark = text.rfind("<", start, stop)
    if ">" not in text[mark:stop] and re.match(r"[^<\s]*>", text[stop:]):
        stop = max(mark, start)  # what ends replies of calls is another mark, which only ends alike
    return text[start:stop].rstrip().removesuffix(end) if end else text[start:stop]


def count_shared_prefix(one: str, other: str) -> int:
    """The length of the common prefix of two texts."""
    count = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        count += 1
    return count


def form_of(one: str, two: str | None, id: str) -> CallForm | None:
    """The call form in which a reply with one call, and one with two, are written."""
    spans = spans_of(one)
    if spans is None:
        return None
    (name, arguments, end), parameter = spans[0], None
    opening, middle, closing = one[:name], one[name + len(FUNCTION) : arguments], one[end:]
    if not one.startswith("{", arguments):
        parameter, middle, closing = parameters_of(one, name + len(FUNCTION)) or (None, "", "")
        if parameter is None:
            return None
    form = CallForm("", opening.lstrip(), middle, remove_id(closing, id), parameter=parameter, several=False)
    both = spans_of(two or "")
    if two is None or both is None or len(both) < 2:
        return form
    # The second call's name tells what of this stands around every call, and what around all of them.
    between = remove_id(two[both[0][2] : both[1][0]], id)
    if parameter is not None:
        between = between.removeprefix(parameter.closing)
    opening = from_mark(between[len(between) - count_shared_prefix(between[::-1], form.opening[::-1]) :])
    closing = between[: count_shared_prefix(between[: len(between) - len(opening)], form.closing)]
    separator = between[len(closing) : len(between) - len(opening)]
    start = form.opening.removesuffix(opening)
    if not start.strip():  # space in front of a call separates it from what is before
        start, separator = "", separator + start + opening[: len(opening) - len(opening.lstrip())]
        opening = opening.lstrip()
    return CallForm(start, opening, middle, closing, separator, form.closing[len(closing) :], parameter)


def from_mark(text: str) -> str:
    """``text`` from its first mark on: marks that differ may end alike."""
    found = re.search(r"\s*[<\[{]", text)
    return text if found is None else text[found.start() :]


def spans_of(text: str) -> list[tuple[int, int, int]] | None:
    """For each call in ``text``: where its name begins, where its arguments begin, and where they end."""
    first, last = next(iter(ARGUMENTS)), [*ARGUMENTS.values()][-1]
    spans = []
    at = 0
    while (key := text.find(first, at)) >= 0:
        name = text.rfind(FUNCTION, at, key)
        value = text.find(last, key)
        if name < 0 or value < 0:
            return None
        brace = re.search(r'\{\s*"\Z', text[name:key])
        begins = name + brace.start() if brace else key
        close = re.compile(r'"\s*\}').match(text, value + len(last)) if brace else None
        at = close.end() if close else value + len(last)
        spans.append((name, begins, at))
    return spans or None


def parameters_of(text: str, at: int) -> tuple[ParameterForm, str, str] | None:
    """How the parameters after a name that ends at ``at`` are written, the text between the name and the first one, and
    the text after the last one.
    """
    (first, one), (second, two) = ARGUMENTS.items()
    places = [text.find(word, at) for word in (first, one, second, two)]
    if sorted(places) != places or places[0] < 0:
        return None
    lead = text[at : places[0]]
    middle = text[places[0] + len(first) : places[1]]
    between = text[places[1] + len(one) : places[2]]
    tail = text[places[3] + len(two) :]
    opening = lead[len(lead) - count_shared_prefix(lead[::-1], between[::-1]) :]
    closing = between[: len(between) - len(opening)]
    # What stands in front of the opening's own mark may as well belong to the closing, if it is there at the end too.
    own = opening[max(0, opening.rfind("<")) :]
    if tail.startswith(closing + opening.removesuffix(own)):
        closing, opening = closing + opening.removesuffix(own), own
    if not (opening.strip() and middle.strip() and closing.strip() and tail.startswith(closing)):
        return None
    return ParameterForm(opening, middle, closing), lead.removesuffix(opening), tail.removeprefix(closing)


def remove_id(text: str, id: str) -> str:
    """``text`` without the id of a call, as the ids that a model generates are unknown."""
    return re.sub(rf',?\s*"(?:id|call_id|tool_call_id)"\s*:\s*"{id}"', "", text)


def reads_back(form: CallForm, text: str, count: int) -> bool:
    """Whether a parser with this form finds the calls that the template was given."""
    reader = DialectParser(form, None, {FUNCTION: {}})
    parts = reader.feed(text) + reader.finish()
    names = [part.name for part in parts if isinstance(part, CallStart)]
    if names != [FUNCTION] * count or not all(isinstance(part, (CallStart, ArgumentsPiece)) for part in parts):
        return False
    for index in range(count):
        told = "".join(part.text for part in parts if isinstance(part, ArgumentsPiece) and part.index == index)
        try:
            if json.loads(told) != ARGUMENTS:
                return False
        except ValueError:
            return False
    return True
