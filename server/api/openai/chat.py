"""Routes of chat completions, stateless and on a session."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from scheduler.model_facts import ModelFacts
from server.api.openai.stored_chats import BEGUN, request_fields, request_messages
from server.chat.chat_tokenizer import ChatTokenizer
from server.chat.prompts import Prompt, chat_prompt, check_room, conversation, new_messages, rendering_change_of
from server.chat.rendering import PLAIN
from server.errors import bad_request
from server.http.body import JsonRoute, takes_turn
from server.lines.hints import names_conversation
from server.lines.recognition import Conversation, line_hint, recognise
from server.log.identity import Session, stated_session
from server.log.logged_message import LoggedMessage
from server.log.timeline import SessionRecord
from server.schemas.adaptations import adapt
from server.schemas.custom_input import custom_names
from server.schemas.objects import CompactionReceipt
from server.schemas.requests import ChatRequest, ReplyRequest
from server.schemas.vendor_fields import NO_TOKEN_OPTIONS, TokenOptions
from server.turns.naming import named_session
from server.turns.pending_turn import PendingTurn, open_turn
from server.turns.replies import ChatReply, Reply, ReplyHead, UsageOptions
from server.turns.reply_rules import chat_rules
from server.turns.turn_runner import TurnRunner

router = APIRouter(route_class=JsonRoute)
StoredRequest = tuple[dict[str, Any], list[dict[str, Any]]]  # of a chat that is stored: its parameters, its messages
ReplyMaker = Callable[[ReplyHead], Reply]


@router.post("/v1/chat/completions")
@takes_turn
async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
    """Generate a reply to a whole conversation, or with ``session_id`` to the new messages of a session. A chat with
    ``store`` and without a session begins one; a stored chat can be listed and fetched."""
    session = await named_session(request, body.session_id)
    if session is None and body.store:
        session = Session(request.state.tenant, f"{BEGUN}{uuid.uuid4().hex}", stateful=False)
    return await chat(body, request, session)


@router.post("/v1/sessions/{session_id}/chat/completions")
@takes_turn
async def continue_chat(session_id: str, body: ChatRequest, request: Request) -> Response:
    """Generate a reply to the new messages of a session; an unknown id begins a session."""
    return await chat(body, request, stated_session(request, body.session_id, session_id))


async def chat(
    body: ChatRequest,
    request: Request,
    session: Session | None,
    make_reply: ReplyMaker | None = None,
    compaction: CompactionReceipt | None = None,
) -> Response:
    """Reply to the messages of ``body``. ``make_reply`` makes another endpoint's reply objects; None: a chat
    completion's. ``compaction``: of the conversation, before this turn. Raises a 400 for what cannot be
    run.
    """
    if body.metadata and session is None and not names_conversation(body.hints):
        adapt("metadata_left_out", "metadata")  # it is stored with a session
    if body.background and session is None:
        raise bad_request("background needs a session: it is how the turn is found again.", "background")
    with ExitStack() as claim:
        turn = replace(await open_turn(request, body, session, claim), compaction=compaction)
        if (answer := await replay_chat(turn, body, make_reply)) is not None:
            return answer
        tokens, facts = turn.context.tokens, turn.context.facts
        if line_hint(turn) is None:
            prompt = await tokens.run(chat_prompt, body, tokens, facts, turn.continued)
        else:
            turn, prompt = await recognise(turn, await tokens.run(whole_conversation, body, tokens, facts))
        return await run_chat(turn, body, prompt, make_reply)


def whole_conversation(body: ChatRequest, tokens: ChatTokenizer, facts: ModelFacts) -> Conversation:
    """The conversation of a request that has all of it. Blocking."""
    messages = new_messages(body, tokens)
    change = replace(rendering_change_of(body, tokens), whole=True)

    def prompt_of(record: SessionRecord | None, new: list[LoggedMessage]) -> Prompt:
        return conversation(tokens, facts, record, new, change)

    return Conversation(messages, change.apply_over(PLAIN), prompt_of)


async def run_chat(
    turn: PendingTurn, body: ReplyRequest, prompt: Prompt, make_reply: ReplyMaker | None = None
) -> Response:
    """Run a chat on ``prompt``, one turn per choice, and reply; a named session is committed with ``prompt`` and the
    reply. The caller checks for a replay first (``replay_chat``). Raises a 400 if the prompt leaves no room for a
    reply, and the errors of ``TurnRunner``.
    """
    check_room(prompt, body, turn.context.facts)  # before a grammar is compiled for nothing
    rules = await chat_rules(turn.context, body, prompt, body, body.tool_choice, body.parallel_tool_calls)
    head = turn.reply_head("chatcmpl")
    stored = stored_request(turn, body, prompt) if body.store else None
    reply = chat_reply(body, head, prompt, stored) if make_reply is None else make_reply(head)
    runner = TurnRunner(turn, [prompt], rules, reply)
    return await (runner.respond_from_background() if body.background else runner.respond())


async def replay_chat(turn: PendingTurn, body: ReplyRequest, make_reply: ReplyMaker | None = None) -> Response | None:
    """The answer of the chat that was committed under the request's idempotency key; None if there is none. A stored
    chat keeps its id.
    """
    id = await stored_id(turn) if body.store else None

    def reply(created: int) -> Reply:
        head = turn.reply_head("chatcmpl", created)
        head = head if id is None else replace(head, id=id)
        return chat_reply(body, head) if make_reply is None else make_reply(head)

    return await turn.replay(reply)


def chat_reply(
    body: ReplyRequest, head: ReplyHead, prompt: Prompt | None = None, stored: StoredRequest | None = None
) -> ChatReply:
    """The writer of a chat completion; for a replay (``prompt`` None) without token ids and logprobs, which the log
    does not have.
    """
    tokens = NO_TOKEN_OPTIONS if prompt is None else TokenOptions.of(body, body.token_logprobs)
    tools = prompt.callable_tools if prompt is not None else [tool.plain() for tool in body.tools or ()]
    options, custom = UsageOptions.of(body), custom_names(tools)
    return ChatReply(head, options, tokens, prompt, body.echoed, tier_of(body), body.metadata, stored, custom)


def tier_of(body: ReplyRequest) -> str | None:
    """The service tier that a reply names: there is one."""
    return body.service_tier if body.service_tier in (None, "auto", "default") else "default"


def stored_request(turn: PendingTurn, body: ReplyRequest, prompt: Prompt) -> StoredRequest:
    """The parts of a chat's request that are stored."""
    sampling = body.make_sampling(0, turn.context.facts.generation)
    return request_fields(body, sampling, turn.request.state.request_id), request_messages(body, prompt.messages)


async def stored_id(turn: PendingTurn) -> str | None:
    """The id of the chat that was stored under the request's idempotency key; None if there is none."""
    session, key = turn.session, turn.idempotency
    if session is None or key is None:
        return None
    found = await turn.context.log.responses.of_key(session.tenant, session.name, key.key)
    stored = None if found is None else found[1]
    return None if stored is None else str(json.loads(stored.body)["id"])
