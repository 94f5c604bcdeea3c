"""Builds prompts: token ids from a request's messages or text, and the messages to log with the reply."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from scheduler.model_facts import ModelFacts
from server.chat.billing_line import fold_billing_lines, has_billing_line
from server.chat.chat_tokenizer import ChatTokenizer
from server.chat.expansions import count_rows, digests_of, media_of
from server.chat.late_tools import callable_tools, placed_tools
from server.chat.rendering import (
    NO_CHANGE,
    PLAIN,
    Rendering,
    RenderingChange,
    drop_reasoning,
    mark_message,
    order_tools,
    rendering_in_force,
)
from server.chat.stateful import NoContinuation, continued_ids, full_ids
from server.chat.system_places import place_messages
from server.config.prompt_rules import (
    BILLING_LINE,
    MESSAGES_JOINED,
    REASONING_KEPT,
    SYSTEM_IN_PLACE,
    TOOL_ORDER,
    TOOLS_IN_PLACE,
)
from server.errors import ApiError, bad_request
from server.log.logged_message import LoggedMessage, Scalar
from server.log.timeline import SessionRecord
from server.schemas.adaptations import adapt
from server.schemas.completion_requests import CompletionRequest
from server.schemas.messages import check_calls
from server.schemas.requests import ChatRequest, ReplyRequest, TurnRequest

BYTES_PER_TOKEN = 16  # more than any tokenizer packs into one on average over a whole context
SLACK_BYTES = 4096
TAIL = 48  # tokens that tell how a reply begins
THINKING_SWITCHES = frozenset({"enable_thinking", "thinking"})  # variables of templates that switch reasoning off


EMPTY_RECORD = SessionRecord("", [], [], "", 0)  # what a conversation that begins continues


@dataclass(frozen=True, slots=True)
class Prompt:
    """The prompt of one turn. ``ids`` is the whole timeline; ``messages`` are logged before the reply; ``echo`` is text
    that the client may want before the reply, and starts at ``echo_from`` in ``ids``. For a chat, ``rendering`` is how
    it was rendered, ``tail`` the text at the end of the ids, and ``reply_start`` the beginning of the reply that the
    request gives, if any.
    """

    ids: list[int]
    messages: list[LoggedMessage] = field(default_factory=list)
    echo: str = ""
    echo_from: int = 0
    rendering: Rendering = PLAIN
    tail: str = ""
    reply_start: str = ""

    @property
    def media(self) -> tuple[str, ...]:
        return tuple(digests_of(self.messages))

    @property
    def rows(self) -> Counter[str]:
        """How many of its tokens stand for media of each kind."""
        kinds = [one.kind for message in self.messages for one in message.media]
        return count_rows(self.ids, kinds) if kinds else Counter()

    @property
    def callable_tools(self) -> list[Mapping[str, Any]]:
        return callable_tools(self.rendering.tools, (message for message in self.messages if not message.dropped))


def chat_prompt(body: ChatRequest, tokens: ChatTokenizer, facts: ModelFacts, record: SessionRecord | None) -> Prompt:
    """The prompt of a chat. With a ``record``, the messages continue it. Blocking: run it on the pool."""
    return conversation(tokens, facts, record, new_messages(body, tokens), rendering_change_of(body, tokens))


def new_messages(body: ChatRequest, tokens: ChatTokenizer) -> list[LoggedMessage]:
    """The messages of a chat, as they are logged and rendered."""
    new = body.plain_messages()
    folds = any(map(has_billing_line, new)) and BILLING_LINE in tokens.rules
    return fold_billing_lines(new) if folds else new


def regeneration_prompt(body: ReplyRequest, tokens: ChatTokenizer, facts: ModelFacts, record: SessionRecord) -> Prompt:
    """The prompt that generates the last reply of a session again. Blocking."""
    return continuation(tokens, facts, record, [], rendering_change_of(body, tokens))


def conversation(
    tokens: ChatTokenizer,
    facts: ModelFacts,
    record: SessionRecord | None,
    new: list[LoggedMessage],
    change: RenderingChange = NO_CHANGE,
) -> Prompt:
    """The prompt of ``new`` messages, which continue ``record`` if there is one. Blocking. Raises a 400 for messages in
    an invalid order.
    """
    check_calls([] if record is None else record.messages, new)
    check_bytes(texts_of(new, change), facts, "messages")
    return continuation(tokens, facts, record or EMPTY_RECORD, new, change)


def continuation(
    tokens: ChatTokenizer,
    facts: ModelFacts,
    record: SessionRecord,
    new: list[LoggedMessage],
    change: RenderingChange = NO_CHANGE,
) -> Prompt:
    """The prompt of a session with ``new`` messages; without any, its last message is to be answered."""
    before = rendering_in_force(record.messages[: record.rendered])
    whole = [*record.messages, *new]
    kept, begun = (whole[:-1], whole[-1]) if change.goes_on else (whole, None)
    rendering = change.apply_over(rendering_in_force(kept))
    if TOOL_ORDER in tokens.rules:
        rendering = replace(rendering, tools=first_order(record.messages, rendering.tools))
    kept = mark_rendering_from(kept, min(len(record.messages), len(kept) - 1), rendering)
    whole = kept if begun is None else [*kept, begun]
    ids = prompt_ids(tokens, facts, record, whole, rendering, before, change)
    note_rules(tokens, whole, record.rendered, rendering)
    said = "" if begun is None else begun.content
    return Prompt(ids, kept, rendering=rendering, tail=tokens.decode(ids[-TAIL:]), reply_start=said)


def prompt_ids(
    tokens: ChatTokenizer,
    facts: ModelFacts,
    record: SessionRecord,
    whole: list[LoggedMessage],
    rendering: Rendering,
    before: Rendering,
    change: RenderingChange,
) -> list[int]:
    """The ids of all messages of a session; they begin with those of ``record`` where these are still valid.
    Raises a 400.
    """
    media = media_of(facts, whole)
    try:
        forgets = change.forget and any(message.reasoning_content for message in whole)
        known = record.fingerprint == tokens.fingerprint(facts.vocab_size) and media.know(record.tokens)
        if forgets or not known:
            # Logged under another tokenizer or processor, or with what is to be left out: its ids mean nothing here,
            # its words do.
            shown = drop_reasoning(whole) if change.forget else whole
            return full_ids(tokens, shown, rendering, goes_on=change.goes_on, media=media)
        rendered, unrendered = whole[: record.rendered], whole[record.rendered :]
        if not unrendered and rendering == before:
            return record.tokens
        if not unrendered:
            return full_ids(tokens, whole, rendering, media=media)
        if TOOLS_IN_PLACE not in tokens.rules and any(m.added_tools or m.removed_tools for m in unrendered):
            return full_ids(tokens, whole, rendering, goes_on=change.goes_on, media=media)
        ends = {*facts.eos_token_ids, *tokens.special_ids}
        return continued_ids(
            tokens,
            record.tokens,
            rendered,
            unrendered,
            ends,
            rendering,
            before=before,
            goes_on=change.goes_on,
            media=media,
        )
    except NoContinuation:
        message = "This model's chat template leaves nothing to go on with."
        raise bad_request(message, "continue_final_message", "invalid_value") from None


def first_order(messages: Sequence[LoggedMessage], tools: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """``tools`` in the order of ``order_tools``; the receipt says if that is another one than the request's."""
    ordered = order_tools(messages, tools)
    moved = [tool["function"]["name"] for tool in ordered] != [tool["function"]["name"] for tool in tools]
    adapt(TOOL_ORDER, "tools", int(moved))
    return ordered or tools


def note_rules(tokens: ChatTokenizer, messages: Sequence[LoggedMessage], rendered: int, rendering: Rendering) -> None:
    """Let the receipt say by which rules the messages from number ``rendered`` on are rendered otherwise than they are
    written.
    """
    dialect = tokens.dialect
    counted = place_messages(messages, dialect.places)[1]
    if counted:
        counted.subtract(place_messages(messages[:rendered], dialect.places)[1])
    switched = any(name not in rendering.template for name in dialect.reasoning_switch)
    if switched:
        last = max((i for i, message in enumerate(messages) if message.role == "user"), default=0)
        counted[REASONING_KEPT] = sum(bool(message.reasoning_content) for message in messages[rendered:last])
    for rule in (SYSTEM_IN_PLACE, MESSAGES_JOINED, REASONING_KEPT):
        adapt(rule, "messages", max(0, counted[rule]))
    placed = sum(len(message.added_tools) for message in messages[rendered:])
    if dialect.tools_lead:
        came = placed_tools(messages, rendering.tools)
        placed += sum(len(tools) for at, tools in came.items() if at >= rendered)
    adapt(TOOLS_IN_PLACE, "tools", placed if TOOLS_IN_PLACE in tokens.rules else 0)


def mark_rendering_from(messages: list[LoggedMessage], at: int, rendering: Rendering) -> list[LoggedMessage]:
    """``messages`` with ``rendering`` in force from message ``at`` on."""
    if not messages:
        return messages
    return [
        *messages[:at],
        mark_message(messages[at], rendering_in_force(messages[:at]), rendering),
        *messages[at + 1 :],
    ]


def rendering_change_of(body: ReplyRequest, tokens: ChatTokenizer) -> RenderingChange:
    """The tools and template variables that a chat asks for. Raises a 400 for a variable that the template does not
    read.
    """
    tools = None if body.tools is None else [tool.plain() for tool in body.tools]
    for param in ("chat_template_args", "chat_template_kwargs"):
        asked = getattr(body, param)
        if asked and not tokens.variables.issuperset(asked):
            raise bad_request(
                f"{param} has names that this model's chat template does not use.", param, "invalid_value"
            )
    template = {
        **switch_variables(body.reasons, tokens),
        **effort_variables(body.effort, tokens),
        **verbosity_variables(body.verbosity, tokens, "verbosity"),
        **body.chat_template_args,
        **body.chat_template_kwargs,
    }
    return RenderingChange(tools, template, body.reasoning_history == "drop", body.goes_on)


def switch_variables(reasons: bool | None, tokens: ChatTokenizer) -> dict[str, Scalar]:
    """The chat template's variables that switch reasoning on or off, of those that the template reads."""
    return {} if reasons is None else dict.fromkeys(sorted(THINKING_SWITCHES & tokens.variables), reasons)


def effort_variables(effort: str | None, tokens: ChatTokenizer) -> dict[str, Scalar]:
    """The chat template's variables for a reasoning effort, of those that the template reads."""
    if effort is None:
        return {}
    known: dict[str, Scalar] = dict.fromkeys(THINKING_SWITCHES, effort != "none")
    if effort != "none":
        known["reasoning_effort"] = effort
    return {name: value for name, value in known.items() if name in tokens.variables}


def verbosity_variables(verbosity: str | None, tokens: ChatTokenizer, param: str) -> dict[str, Scalar]:
    """The chat template's variables for a verbosity. If the template reads none, only ``medium`` is what there is
    anyway: others are noted in the receipt.
    """
    if verbosity is None:
        return {}
    if "verbosity" in tokens.variables:
        return {"verbosity": verbosity}
    if verbosity != "medium":
        adapt("verbosity_left_out", param, count=1)
    return {}


def texts_of(messages: Iterable[LoggedMessage], change: RenderingChange = NO_CHANGE) -> Iterator[str]:
    """All texts that are rendered."""
    for message in messages:
        yield message.content
        yield message.reasoning_content
        for call in message.tool_calls:
            yield call.function.arguments
        if message.added_tools:
            yield json.dumps(message.added_tools, ensure_ascii=False)
    yield json.dumps(change.tools or "", ensure_ascii=False)
    yield from (value for value in change.template.values() if isinstance(value, str))


def completion_prompts(
    body: CompletionRequest, tokens: ChatTokenizer, facts: ModelFacts, record: SessionRecord | None
) -> list[Prompt]:
    """The prompts of a completion. With a ``record``, the only prompt is appended to it. Blocking. Raises a 400."""
    prompts = body.prompts
    before, past = history(tokens, facts, record)
    if body.suffix:
        return [Prompt(infill_ids(body, tokens, facts, given), past) for given in prompts]
    made = []
    for given in prompts:
        if isinstance(given, str):
            check_bytes([given], facts, "prompt")
            new, text = tokens.encode(given, special=not before), given
        else:
            check_ids(given, facts.vocab_size, "prompt")
            check_room(Prompt(given), body, facts)  # before any time is spent on decoding them
            new, text = given, tokens.decode(given)
        if not before and not new:
            raise bad_request("prompt cannot be empty: this model needs at least one token.", "prompt", "invalid_value")
        made.append(Prompt([*before, *new], [*past, LoggedMessage("user", text)], text, len(before)))
    return made


def infill_ids(body: CompletionRequest, tokens: ChatTokenizer, facts: ModelFacts, given: str | list[int]) -> list[int]:
    """A prompt whose reply fills the gap between ``given`` and the suffix. Raises a 400 if the tokenizer has no
    fill-in-the-middle tokens.
    """
    if tokens.fill_in is None:
        message = "suffix cannot be used: this model's tokenizer knows no fill-in-the-middle tokens."
        raise bad_request(message, "suffix", "unsupported_parameter")
    front, behind, gap = tokens.fill_in
    check_bytes([body.suffix], facts, "suffix")
    if isinstance(given, str):
        check_bytes([given], facts, "prompt")
        return tokens.encode(front + given + behind + body.suffix + gap, special=True)
    check_ids(given, facts.vocab_size, "prompt")
    rest = tokens.encode(behind + body.suffix + gap, special=False)
    return [*tokens.encode(front, special=True), *given, *rest]


def history(
    tokens: ChatTokenizer, facts: ModelFacts, record: SessionRecord | None
) -> tuple[list[int], list[LoggedMessage]]:
    """The ids and messages that a text completion continues."""
    if record is None:
        return [], []
    if record.fingerprint == tokens.fingerprint(facts.vocab_size):
        waiting = "".join(m.content for m in record.messages[record.rendered :])
        ids = tokens.encode(waiting, special=not record.tokens) if waiting else []
        return [*record.tokens, *ids], record.messages
    return tokens.encode("".join(m.content for m in record.messages), special=True), record.messages


def check_bytes(texts: Iterable[str], facts: ModelFacts, param: str) -> None:
    """Refuse texts that are too large for the context, before they are tokenised. Raises a 400."""
    size = sum(len(text.encode()) for text in texts)
    if size > BYTES_PER_TOKEN * facts.max_context + SLACK_BYTES:
        raise context_exceeded(f"{param} is longer than this model's context of {facts.max_context} tokens.", param)


def check_ids(ids: Sequence[int], vocab_size: int, param: str) -> None:
    """Refuse token ids outside the vocabulary. Raises a 400."""
    if ids and max(ids) >= vocab_size:
        raise bad_request(
            f"{param} has a token id that this model does not have: the last id is {vocab_size - 1}.",
            param,
            "invalid_value",
        )


def check_room(prompt: Prompt, body: TurnRequest, facts: ModelFacts) -> int | None:
    """The most tokens to generate: the request's limit (lowered to the rest of the context if ``yields``), else the
    endpoint's default, lowered likewise; None: no limit. Raises a 400 for a prompt that leaves no room for the limit;
    without a limit, for the minimum; without that, for one token.
    """
    limit, least = body.token_limit, body.least_tokens
    left = facts.max_context - count_fed(prompt, facts)
    if limit is not None and body.yields:
        limit = min(limit, max(left, least))
    wanted = least if limit is None else limit
    if wanted > left or len(prompt.ids) > facts.max_context:
        raise context_exceeded(
            f"This model's context is {facts.max_context} tokens; the prompt has {len(prompt.ids)}"
            + (f" and {wanted} are to be generated." if wanted > 1 else "."),
            body.PROMPT,
        )
    if limit is None and body.default_limit is not None:
        return min(max(body.default_limit, least), left)
    return limit


def count_fed(prompt: Prompt, facts: ModelFacts) -> int:
    """Tokens of the timeline before the reply: the prompt's; 1 if an encoder reads the prompt."""
    return 1 if facts.encoder_decoder else len(prompt.ids)


def context_exceeded(message: str, param: str) -> ApiError:
    """OpenAI's 400 for a prompt that exceeds the context."""
    return bad_request(message, param, "context_length_exceeded")
