"""From what the client sent to token ids, and what the log must hold once the reply is there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from scheduler.messages import ModelFacts
from server.errors import ApiError, bad_request
from server.log import SessionRecord
from server.schemas import ChatRequest, CompletionRequest, GenerationRequest
from server.stateful import Message, continued_ids, full_ids
from server.tokens import Tokens

BYTES_PER_TOKEN = 16  # more than any tokenizer packs into one on average over a whole context
SLACK_BYTES = 4096


@dataclass(frozen=True)
class Prompt:
    """One timeline to run. ``ids`` is all of it; ``messages`` is what the log holds before the reply; ``echo`` is the
    text that the client may want in front of the reply, and starts at ``echo_from`` in ``ids``."""

    ids: list[int]
    messages: list[Message] = field(default_factory=list)
    echo: str = ""
    echo_from: int = 0


def chat_prompt(body: ChatRequest, tokens: Tokens, facts: ModelFacts, record: SessionRecord | None) -> Prompt:
    """The prompt of a chat. With a ``record`` the messages are its continuation. Blocking: run it on the pool."""
    new: list[Message] = [message.plain() for message in body.messages]
    check_bytes((m["content"] for m in new), facts, "messages")
    if record is None:
        return Prompt(full_ids(tokens, new), new)
    return continuation(tokens, facts, record, new)


def continuation(tokens: Tokens, facts: ModelFacts, record: SessionRecord, new: list[Message]) -> Prompt:
    """What follows when ``new`` messages are added to a session; without any, its last message is to be answered."""
    whole = [*record.messages, *new]
    if record.fingerprint != tokens.fingerprint(facts.vocab_size):
        # Logged under another tokenizer: its ids mean nothing here, its words do.
        return Prompt(full_ids(tokens, whole), whole)
    rendered, unrendered = record.messages[: record.rendered], whole[record.rendered :]
    if not unrendered:
        return Prompt(record.tokens, whole)
    ends = {*facts.eos_token_ids, *tokens.special_ids}
    return Prompt(continued_ids(tokens, record.tokens, rendered, unrendered, ends), whole)


def completion_prompts(
    body: CompletionRequest, tokens: Tokens, facts: ModelFacts, record: SessionRecord | None
) -> list[Prompt]:
    """The prompts of a completion. With a ``record`` the only one is appended to it as it is. Blocking."""
    prompts = body.prompts
    before, past = history(tokens, facts, record)
    made = []
    for given in prompts:
        if isinstance(given, str):
            check_bytes([given], facts, "prompt")
            new, text = tokens.encode(given, special=not before), given
        else:
            check_ids(given, facts.vocab_size, "prompt")
            room(Prompt(given), body, facts, "prompt")  # before any time is spent on decoding them
            new, text = given, tokens.decode(given)
        if not before and not new:
            raise bad_request("prompt cannot be empty: this model needs at least one token.", "prompt", "invalid_value")
        made.append(Prompt([*before, *new], [*past, {"role": "user", "content": text}], text, len(before)))
    return made


def history(tokens: Tokens, facts: ModelFacts, record: SessionRecord | None) -> tuple[list[int], list[Message]]:
    """The ids and messages that a raw continuation follows."""
    if record is None:
        return [], []
    if record.fingerprint == tokens.fingerprint(facts.vocab_size):
        waiting = "".join(m["content"] for m in record.messages[record.rendered :])
        ids = tokens.encode(waiting, special=not record.tokens) if waiting else []
        return [*record.tokens, *ids], record.messages
    return tokens.encode("".join(m["content"] for m in record.messages), special=True), record.messages


def check_bytes(texts: Iterable[str], facts: ModelFacts, param: str) -> None:
    """Refuse texts that cannot fit before any time is spent on tokenising them."""
    size = sum(len(text.encode()) for text in texts)
    if size > BYTES_PER_TOKEN * facts.max_context + SLACK_BYTES:
        raise too_long(f"{param} is far longer than this model's context of {facts.max_context} tokens.", param)


def check_ids(ids: Sequence[int], vocab_size: int, param: str) -> None:
    """Every id must be one that the model has an embedding and a logit for."""
    if ids and max(ids) >= vocab_size:
        raise bad_request(
            f"{param} holds a token id that this model does not have: ids end at {vocab_size - 1}.",
            param,
            "invalid_value",
        )


def room(prompt: Prompt, body: GenerationRequest, facts: ModelFacts, param: str) -> None:
    """Refuse a prompt that leaves no room for what is to be generated: the limit, without one the minimum, or one."""
    wanted = max(1, body.min_tokens) if body.token_limit is None else body.token_limit
    if max(fed(prompt, facts) + wanted, len(prompt.ids)) > facts.max_context:
        raise too_long(
            f"This model's context is {facts.max_context} tokens; the prompt has {len(prompt.ids)}"
            + (f" and {wanted} are to be generated." if wanted > 1 else "."),
            param,
        )


def fed(prompt: Prompt, facts: ModelFacts) -> int:
    """Tokens of the timeline that the reply continues: the prompt, unless an encoder reads that."""
    return 1 if facts.encoder_decoder else len(prompt.ids)


def too_long(message: str, param: str) -> ApiError:
    """400 in OpenAI's words."""
    return bad_request(message, param, "context_length_exceeded")
