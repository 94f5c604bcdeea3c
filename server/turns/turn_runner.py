"""One request being answered: its turns run, its reply is written, its session committed."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence

import msgspec
from msgspec import UNSET, UnsetType
from starlette.responses import Response

from server.chat.partial_reply import PartialReply
from server.chat.prompts import Prompt
from server.http.body import is_turn_route
from server.http.sse import EventStream, while_connected
from server.log.identity import Session
from server.log.timeline import Message, NewTurn
from server.schemas.objects import CachedTokens, CacheReceipt, CompletionTokens, Usage
from server.schemas.strict import ignored
from server.telemetry import log_context, traces
from server.turns.choices import Choices
from server.turns.context import headers_of
from server.turns.pending_turn import PendingTurn
from server.turns.receipt import PromptHistory, receipt_of, summed
from server.turns.replies import Reply, encoder
from server.turns.reply_rules import ReplyRules
from server.turns.request_usage import RequestUsage

TOGETHER = 16  # deltas of a reply that is told as a whole: it need not be read token by token


class TurnRunner:
    """Runs a turn on ``prompts`` (``body.candidates`` choices each) under ``rules``, and writes ``reply``.

    The session is committed before the client can know that the turn has ended, and not at all if the client leaves
    before that.
    """

    def __init__(self, turn: PendingTurn, prompts: Sequence[Prompt], rules: ReplyRules, reply: Reply) -> None:
        """Raises a 400 for a prompt that leaves no room for a reply."""
        context, body = turn.context, turn.body
        self._turn = turn
        self._context = context
        self._session = turn.session
        self._record = turn.record
        self._prompts = prompts
        self._submits = turn.submits(prompts, rules)
        self._reply = reply
        self._drafts = [PartialReply(rules.parser()) for _ in self._submits]
        self._fingerprint = context.fingerprint
        self._ignored = ignored()
        limit = self._submits[0].stopping.max_tokens
        asked = body.token_limit
        self._limit = limit if limit is not None and asked is not None and limit < asked else UNSET
        self._claim = turn.claim
        self._past = PromptHistory.of(turn.session, turn.record, context.facts, self._fingerprint, self._submits[0])

    async def respond(self) -> Response:
        """The response, once its status is certain. A stream keeps the session's claim until it is over; otherwise the
        claim stays with whoever opened the turn."""
        turn, reply = self._turn, self._reply
        receive, headers = turn.request.receive, headers_of(self._session)
        choices = self.submit(1 if turn.body.stream else TOGETHER)
        turn.claim.callback(choices.close)
        if not turn.body.stream:
            body = await while_connected(receive, self._whole(choices))
            return Response(body, headers=headers, media_type="application/json")
        await while_connected(receive, choices.opened())
        events = self.events(choices)
        return EventStream(events, turn.claim.pop_all().close, headers, done=reply.done, failed=reply.failed)

    def submit(self, patience: int = 1) -> Choices:
        """Hand the turns to the engine; the caller closes them. ``patience``: see ``Choices``. The session is free
        once its turn is committed, at the latest when the turn's claim is closed. Raises EngineUnavailable."""
        self._claim = self._turn.claim.pop_all()
        self._turn.claim.enter_context(self._claim)
        assert is_turn_route(self._turn.request.scope["route"]), "the endpoint needs the decorator takes_turn"
        context, head, started = self._context, self._reply.head, self._turn.request.state.started
        name = None if self._session is None else self._session.name
        log_context.note(session=name, turn=self._submits[0].turn)
        operation, choices = self._reply.operation, len(self._submits)
        span = traces.generation(context.tracer, operation, context.served_name, name, self._submits[0], choices)
        told: dict[str, traces.Value] = {"gen_ai.response.id": head.id, "gen_ai.response.model": head.model}
        account = RequestUsage(context.metrics, span, started, self._prompts, self._drafts, told)
        return Choices(context.engine, account, self._submits, patience)

    async def _whole(self, choices: Choices) -> bytes:
        async for index, delta in choices.deltas():
            parts = self._drafts[index].add(delta)
            self._reply.note(index, delta, parts)
        await self._commit(choices)
        return encoder.encode(self._reply.body(self._drafts, self._usage(choices), self._cache(choices)))

    async def events(self, choices: Choices) -> AsyncGenerator[bytes]:
        """The reply as a stream, up to its last event; whoever reads it to the end has the turn committed."""
        reply = self._reply
        for index in range(len(self._drafts)):
            for told in reply.opening(index, self._usage_field(choices)):
                yield reply.event(told)
        cache: CacheReceipt | UnsetType = UNSET
        async for index, delta in choices.deltas():
            draft = self._drafts[index]
            parts = draft.add(delta)
            for told in reply.piece(index, delta, parts, self._usage_field(choices)):
                yield reply.event(told)
            if draft.finish is not None:
                await self._commit(choices)
                if all(other.finish is not None for other in self._drafts):
                    cache = self._cache(choices)
                for told in reply.ending(index, draft, self._usage_field(choices), cache):
                    yield reply.event(told)
        for told in reply.closing(self._drafts, self._usage(choices), self._cache(choices)):
            yield reply.event(told)

    async def _commit(self, choices: Choices) -> None:
        """Make the turn durable, for a session with a name: it has one prompt and one choice."""
        if self._session is None:
            return
        try:
            await self._write(self._session, choices)
        except Exception as error:
            choices.account.failed(error)
            raise
        self._claim.close()  # whoever reads the last event may go on from it at once

    async def _write(self, session: Session, choices: Choices) -> None:
        prompt, draft, receipt = self._prompts[0], self._drafts[0], choices.receipts[0]
        assert draft.finish is not None
        assert receipt is not None
        cache = self._cache(choices)
        turn = NewTurn(
            tokens=[*prompt.ids, *draft.tokens],
            messages=[*prompt.messages, with_beginning(prompt.said, self._reply.message(draft))],
            prompt_tokens=len(prompt.ids),
            fingerprint=self._fingerprint,
            finish_reason=draft.finish,
            cached=receipt.cached,
            receipt=encoder.encode(cache).decode(),
        )
        await self._context.log.commit(
            session.tenant,
            session.name,
            turn,
            idempotency=self._turn.idempotency,
            extras=self._reply.beside(draft, self._usage(choices), cache),
            expect=0 if self._record is None else self._record.version,
        )
        if self._record is not None and self._record.tokens:
            self._context.metrics.committed(cache.recomputed, None if cache.miss is None else cache.miss.reason)

    @property
    def _per_prompt(self) -> int:
        """Choices of one prompt. The first one tells what was cached: the others reuse its work."""
        return len(self._submits) // len(self._prompts)

    def _usage(self, choices: Choices) -> Usage:
        """Tokens so far."""
        prompt = sum(len(prompt.ids) for prompt in self._prompts)
        completion = sum(len(draft.tokens) for draft in self._drafts)
        cached = sum(receipt.cached for receipt in choices.receipts[:: self._per_prompt] if receipt is not None)
        thought = sum(draft.reasoning_tokens for draft in self._drafts)
        return Usage(prompt, completion, prompt + completion, CachedTokens(cached), CompletionTokens(thought))

    def _usage_field(self, choices: Choices) -> Usage | msgspec.UnsetType | None:
        wish = self._reply.wish
        return self._usage(choices) if wish.everywhere else wish.elsewhere

    def _cache(self, choices: Choices) -> CacheReceipt:
        """What the prompts cost, once every turn has been admitted."""
        receipts = []
        for prompt, receipt in zip(self._prompts, choices.receipts[:: self._per_prompt], strict=True):
            assert receipt is not None
            receipts.append(receipt_of(prompt, receipt, self._past, self._context.tokens.decode))
        watches = choices.account.watches[:: self._per_prompt]
        cost = summed(receipts, max((watch.prefill for watch in watches if watch.prefill is not None), default=None))
        return msgspec.structs.replace(cost, max_tokens=self._limit, ignored=self._ignored or UNSET)


def with_beginning(said: str, reply: Message) -> Message:
    """A reply that goes on with what was ``said``, as one; ``begun`` tells how many characters were."""
    return {**reply, "content": said + reply["content"], "begun": len(said)} if said else reply
