"""Applies a request's ``tool_choice``: which tools its reply may call, and the reply's grammar."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from server.chat.call_grammar import call_grammar
from server.chat.call_rules import NO_CALLS, CallRules
from server.chat.chat_tokenizer import ChatTokenizer
from server.chat.dialect import Dialect
from server.chat.reasoned_grammar import grammar_behind_reasoning
from server.chat.reply_parser import PlainParser
from server.constraints.enforceable import lenient
from server.constraints.grammars import GrammarCheck, json_schema_grammar
from server.errors import bad_request
from server.schemas.adaptations import adapt
from server.schemas.output_formats import Formatted, check_grammar, format_grammar
from server.schemas.tools import AllowedChoice, NamedCustom, NamedTool, ToolChoice


def call_rules_of(tools: Sequence[Mapping[str, Any]], choice: ToolChoice | None, parallel: bool) -> CallRules:
    """The call rules of ``choice`` (None: auto) for ``tools``. Raises a 400 for a tool that is not among them."""
    match choice:
        case None | "auto":
            return CallRules(tools, False, parallel)
        case "none":
            return NO_CALLS
        case "required":
            return CallRules(select_tools(tools, None, "tool_choice"), True, parallel)
        case NamedTool() | NamedCustom():
            return CallRules(select_tools(tools, [choice.name], f"tool_choice.{choice.type}.name"), True, False)
        case AllowedChoice():
            names = [tool.name for tool in choice.allowed_tools.tools]
            allowed = select_tools(tools, names, "tool_choice.allowed_tools.tools")
            return CallRules(allowed, choice.allowed_tools.mode == "required", parallel)


def select_tools(
    tools: Sequence[Mapping[str, Any]], names: Sequence[str] | None, param: str
) -> list[Mapping[str, Any]]:
    """The tools with these names (None: all). Raises a 400 if one is missing or none is left."""
    found = [tool for tool in tools if names is None or tool["function"]["name"] in names]
    if not tools and names is None:
        raise bad_request(
            f"{param} asks for a call, and tools has none that this server can call.", param, "invalid_value"
        )
    if not found or (names is not None and len(found) < len(set(names))):
        raise bad_request(f"{param} names a tool that is not in tools.", param, "invalid_value")
    return found


async def reply_grammar(
    body: Formatted, calls: CallRules, tail: str, tokens: ChatTokenizer, check: GrammarCheck
) -> str | None:
    """The grammar of a reply to a prompt that ends with ``tail``, checked to compile; None: no grammar. A reply that
    must call tools consists of calls only; one that may is either in the requested format, or calls. Reasoning that the
    prompt has opened comes first. Raises a 400 that names the parameter.
    """
    dialect = tokens.dialect
    formatted = body.wanted_format() is not None
    thought = dialect.thought.closing if dialect.thought and dialect.opens_reasoning(tail) else ""
    if not calls.required and (dialect.form is None or not (calls.constrained or (calls.tools and formatted))):
        grammar = await format_grammar(body, check)
        return grammar_behind_reasoning(grammar, thought, tokens.named_tokens) if grammar and thought else grammar
    if dialect.form is None:
        message = "tool_choice cannot make this model call tools: how it writes calls is declared, not known."
        raise bad_request(message, "tool_choice", "unsupported_value")
    enforced = [await enforce_tool(check, number, tool) for number, tool in enumerate(calls.tools)]
    for keyword, count in Counter(keyword for _, left in enforced for keyword in left).items():
        adapt("keyword_not_enforced", keyword, count)
    make = partial(
        call_grammar,
        dialect.form,
        [tool for tool, _ in enforced],
        required=calls.required,
        parallel=calls.parallel,
        thought=thought,
        instead=None if calls.required else wanted_schema(body),
    )
    await check_grammar(check, "tools", partial(make, special=check.special_ids))
    return make(special=tokens.named_tokens)


async def enforce_tool(
    check: GrammarCheck, number: int, tool: Mapping[str, Any]
) -> tuple[Mapping[str, Any], Sequence[str]]:
    """A tool whose ``parameters`` a grammar can enforce, and the keywords that it does not. With ``strict`` nothing is
    changed: raises a 400 that names what cannot be enforced. Otherwise that is left out: first keywords, then all
    patterns, in the end everything but the type object.
    """
    function = tool["function"]
    wanted = function.get("parameters") or {}
    if function.get("strict"):
        await check_grammar(check, f"tools[{number}].function.parameters", partial(json_schema_grammar, wanted))
        return tool, ()
    for less in (whole, lenient, partial(lenient, patterns=False)):
        with suppress(ValueError):
            await check.run(partial(parameters_grammar, less, wanted))
            enforced, left = less(wanted)
            return {**tool, "function": {**function, "parameters": enforced}}, left
    return {**tool, "function": {**function, "parameters": {"type": "object"}}}, ("parameters",)


def whole(wanted: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """A schema of which nothing is left out."""
    return {**wanted}, []


def parameters_grammar(less: Callable[[Any], tuple[dict[str, Any], list[str]]], wanted: Mapping[str, Any]) -> str:
    """The grammar of arguments under ``less`` of what is wanted."""
    return json_schema_grammar(less(wanted)[0])


def wanted_schema(body: Formatted) -> Mapping[str, Any] | None:
    """The schema of a reply without calls; None: any text. Raises a 400 for a format that is not JSON."""
    wanted = body.wanted_format()
    if wanted is None:
        return None
    if wanted.kind != "json":
        param = wanted.param
        raise bad_request(f"{param} cannot be used together with tools that may be called.", param, "invalid_value")
    schema: Mapping[str, Any] = wanted.value
    return schema


def needs_marks(dialect: Dialect, calls: CallRules, *, reasons: bool = True) -> bool:
    """Whether the reply's text must include the dialect's special tokens, so that its parser finds the marks."""
    return dialect.special and not isinstance(dialect.make_parser("", calls, reasons=reasons), PlainParser)
