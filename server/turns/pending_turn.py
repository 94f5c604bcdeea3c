"""A pending turn: the request is checked, its session is claimed, and an earlier answer is looked up."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from scheduler.protocol import Submit, pack_ids
from server.chat.prompts import Prompt, check_room
from server.log.identity import Session
from server.log.response_rows import TurnExtras
from server.log.retries import Idempotency
from server.log.timeline import SessionRecord
from server.schemas.objects import CompactionReceipt, LineReceipt
from server.schemas.requests import TurnRequest
from server.turns.context import ServerContext, context_of
from server.turns.replay import idempotency_of, replay_turn
from server.turns.replies import Reply, ReplyHead
from server.turns.reply_rules import ReplyRules

NO_EXTRAS = TurnExtras()


@dataclass(frozen=True)
class LineTurn:
    """What a turn has that was recognised by a hint. ``begins``: what is committed with the first turn of a line;
    ``side`` and ``parent``: see ``Submit``.
    """

    receipt: LineReceipt
    begins: TurnExtras = NO_EXTRAS
    side: bool = False
    parent: str | None = None


@dataclass(frozen=True, slots=True)
class PendingTurn:
    """A checked request before it has a prompt. ``session`` takes the turn; None: nothing is stored. ``record`` is what
    the log has of the session now (None: nothing), whether or not the prompt builds on it: the commit fails with
    SessionMoved if the session has changed by then, and the receipt says what of it could not be reused.
    ``idempotency`` is the client's key for the request. ``claim`` holds the session until the response is complete.
    ``line``: for a request that was recognised by a hint; its session then is a line, or None. ``compaction``: what of
    the conversation was summarised before this turn.
    """

    request: Request
    body: TurnRequest
    context: ServerContext
    session: Session | None
    record: SessionRecord | None
    idempotency: Idempotency | None
    claim: ExitStack
    line: LineTurn | None = None
    compaction: CompactionReceipt | None = None

    @property
    def named_session(self) -> Session | None:
        """The session that the client has named, which answers name too."""
        return None if self.line is not None else self.session

    @property
    def continued(self) -> SessionRecord | None:
        """The record to which the request's messages or text are appended; None if the request has the whole
        conversation.
        """
        return self.record if self.session is not None and self.session.stateful else None

    def reply_head(self, prefix: str, created: int | None = None) -> ReplyHead:
        """The head of the reply's objects, with an id that begins with ``prefix``. ``created`` is in Unix seconds;
        None: now."""
        context, named = self.context, self.named_session
        name = None if named is None else named.name
        return ReplyHead.new(prefix, context.served_name, context.facts.fingerprint, name, created)

    async def replay(self, make_reply: Callable[[int], Reply]) -> Response | None:
        """The answer of the turn that was committed under the request's idempotency key; None if there is none.
        ``make_reply`` makes the endpoint's reply for a creation time in Unix seconds. Raises a 422 if the key belongs
        to another request.
        """
        if self.session is None or self.idempotency is None:
            return None
        return await replay_turn(self.context, self.session, self.idempotency, self.body.stream, make_reply)

    def submits(self, prompts: Sequence[Prompt], rules: ReplyRules) -> list[Submit]:
        """The turns to submit: ``body.candidates`` per prompt, prompt by prompt. Raises a 400 for a prompt that leaves
        no room for a reply.
        """
        body, facts = self.body, self.context.facts
        salt, keep_until = body.salt, body.keep_until
        predicted = body.predicted
        prediction = pack_ids(self.context.tokens.encode(predicted, special=False)) if predicted else b""
        made = []
        for prompt in prompts:
            stopping = body.make_stopping(check_room(prompt, body, facts), facts.generation)
            ids = pack_ids(prompt.ids)
            for choice in range(body.candidates):
                submit = Submit(
                    turn=uuid.uuid4().hex,
                    tenant=self.request.state.tenant,
                    prompt=ids,
                    session=None if self.session is None else self.session.name,
                    sampling=body.make_sampling(choice, facts.generation, rules.bad_words),
                    stopping=stopping,
                    logprobs=body.computed_logprobs,
                    prompt_logprobs=body.computed_prompt_logprobs(choice),
                    grammar=rules.grammar,
                    special=rules.needs_special_tokens or not body.skip_special_tokens,
                    salt=salt,
                    keep_until=keep_until,
                    side=self.line is not None and self.line.side,
                    thinking=rules.thinking,
                    parent=None if self.line is None else self.line.parent,
                    speculate=body.speculation,
                    prediction=prediction,
                    media=prompt.media,
                    spare=getattr(self.request.state, "spare", False),
                    adapter=self.context.adapter,
                )
                made.append(submit)
        return made


async def open_turn(request: Request, body: TurnRequest, session: Session | None, claim: ExitStack) -> PendingTurn:
    """Check a request, and claim its session until ``claim`` is closed. Raises a 400 or 404 for a request that cannot
    be served, SessionBusy, or LogFull while the log cannot be written.
    """
    context = context_of(request)
    context.check(body, session)
    record = await context.open(session, claim)
    return PendingTurn(request, body, context, session, record, idempotency_of(request, body), claim)
