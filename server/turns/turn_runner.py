"""``TurnRunner``: runs the turns of one request, writes the reply, and commits the session."""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Iterable, Sequence

import msgspec
from msgspec import UNSET, UnsetType
from starlette.responses import Response

from scheduler.protocol import DraftSource
from server.chat.partial_reply import PartialReply
from server.chat.prompts import Prompt
from server.http.body import is_turn_route
from server.http.media_admission import media_of
from server.http.sse import EventStream, while_connected
from server.log.database import LogUnavailable
from server.log.identity import Session
from server.log.logged_message import LoggedMessage
from server.log.response_rows import TurnExtras
from server.log.timeline import NewTurn, SessionMoved, common_prefix
from server.log.usage_rows import Spent
from server.schemas.adaptations import adaptations
from server.schemas.objects import CachedTokens, CacheReceipt, CompletionTokens, DraftCounts, Usage
from server.schemas.strict import ignored_fields
from server.telemetry import log_context, traces
from server.turns.choices import Choices
from server.turns.context import headers_of
from server.turns.pending_turn import PendingTurn
from server.turns.receipt import PromptHistory, receipt_of, sum_receipts, to_milliseconds
from server.turns.replies import Reply, encoder
from server.turns.reply_rules import ReplyRules
from server.turns.request_usage import RequestUsage
from server.turns.running_turns import RunningTurn

logger = logging.getLogger("warmturn.lines")

TOGETHER = 16  # deltas of a reply that is told as a whole: it need not be read token by token


class TurnRunner:
    """Runs the turns of ``prompts`` (``body.candidates`` choices each) under ``rules``, and writes ``reply``.

    The session is committed before the client can see that the turn has ended, and not at all if the client disconnects
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
        self._partial_replies = [PartialReply(rules.parser()) for _ in self._submits]
        self._fingerprint = context.fingerprint
        self._ignored = ignored_fields()
        self._adapted = adaptations()
        limit = self._submits[0].stopping.max_tokens
        asked = body.token_limit
        self._limit = limit if limit is not None and asked is not None and limit < asked else UNSET
        self._rows = sum((prompt.rows for prompt in prompts), Counter[str]())
        self._claim = turn.claim
        self._past = PromptHistory.of(turn.session, turn.record, context.facts, self._fingerprint, self._submits[0])

    async def respond(self) -> Response:
        """The response, as soon as its status is certain. A stream keeps the session's claim until it has ended;
        otherwise the caller that opened the turn keeps it.
        """
        turn, reply = self._turn, self._reply
        receive, headers = turn.request.receive, headers_of(turn.named_session)
        choices = self.submit(1 if turn.body.stream else TOGETHER)
        turn.claim.callback(choices.close)
        if not turn.body.stream:
            body = await while_connected(receive, self._run_whole(choices))
            return Response(body, headers=headers, media_type="application/json")
        await while_connected(receive, choices.wait_until_admitted())
        events = self.events(choices)
        return EventStream(
            events,
            turn.claim.pop_all().close,
            headers,
            done=reply.done,
            failed=reply.encode_failure,
            media_type=reply.media_type,
            ping=reply.ping,
        )

    async def respond_from_background(self) -> Response:
        """Run the turn without the connection, and follow it from there. If the client disconnects, it goes on, and its
        session is held until it has ended.
        """
        turn, session, reply = self._turn, self._session, self._reply
        assert session is not None
        choices = self.submit()
        turn.claim.callback(choices.close)
        before = [] if turn.record is None else turn.record.messages
        messages = self._prompts[0].messages
        first = common_prefix(before, messages)
        running = RunningTurn(first, messages[first:])
        admission, events = choices.wait_until_admitted(), self.events(choices)
        self._context.running.start(
            session, running, admission, events, turn.claim, done=reply.done, failed=reply.encode_failure
        )
        await while_connected(turn.request.receive, running.admitted.wait())
        if running.refusal is not None:
            raise running.refusal
        return running.follow(headers_of(turn.named_session))

    def submit(self, patience: int = 1) -> Choices:
        """Submit the turns; the caller closes them. ``patience``: see ``Choices``. The session is released when its
        turn is committed, at the latest when the turn's claim is closed. Raises EngineUnavailable, and a 429 beyond the
        limits of the request's key.
        """
        limit = self._turn.request.state.rate_limit
        limit.admit()
        self._claim = self._turn.claim.pop_all()
        self._turn.claim.enter_context(self._claim)
        assert is_turn_route(self._turn.request.scope["route"]), "the endpoint needs the decorator takes_turn"
        context, head, started = self._context, self._reply.head, self._turn.request.state.started
        name = None if self._session is None else self._session.name
        log_context.note(session=name, turn=self._submits[0].turn)
        operation, choices = self._reply.operation, len(self._submits)
        span = traces.generation(context.tracer, operation, context.served_name, name, self._submits[0], choices)
        chunk: dict[str, traces.Value] = {"gen_ai.response.id": head.id, "gen_ai.response.model": head.model}
        account = RequestUsage(
            context.metrics, span, started, self._prompts, self._partial_replies, chunk, self._charge
        )
        return Choices(context.engine, account, self._submits, patience)

    def _charge(self, spent: Spent) -> None:
        """Count what the turns have cost for the request's key."""
        state = self._turn.request.state
        state.rate_limit.charge(spent.new + spent.generated)
        self._context.log.usage.add(state.tenant, state.key, spent)

    async def _run_whole(self, choices: Choices) -> bytes:
        async for index, delta in choices.deltas():
            parts = self._partial_replies[index].add(delta)
            self._tell_calls(index)
            self._reply.observe_delta(index, delta, parts)
        await self._commit(choices)
        return encoder.encode(
            self._reply.write_body(self._partial_replies, self._usage(choices), self._cache_receipt(choices))
        )

    async def events(self, choices: Choices) -> AsyncGenerator[bytes]:
        """The reply as a stream of events. The turn is committed before the last one."""
        reply = self._reply
        for index in range(len(self._partial_replies)):
            for chunk in reply.open_choice(index, self._usage_field(choices)):
                yield reply.encode_event(chunk)
        cache: CacheReceipt | UnsetType = UNSET
        async for index, delta in choices.deltas():
            partial_reply = self._partial_replies[index]
            parts = partial_reply.add(delta)
            self._tell_calls(index)
            for chunk in reply.write_delta(index, delta, parts, self._usage_field(choices)):
                yield reply.encode_event(chunk)
            if partial_reply.finish is not None:
                await self._commit(choices)
                if all(other.finish is not None for other in self._partial_replies):
                    cache = self._cache_receipt(choices)
                for chunk in reply.end_choice(index, partial_reply, self._usage_field(choices), cache):
                    yield reply.encode_event(chunk)
        for chunk in reply.end_stream(self._partial_replies, self._usage(choices), self._cache_receipt(choices)):
            yield reply.encode_event(chunk)

    def _tell_calls(self, index: int) -> None:
        """Tell the engine of a reply that has ended with tool calls that their results will come."""
        partial_reply = self._partial_replies[index]
        if partial_reply.finish == "tool_calls":
            names = [call.name for call in partial_reply.calls]
            self._context.engine.await_tools(self._submits[index].turn, names)

    async def _commit(self, choices: Choices) -> None:
        """Make the turn durable, for a session with a name: it has one prompt and one choice. A line that cannot be
        written stays as it was: its client knows nothing of it.
        """
        if self._session is None:
            return
        try:
            await self._write(self._session, choices)
        except (LogUnavailable, SessionMoved) as error:
            if self._turn.line is None:
                choices.usage.record_failure(error)
                raise
            logger.warning("a turn was not added to its line: %s", error)
        except Exception as error:
            choices.usage.record_failure(error)
            raise
        self._claim.close()  # whoever reads the last event may go on from it at once

    def new_turn(self, choices: Choices) -> NewTurn:
        """The timeline of the only prompt with its reply, which has ended."""
        prompt, partial_reply, receipt = self._prompts[0], self._partial_replies[0], choices.receipts[0]
        assert partial_reply.finish is not None
        assert receipt is not None
        return NewTurn(
            tokens=[*prompt.ids, *partial_reply.tokens],
            messages=[*prompt.messages, prepend_beginning(prompt.reply_start, self._reply.message(partial_reply))],
            prompt_tokens=len(prompt.ids),
            fingerprint=self._fingerprint,
            finish_reason=partial_reply.finish,
            cached=receipt.cached,
            receipt=encoder.encode(self._cache_receipt(choices)).decode(),
            model=self._context.served_name,
        )

    async def _write(self, session: Session, choices: Choices) -> None:
        cache = self._cache_receipt(choices)
        extras = self._turn_extras(choices, cache)  # before the message, as it ends the reply's last item
        await self._context.log.commit(
            session.tenant,
            session.name,
            self.new_turn(choices),
            idempotency=self._turn.idempotency,
            extras=extras,
            expect=0 if self._record is None else self._record.version,
        )
        if self._record is not None and self._record.tokens:
            self._context.metrics.count_commit(cache.recomputed, None if cache.miss is None else cache.miss.reason)

    def _turn_extras(self, choices: Choices, cache: CacheReceipt) -> TurnExtras:
        """What is committed with the turn."""
        line, media = self._turn.line, media_of(self._turn.request)
        if line is not None:
            return dataclasses.replace(line.begins, media=media)
        extras = self._reply.turn_extras(self._partial_replies[0], self._usage(choices), cache)
        return dataclasses.replace(extras, media=media)

    @property
    def _per_prompt(self) -> int:
        """Choices of one prompt. The first one tells what was cached: the others reuse its work."""
        return len(self._submits) // len(self._prompts)

    def _usage(self, choices: Choices) -> Usage:
        """Tokens so far."""
        prompt = sum(len(prompt.ids) for prompt in self._prompts)
        completion = sum(len(partial_reply.tokens) for partial_reply in self._partial_replies)
        cached = sum(receipt.cached for receipt in choices.receipts[:: self._per_prompt] if receipt is not None)
        thought = sum(partial_reply.reasoning_tokens for partial_reply in self._partial_replies)
        drafts = count_drafts(self._partial_replies)
        predicted = drafts.get(DraftSource.PREDICTION, DraftCounts(0, 0))
        rejected = predicted.drafted - predicted.accepted
        details = CompletionTokens(thought, predicted.accepted, rejected, drafts or UNSET)
        told = CachedTokens.with_media(cached, self._rows)
        return Usage(prompt, completion, prompt + completion, told, details)

    def _usage_field(self, choices: Choices) -> Usage | msgspec.UnsetType | None:
        options = self._reply.usage_options
        return self._usage(choices) if options.everywhere else options.elsewhere

    def _cache_receipt(self, choices: Choices) -> CacheReceipt:
        """What the prompts cost, once every turn has been admitted."""
        receipts = []
        for prompt, receipt in zip(self._prompts, choices.receipts[:: self._per_prompt], strict=True):
            assert receipt is not None
            receipts.append(receipt_of(prompt, receipt, self._past, self._context.tokens.decode))
        watches = choices.usage.watches[:: self._per_prompt]
        cost = sum_receipts(
            receipts, max((watch.prefill for watch in watches if watch.prefill is not None), default=None)
        )
        decode = max((watch.decode for watch in choices.usage.watches if watch.decode is not None), default=None)
        return msgspec.structs.replace(
            cost,
            decode_ms=UNSET if decode is None else to_milliseconds(decode),
            max_tokens=self._limit,
            ignored=self._ignored or UNSET,
            adapted=self._adapted or UNSET,
            line=UNSET if self._turn.line is None else self._turn.line.receipt,
            compaction=self._turn.compaction or UNSET,
            thinking_budget_spent=any(partial_reply.thinking_cut for partial_reply in self._partial_replies) or UNSET,
            speculation=count_drafts(self._partial_replies) or UNSET,
        )


def count_drafts(partial_replies: Iterable[PartialReply]) -> dict[str, DraftCounts]:
    """The drafted tokens of replies that have ended, by source."""
    counts: dict[str, DraftCounts] = {}
    for reply in partial_replies:
        for source, (drafted, accepted) in reply.drafts.items():
            before = counts.get(source, DraftCounts(0, 0))
            counts[source] = DraftCounts(before.drafted + drafted, before.accepted + accepted)
    return counts


def prepend_beginning(said: str, reply: LoggedMessage) -> LoggedMessage:
    """A reply that continues ``reply_start``, with that beginning; ``begun`` is its length in characters."""
    return msgspec.structs.replace(reply, content=said + reply.content, begun=len(said)) if said else reply
