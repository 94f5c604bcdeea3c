"""Dialects: measured on templates of every style, declared by response templates, and what each template is given."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import msgspec
import pytest
from http_context import demo_tokens
from msgspec import structs
from template_styles import HERMES, NO_SYSTEM, NO_TOOLS, STYLES, THINKS, tokens_with

from server.chat.call_form import CallForm, ParameterForm
from server.chat.call_rules import CallRules
from server.chat.chat_tokenizer import ChatTokenizer, TemplateRefused
from server.chat.declared_parser import DeclaredParser, check_response_template
from server.chat.dialect import IN_WORDS, Dialect, shorten_id
from server.chat.dialect_parser import DialectParser, ReasoningMarks
from server.chat.dialect_probe import DATA
from server.chat.partial_reply import PartialReply
from server.chat.rendering import Rendering
from server.chat.reply_parser import PlainParser, ReplyParser
from server.chat.stateful import continued_ids, full_ids
from server.log.logged_message import LoggedCall, LoggedFunction, LoggedMessage

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "How it is there.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    },
}
MANNER = Rendering([TOOL])
ARGUMENTS = {"city": "Rome", "days": 2}


def call(id: str = "call_1", name: str = "weather", **arguments: object) -> LoggedCall:
    return LoggedCall(id, "function", LoggedFunction(name, json.dumps(arguments or ARGUMENTS)))


USER = LoggedMessage("user", "How is Rome?")
CALLING = LoggedMessage("assistant", "", tool_calls=(call(),))
RESULT = LoggedMessage("tool", "Sunny.", tool_call_id="call_1")
FORMS = {
    "hermes": IN_WORDS,
    "thinks": IN_WORDS,
    "mistral": CallForm("[TOOL_CALLS] [", '{"name": "', '", "arguments": ', "}", ", ", "]"),
    "llama": CallForm("", '{"name": "', '", "parameters": ', "}", several=False),
    "xml": CallForm(
        "",
        "<tool_call>\n<function=",
        ">\n",
        "</function>\n</tool_call>",
        parameter=ParameterForm("<parameter=", ">\n", "\n</parameter>\n"),
    ),
    "pairs": CallForm(
        "",
        "<tool_call>",
        "\n",
        "</tool_call>",
        parameter=ParameterForm("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"),
    ),
    "named": CallForm(
        "<|calls_begin|>", "<|call_begin|>function<|sep|>", "\n```json\n", "\n```<|call_end|>", "", "<|calls_end|>"
    ),
    "no tools": IN_WORDS,
    "no system": IN_WORDS,
    "strict": IN_WORDS,
    "alternating": CallForm("[TOOL_CALLS] [", '{"name": "', '", "arguments": ', "}", ", ", "]"),
}


def read(reading: ReplyParser, text: str) -> dict[str, Any]:
    """The message that a text is read as, its arguments parsed."""
    draft = PartialReply(reading)
    for part in [*reading.feed(text), *reading.finish()]:
        draft.take(part)
    message = draft.message()
    calls = [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls]
    return {**msgspec.to_builtins(message), "tool_calls": calls}


@pytest.mark.parametrize("style", STYLES)
def test_how_calls_are_written_is_measured(style: str) -> None:
    dialect = tokens_with(STYLES[style]).dialect
    assert dialect.form == FORMS[style]
    assert dialect.native == (style not in ("no tools", "no system"))
    assert dialect.text_arguments == (style == "named")
    assert dialect.short_ids == (style == "mistral")
    assert dialect.takes_system == (style != "no system")
    assert dialect.thought == (
        ReasoningMarks("<think>", "</think>") if style in ("hermes", "thinks", "strict") else None
    )


@pytest.mark.parametrize("style", STYLES)
def test_what_a_template_writes_of_a_reply_is_read_as_that_reply(style: str) -> None:
    tokens = tokens_with(STYLES[style])
    calls = [call(), call("call_2", city='a "b" {}\n<x>', days=3)][: 2 if tokens.dialect.form.several else 1]  # type: ignore[union-attr]
    prompt = tokens.render([USER], generation_prompt=True, rendering=MANNER)
    whole = tokens.render(
        [USER, structs.replace(CALLING, tool_calls=(*calls,))], generation_prompt=False, rendering=MANNER
    )
    head = "[/INST]" if style == "mistral" else prompt.removesuffix("<think>\n").removesuffix("\n")
    text = whole.partition(head)[2].partition("<|im_end|>")[0].partition("<|eot_id|>")[0]
    message = read(DialectParser(tokens.dialect.form, None, CallRules([TOOL]).schemas), text)
    assert message["tool_calls"] == [(c.function.name, json.loads(c.function.arguments)) for c in calls]
    assert message["content"] == ""


@pytest.mark.parametrize("style", STYLES)
def test_tools_calls_and_results_are_in_the_prompt(style: str) -> None:
    text = tokens_with(STYLES[style]).render([USER, CALLING, RESULT], generation_prompt=True, rendering=MANNER)
    if style != "mistral":  # that style shows tools with a last user message only
        assert text.index("weather") < text.rindex("weather")
    assert "Rome" in text[text.index("How is Rome?") + 12 :]
    assert "Sunny." in text


WRITTEN = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 2}}\n</tool_call>'
STABLE = [style for style in STYLES if style not in ("thinks", "mistral")]  # these two rewrite their past
WITH_WORDS = LoggedMessage("assistant", "Let me see.", tool_calls=(call(),))


@pytest.mark.parametrize("style", STABLE)
@pytest.mark.parametrize("reply", [CALLING, WITH_WORDS, structs.replace(CALLING, tool_calls=(call(), call("call_2")))])
def test_a_session_goes_on_behind_calls_as_a_full_render_does(style: str, reply: LoggedMessage) -> None:
    tokens = tokens_with(STYLES[style])
    if style == "llama":
        reply = structs.replace(reply, tool_calls=reply.tool_calls[:1])
    new = [RESULT, LoggedMessage("user", "And tomorrow?")]
    text = tokens.render([USER, reply, *new], generation_prompt=True, rendering=MANNER)
    end = "<|eot_id|>" if style == "llama" else "<|im_end|>"  # where the reply ended, which the log holds
    logged = text[: text.index(end, text.rindex("How is Rome?") + len("How is Rome?" + end))]
    past = tokens.encode(logged, special=False)
    continued = continued_ids(tokens, past, [USER, reply], new, (), MANNER, before=MANNER)
    assert continued[: len(past)] == past
    assert tokens.decode(continued) == text


def test_other_tools_render_the_past_anew_only_where_the_template_writes_them_there() -> None:
    other = Rendering([{**TOOL, "function": {**TOOL["function"], "name": "forecast"}}])
    reply, new = LoggedMessage("assistant", "Hello."), [LoggedMessage("user", "More?")]
    logged = [7, 8, 9]
    stays, moves = tokens_with(STYLES["mistral"]), tokens_with(HERMES)
    assert continued_ids(stays, logged, [USER, reply], new, (), other, before=MANNER)[:3] == logged
    assert "forecast" in stays.decode(continued_ids(stays, logged, [USER, reply], new, (), other, before=MANNER))
    anew = continued_ids(moves, logged, [USER, reply], new, (), other, before=MANNER)
    assert anew == full_ids(moves, [USER, reply, *new], other)
    assert continued_ids(moves, logged, [USER, reply], new, (), MANNER, before=MANNER)[:3] == logged


# --- in words -----------------------------------------------------------------------------------------------


def test_a_template_without_tools_gets_them_in_its_system_message() -> None:
    system = LoggedMessage("system", "Be brief.")
    tokens = tokens_with(NO_TOOLS)
    text = tokens.render(
        [system, USER, CALLING, RESULT, structs.replace(RESULT, content="Warm.")],
        generation_prompt=True,
        rendering=MANNER,
    )
    assert text.startswith("<|im_start|>system\nBe brief.\n\nYou may call functions.")
    assert '\n{"name": "weather", "description": "How it is there."' in text
    assert f"<|im_start|>assistant\n{WRITTEN}<|im_end|>" in text
    assert text.count("<|im_start|>user") == 2  # results in a row are one message
    assert "<tool_response>\nSunny.\n</tool_response>\n<tool_response>\nWarm.\n</tool_response><|im_end|>" in text
    assert "tool_calls" not in text


def test_without_system_messages_the_tools_are_in_front_of_the_first_words() -> None:
    text = tokens_with(NO_SYSTEM).render([USER], generation_prompt=True, rendering=MANNER)
    assert text.startswith("<|im_start|>user\nYou may call functions.")
    assert "within <tool_response></tool_response>.\n\nHow is Rome?" in text


@pytest.mark.parametrize("style", STYLES)
def test_messages_without_tools_are_rendered_as_they_always_were(style: str) -> None:
    tokens = tokens_with(STYLES[style])
    messages = [USER, LoggedMessage("assistant", "Fine."), USER]
    marked = [structs.replace(messages[0], tools=[], template={}), *messages[1:]]
    assert tokens.render(marked, generation_prompt=True) == tokens.apply(msgspec.to_builtins(messages), (), True)


# --- reasoning ----------------------------------------------------------------------------------------------


def test_reasoning_is_opened_by_a_prompt_that_ends_so() -> None:
    dialect = tokens_with(THINKS).dialect
    prompt = tokens_with(THINKS).render([USER], generation_prompt=True)
    assert read(dialect.make_parser(prompt), "Hm.\n</think>\n\nYes.") | {"tool_calls": 0} == {
        "role": "assistant",
        "content": "Yes.",
        "reasoning_content": "Hm.",
        "tool_calls": 0,
    }
    assert read(dialect.make_parser(prompt, reasons=False), "Yes.")["content"] == "Yes."
    assert read(dialect.make_parser("user: x"), "Yes.")["content"] == "Yes."


def test_a_template_reads_reasoning_from_the_field_that_it_knows() -> None:
    thought = LoggedMessage("assistant", "Yes.", reasoning_content="Hm.")
    knows = NO_TOOLS.replace("{{ m.content }}", "{% if m.thinking %}[T]{{ m.thinking }}[/T]{% endif %}{{ m.content }}")
    assert "[T]Hm.[/T]Yes." in tokens_with(knows).render([USER, thought], generation_prompt=False)
    strips = NO_TOOLS.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] }}") + "{# <think> #}"
    assert tokens_with(strips).dialect.thought == ReasoningMarks("<think>", "</think>")
    assert "Hm." not in tokens_with(strips).render([USER, thought], generation_prompt=False)
    assert tokens_with(NO_TOOLS).render([USER, thought], generation_prompt=False).count("Hm.") == 0


def test_a_dialect_without_anything_to_tell_apart_reads_plainly() -> None:
    assert isinstance(demo_tokens().dialect.make_parser(""), PlainParser)
    assert isinstance(demo_tokens().dialect.make_parser("", CallRules([TOOL])), DialectParser)


# --- declared -----------------------------------------------------------------------------------------------

RESPONSE = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "thinking": {"open": "<t>", "close": "</t>"},
        "tool_calls": {
            "open": "<c>",
            "close": "</c>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"repeats": True, "join": ""},
    },
}
PROMPT = "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("size", [1, 2, 5, 1000])
def test_a_declared_response_is_read_by_its_template(size: int) -> None:
    dialect = tokens_with(HERMES, RESPONSE).dialect
    text = '<t>Hm.</t>Yes.<c>{"name": "weather", "arguments": {"days": "2"}}</c>'
    reading = dialect.make_parser(PROMPT, CallRules([TOOL]))
    draft = PartialReply(reading)
    for at in range(0, len(text), size):
        for part in reading.feed(text[at : at + size]):
            draft.take(part)
    for part in reading.finish():
        draft.take(part)
    message = draft.message()
    assert (message.content, message.reasoning_content) == ("Yes.", "Hm.")
    assert message.tool_calls[0].function == LoggedFunction("weather", '{"days": 2}')


def test_a_tokenizer_may_declare_its_response_and_a_given_one_wins() -> None:
    tokens = tokens_with(HERMES)
    tokens._tokenizer.response_template = RESPONSE
    assert read(tokens.dialect.make_parser(PROMPT), "<t>Hm.</t>Yes.")["content"] == "Yes."
    broken = tokens_with(HERMES)
    broken._tokenizer.response_template = {"nonsense": 1}
    assert broken.dialect == tokens_with(HERMES).dialect
    other = {**RESPONSE, "fields": {**RESPONSE["fields"], "thinking": {"open": "<z>", "close": "</z>"}}}  # type: ignore[dict-item]
    given = tokens_with(HERMES, other)
    given._tokenizer.response_template = RESPONSE
    assert read(given.dialect.make_parser(PROMPT), "<z>Hm.</z>Yes.")["content"] == "Yes."


def test_a_declared_response_continues_what_the_prompt_opened() -> None:
    dialect = tokens_with(HERMES, RESPONSE).dialect
    assert read(dialect.make_parser(PROMPT + "<t>"), "Hm.</t>Yes.")["content"] == "Yes."
    assert read(dialect.make_parser("no anchor <t>"), "Yes.")["content"] == "Yes."


@pytest.mark.parametrize("text", ["<c>{broken</c> then", '<c>{"name": "nobody", "arguments": {}}</c>', "<c>3</c>"])
def test_what_a_declared_template_cannot_read_is_content(text: str) -> None:
    message = read(tokens_with(HERMES, RESPONSE).dialect.make_parser(PROMPT, CallRules([TOOL])), text)
    assert message["tool_calls"] == []
    assert text.removeprefix("<c>").partition("</c>")[0] in message["content"]


@pytest.mark.parametrize("declared", [{"fields": {}}, {"nonsense": 1}, ["x"]])
def test_a_response_template_that_is_none_is_refused(declared: object) -> None:
    with pytest.raises(ValueError, match=r"response.template"):
        _ = tokens_with(HERMES, declared).dialect


HARMONY = (
    "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.weather "
    '<|constrain|>json<|message|>{"days": 2}'
)
SECTIONS = (
    "Hm.</think>Yes.<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
    '{"days": 2}<|tool_call_end|><|tool_calls_section_end|>'
)


@pytest.mark.parametrize(
    ("entry", "tail", "text"),
    [
        (0, "<|start|>assistant", HARMONY),
        (1, "<|im_middle|><think>", SECTIONS),
        (2, "<|turn>model\n", "<|tool_call>call:weather{days:2}<tool_call|>"),
    ],
)
def test_the_response_templates_that_come_along_read_their_dialects(entry: int, tail: str, text: str) -> None:
    template = check_response_template(json.loads(DATA.read_text())["templates"][entry]["response_template"])
    for size in (1, 3, 1000):
        reading = DeclaredParser(template, [TOOL], tail)
        draft = PartialReply(reading)
        for at in range(0, len(text), size):
            for part in reading.feed(text[at : at + size]):
                draft.take(part)
        for part in reading.finish():
            draft.take(part)
        (call,) = draft.calls
        assert (call.name, json.loads(call.arguments)) == ("weather", {"days": 2})
        assert draft.content == ("Yes." if entry == 1 else "")
        assert draft.reasoning == ("" if entry == 2 else "Hm.")


def test_marks_in_the_template_choose_a_response_template() -> None:
    source = NO_TOOLS + "{# <|channel|> <|message|> <|call|> #}"
    assert tokens_with(source).dialect.declared is not None
    assert tokens_with(NO_TOOLS).dialect.declared is None


# --- the rest -----------------------------------------------------------------------------------------------


def test_variables_are_those_that_the_template_reads() -> None:
    assert tokens_with(HERMES).variables == {"enable_thinking"}
    assert tokens_with(NO_TOOLS).variables == frozenset()
    assert tokens_with("{% set x = 1 %}{{ x }}{{ bos_token }}{{ messages }}{{ effort }}").variables == {"effort"}
    inner = "{% for m in messages %}{% if m %}{% set content = 1 %}{% endif %}{{ content }}{% endfor %}"
    default = "{% if not budget is defined %}{% set budget = 1 %}{% endif %}{{ budget }}"
    assert tokens_with(inner + default.replace("not budget is defined", "budget is not defined")).variables == {
        "budget"
    }
    off = tokens_with(HERMES).render(
        [USER], generation_prompt=True, rendering=Rendering(template={"enable_thinking": False})
    )
    assert off.endswith("<think>\n\n</think>\n\n")


def test_ids_of_calls_become_nine_letters_and_stay_the_same() -> None:
    assert shorten_id("call_abc") == shorten_id("call_abc") != shorten_id("call_abd")
    assert len(shorten_id("call_abc")) == 9
    assert shorten_id("abcdefgh1") == "abcdefgh1"


def test_a_template_that_refuses_says_so() -> None:
    with pytest.raises(TemplateRefused):
        tokens_with("{{ raise_exception('No.') }}").render([USER], generation_prompt=True, rendering=MANNER)


def test_a_mark_that_ends_replies_of_calls_is_no_part_of_them() -> None:
    end = "{{ '<|observation|>' if m.tool_calls else '<|im_end|>' }}"
    source = STYLES["pairs"].replace("</tool_call>{% endfor %}<|im_end|>", f"</tool_call>{{% endfor %}}{end}")
    assert source != STYLES["pairs"]
    assert tokens_with(source).dialect.form == FORMS["pairs"]


def test_special_tokens_are_shown_where_they_are_marks() -> None:
    marks = NO_TOOLS.replace(
        "{{ m.content }}", "{% if m.thinking %}<|im_start|>{{ m.thinking }}<|im_end|>{% endif %}{{ m.content }}"
    )
    assert tokens_with(marks).dialect.special
    assert not tokens_with(HERMES).dialect.special
    assert Dialect().special is False


def test_reading_imports_no_torch() -> None:
    program = (
        "import sys; from server.chat.declared_parser import DeclaredParser, check_response_template; "
        "from server.chat.dialect import Dialect; "
        "import server.chat.dialect_probe, server.chat.dialect_parser, server.chat.chat_tokenizer; "
        "DeclaredParser(check_response_template({'start_anchor': 'x', 'fields': {'content': {}}}), [], 'x').feed('y'); "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-P", "-c", program], check=True, timeout=120)


def test_the_measuring_is_done_once() -> None:
    tokens: ChatTokenizer = tokens_with(HERMES)
    assert tokens.dialect is tokens.dialect
