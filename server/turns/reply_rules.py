"""``ReplyRules``: the grammar that a reply must match, words that it may not contain, and its parser."""

from __future__ import annotations

from dataclasses import dataclass, field

from scheduler.sampling_params import ThinkingBudget
from server.chat.bad_words import encode_bad_words
from server.chat.call_rules import NO_CALLS, CallRules
from server.chat.dialect import Dialect
from server.chat.prompts import THINKING_SWITCHES, Prompt
from server.chat.reply_parser import PlainParser, ReplyParser
from server.chat.thinking_budget import measure_budget
from server.chat.tool_prompts import call_rules_of, needs_marks, reply_grammar
from server.errors import bad_request
from server.schemas.output_formats import Formatted, format_grammar
from server.schemas.requests import TurnRequest
from server.schemas.tools import ToolChoice
from server.turns.context import ServerContext


@dataclass(frozen=True, slots=True)
class ReplyRules:
    """The rules for all choices of one request. ``grammar`` is what a reply must match (None: no grammar),
    ``bad_words`` the token ids that it may not contain, ``calls`` the tools that it may call. ``dialect`` parses it,
    after a prompt that ends with ``tail``; None: all of it is content. ``reasons`` false: the reply begins with content
    and has no reasoning; ``thinking`` limits it otherwise.
    """

    grammar: str | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    calls: CallRules = field(default_factory=lambda: NO_CALLS)
    dialect: Dialect | None = None
    tail: str = ""
    reasons: bool = True
    thinking: ThinkingBudget | None = None

    def parser(self) -> ReplyParser:
        """A new parser, for one choice."""
        if self.dialect is None:
            return PlainParser()
        return self.dialect.make_parser(self.tail, self.calls, reasons=self.reasons)

    @property
    def needs_special_tokens(self) -> bool:
        """Whether the parser needs special tokens in the text to find calls and reasoning."""
        return self.dialect is not None and needs_marks(self.dialect, self.calls, reasons=self.reasons)


async def chat_rules(
    context: ServerContext,
    body: TurnRequest,
    prompt: Prompt,
    format: Formatted,
    tool_choice: ToolChoice | None,
    parallel_tool_calls: bool,
) -> ReplyRules:
    """The rules of a reply to a conversation: it may call the tools in force, and is parsed in the model's dialect.

    Raises a 400 that names the parameter for tools and formats that cannot be enforced.
    """
    calls = call_rules_of(prompt.callable_tools, tool_choice, parallel_tool_calls)
    tail, dialect = "" if prompt.reply_start else prompt.tail, context.tokens.dialect
    grammar = await reply_grammar(format, calls, tail, context.tokens, context.grammars)
    # A reply whose first word a format shapes, or that continues a message of the request, does not reason first.
    shaped = format.wanted_format() is not None and not calls.constrained and not dialect.opens_reasoning(tail)
    reasons = not prompt.reply_start and not shaped
    words = await bad_word_ids(context, body, grammar)
    thinking = await thinking_budget(context, body, tail, calls) if reasons else None
    return ReplyRules(grammar, words, calls, dialect, prompt.tail, reasons, thinking)


async def thinking_budget(
    context: ServerContext, body: TurnRequest, tail: str, calls: CallRules
) -> ThinkingBudget | None:
    """The limit on the reasoning of a reply: the request's, else the server's default; none at all for effort ``none``
    where the template has no variable that switches it off. None: no limit. Raises a 400 for a limit of the request
    that cannot be kept.
    """
    tokens, param, limit = context.tokens, "", context.thinking.tokens
    if body.thinking_limit is not None:
        param, given = body.thinking_limit
        limit = given if given >= 0 else None
    if body.effort == "none" and not tokens.variables & THINKING_SWITCHES:
        limit = 0
    if limit is None:
        return None
    try:
        return await tokens.run(measure_budget, tokens, tail, limit, context.thinking.message, calls=bool(calls.tools))
    except ValueError:
        if not param:
            return None
        message = f"{param} cannot be kept: the marks of this model's reasoning are declared as patterns."
        raise bad_request(message, param, "unsupported_parameter") from None


async def text_rules(context: ServerContext, body: TurnRequest, format: Formatted) -> ReplyRules:
    """The rules of a text completion: all of it is content. Raises a 400 that names the parameter."""
    grammar = await format_grammar(format, context.grammars)
    return ReplyRules(grammar, await bad_word_ids(context, body, grammar))


async def bad_word_ids(context: ServerContext, body: TurnRequest, grammar: str | None) -> tuple[tuple[int, ...], ...]:
    """The token ids of the request's ``bad_words``. Raises a 400 if the request has a grammar too."""
    if not body.bad_words:
        return ()
    if grammar is not None:
        message = "bad_words cannot be used where a format or a call of tools decides which words may come."
        raise bad_request(message, "bad_words", "invalid_value")
    return await context.tokens.run(encode_bad_words, body.bad_words, context.tokens, context.facts.vocab_size)
