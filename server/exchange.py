"""One request being answered: its turns run, its reply is written, its session committed."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import ExitStack

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from scheduler.messages import Submit
from server.choices import Choices
from server.face import Face, headers_of
from server.identity import Session
from server.objects import CachedTokens, Usage
from server.prompts import Prompt
from server.replies import Draft, Reply, UsageField
from server.schemas import GenerationRequest
from server.sse import EventStream, event, while_connected

encoder = msgspec.json.Encoder()


class Exchange:
    """Runs ``submits`` (``len(submits) / len(prompts)`` choices per prompt, prompt by prompt) and writes ``reply``.

    The session is committed before the client can know that the turn has ended, and not at all if the client
    leaves before that.
    """

    def __init__(
        self,
        face: Face,
        body: GenerationRequest,
        session: Session | None,
        prompts: Sequence[Prompt],
        submits: Sequence[Submit],
        reply: Reply,
    ) -> None:
        self._face = face
        self._session = session
        self._prompts = prompts
        self._submits = submits
        self._reply = reply
        self._stream = body.stream
        options = body.stream_options
        self._include_usage = options is not None and (options.include_usage or options.continuous_usage_stats)
        self._usage_everywhere = options is not None and options.continuous_usage_stats
        self._drafts = [Draft() for _ in submits]
        self._fingerprint = face.facts.fingerprint

    async def respond(self, request: Request, held: ExitStack) -> Response:
        """The response, once its status is certain. ``held`` (the session's claim) is closed when all is over."""
        with ExitStack() as cleanup:
            cleanup.push(held.pop_all())
            choices = Choices(self._face.engine, self._face.metrics, self._submits, request.state.started)
            cleanup.callback(choices.close)
            if not self._stream:
                body = await while_connected(request.receive, self._whole(choices))
                return Response(body, headers=headers_of(self._session), media_type="application/json")
            await while_connected(request.receive, choices.opened())
            events = self._events(choices)
            return EventStream(events, cleanup.pop_all().close, headers_of(self._session))

    async def _whole(self, choices: Choices) -> bytes:
        async for index, delta in choices.deltas():
            self._drafts[index].add(delta)
        await self._commit()
        return encoder.encode(self._reply.body(self._drafts, self._usage(choices)))

    async def _events(self, choices: Choices) -> AsyncGenerator[bytes]:
        reply = self._reply
        for index in range(len(self._drafts)):
            if (opening := reply.opening(index, self._usage_field(choices))) is not None:
                yield event(encoder.encode(opening))
        async for index, delta in choices.deltas():
            draft = self._drafts[index]
            draft.add(delta)
            if (piece := reply.piece(index, delta, self._usage_field(choices))) is not None:
                yield event(encoder.encode(piece))
            if draft.finish is not None:
                await self._commit()
                yield event(encoder.encode(reply.ending(index, draft.finish, self._usage_field(choices))))
        if self._include_usage:
            yield event(encoder.encode(reply.usage(self._usage(choices))))

    async def _commit(self) -> None:
        """Make the turn durable, for a session with a name: it has one prompt and one choice."""
        if self._session is None:
            return
        prompt, draft = self._prompts[0], self._drafts[0]
        assert draft.finish is not None
        await self._face.log.commit(
            self._session.tenant,
            self._session.name,
            tokens=[*prompt.ids, *draft.tokens],
            messages=[*prompt.messages, {"role": "assistant", "content": draft.text}],
            fingerprint=self._fingerprint,
            finish_reason=draft.finish,
        )

    def _usage(self, choices: Choices) -> Usage:
        """Tokens so far. Of a prompt's choices the first one tells what was cached: the others reuse its work."""
        per_prompt = len(self._submits) // len(self._prompts)
        prompt = sum(len(prompt.ids) for prompt in self._prompts)
        completion = sum(len(draft.tokens) for draft in self._drafts)
        cached = sum(receipt.cached for receipt in choices.receipts[::per_prompt] if receipt is not None)
        return Usage(prompt, completion, prompt + completion, CachedTokens(cached))

    def _usage_field(self, choices: Choices) -> UsageField:
        if self._usage_everywhere:
            return self._usage(choices)
        return None if self._include_usage else UNSET
