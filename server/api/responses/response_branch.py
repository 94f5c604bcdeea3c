"""Finds or creates the session on which a response runs: a conversation's, its predecessor's, or a new one.

Responses without a conversation have sessions of their own, *chains*. A follow-up continues its predecessor's chain. It
begins a new one with the same history if that chain has other follow-ups, is busy or is a conversation, or if the
history has to be rendered again.
"""

from __future__ import annotations

import hashlib
import secrets
from contextlib import ExitStack
from dataclasses import dataclass

from server.api.responses.schemas import InputRequest
from server.chat.prompts import Prompt
from server.errors import ApiError
from server.log.claims import SessionBusy
from server.log.identity import SESSION_ID, Session
from server.log.response_rows import StoredResponse, TurnExtras
from server.log.retries import Idempotency
from server.log.timeline import SessionRecord, at_turn, common_prefix, turn_of_row, turns_within
from server.schemas.items import parse_id
from server.turns.context import ServerContext

CHAIN = "chain-"  # how the sessions begin that hold nothing but responses
CHAIN_SECONDS = 30 * 86_400  # from the last response of a chain to its end
CONVERSATION = "conv_"
OVER = ("completed", "incomplete", "cancelled")


@dataclass(frozen=True)
class ResponseBranch:
    """``session`` takes the turn; None: nothing is stored. ``past`` is what the prompt follows; None: nothing; its
    version is that of the session. ``parent``: the session and turn that a new session is forked from.
    """

    session: Session | None
    past: SessionRecord | None = None
    parent: tuple[str, int] | None = None

    @property
    def is_new(self) -> bool:
        """Whether the session begins with the turn."""
        return self.past is None or self.past.version == 0

    @property
    def begins(self) -> TurnExtras:
        """What is committed with the first turn of a new session."""
        return TurnExtras(ttl=CHAIN_SECONDS, parent=self.parent)


async def branch_of(
    context: ServerContext, tenant: str, body: InputRequest, store: bool, key: Idempotency | None, held: ExitStack
) -> ResponseBranch:
    """The branch of a request; ``held`` then holds the claim of its session. Raises a 400 or 404 for an unknown
    predecessor or conversation, SessionBusy, and LogFull while the log cannot be written.
    """
    if body.conversation_id is not None:
        session = conversation_of(tenant, body.conversation_id)
        return existing_branch(session, None if session is None else await context.open(session, held))
    if body.previous_response_id is not None:
        return await branch_behind(context, tenant, body.previous_response_id, store, key, held)
    return ResponseBranch(await new_chain(context, tenant, key, held) if store else None)


async def find_branch(context: ServerContext, tenant: str, body: InputRequest) -> ResponseBranch:
    """The branch of a request that runs no turn: no session is claimed."""
    if body.conversation_id is None:
        return await branch_of(context, tenant, body, False, None, ExitStack())
    session = conversation_of(tenant, body.conversation_id)
    return existing_branch(session, None if session is None else await context.log.get(session.tenant, session.name))


def existing_branch(session: Session | None, record: SessionRecord | None) -> ResponseBranch:
    """The branch of an existing conversation. Raises a 404."""
    if record is None:
        raise conversation_not_found("conversation")
    return ResponseBranch(session, record)


async def branch_behind(
    context: ServerContext, tenant: str, previous: str, store: bool, key: Idempotency | None, held: ExitStack
) -> ResponseBranch:
    """The branch after an earlier response. Raises a 404 or a 409."""
    found, stored = await stored_response(context, tenant, previous)
    if found is None or stored is None:
        message = "There is no response with this previous_response_id."
        raise ApiError(400, message, param="previous_response_id", code="previous_response_not_found")
    if stored.status not in OVER or stored.row is None:
        raise response_unusable("The previous response cannot be continued: it is still running, or has no output.")
    session = Session(tenant, found, stateful=True)
    if store and found.startswith(CHAIN):
        with ExitStack() as claimed:
            try:
                record = await context.open(session, claimed)
            except SessionBusy:
                if key is not None:
                    raise  # this may be the first try of the same request
            else:
                if record is not None and is_last(record, stored):
                    held.push(claimed.pop_all())
                    return ResponseBranch(session, record)
    record = await context.log.get(tenant, found)
    turn = None if record is None else turn_of_row(record.turns, stored.row or 0)
    if record is None or turn is None:
        raise response_unusable("The previous response is no longer part of its session, which was edited or rewound.")
    new = await new_chain(context, tenant, key, held) if store else None
    return ResponseBranch(new, at_turn(record, turn), (found, turn.number))


async def branch_if_rewritten(
    context: ServerContext, branch: ResponseBranch, prompt: Prompt, key: Idempotency | None, held: ExitStack
) -> ResponseBranch | None:
    """If the prompt changes the history of a chain (other instructions or tools, dropped messages), a new chain that
    begins with this turn, so that earlier responses can still be continued. Otherwise None.
    """
    session, past = branch.session, branch.past
    if session is None or past is None or branch.is_new or not session.name.startswith(CHAIN):
        return None
    same = common_prefix(past.tokens, prompt.ids), common_prefix(past.messages, prompt.messages)
    if turns_within(past.turns, *same) == len(past.turns):
        return None
    last = past.turns[-1]
    new = await new_chain(context, session.tenant, key, held)
    return ResponseBranch(new, at_turn(past, last), (session.name, last.number))


def is_last(record: SessionRecord, stored: StoredResponse) -> bool:
    """Whether this response is the last turn of its session."""
    last = record.turns[-1] if record.turns else None
    return last is not None and last.row == stored.row and last.messages == len(record.messages)


async def stored_response(context: ServerContext, tenant: str, id: str) -> tuple[str | None, StoredResponse | None]:
    """A response with the name of its session; None for one that is unknown."""
    place = parse_id(id, "resp")
    return (None, None) if place is None else (place[0], await context.log.responses.get(tenant, *place))


async def new_chain(context: ServerContext, tenant: str, key: Idempotency | None, held: ExitStack) -> Session:
    """A new, claimed session for a response. With an idempotency key, it is the same one each time, unless the log has
    forgotten the key.
    """
    if key is not None:
        name = chain_of(key)
        session = Session(tenant, name, stateful=True)
        record = await context.open(session, held)
        if record is None or await context.log.responses.of_key(tenant, name, key.key) is not None:
            return session
    session = Session(tenant, CHAIN + secrets.token_hex(12), stateful=True)
    await context.open(session, held)
    return session


def chain_of(key: Idempotency) -> str:
    """The name of the chain that begins with the response of an idempotency key."""
    return CHAIN + hashlib.sha256(key.key.encode()).hexdigest()[:24]


def conversation_of(tenant: str, id: str) -> Session | None:
    """The session of a conversation's id; None for other ids."""
    name = id.removeprefix(CONVERSATION)
    ours = id.startswith(CONVERSATION) and SESSION_ID.match(name) and not name.startswith(CHAIN)
    return Session(tenant, name, stateful=True) if ours else None


def conversation_not_found(param: str | None = None) -> ApiError:
    return ApiError(404, "There is no conversation with this id.", param=param, code="conversation_not_found")


def response_not_found() -> ApiError:
    return ApiError(404, "There is no response with this id.", code="response_not_found")


def response_unusable(message: str) -> ApiError:
    return ApiError(400, message, param="previous_response_id", code="previous_response_unusable")
