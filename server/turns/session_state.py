"""``session_state``: what a model that generates has made of a session: the last hidden state, computed from its KV."""

from __future__ import annotations

import asyncio
import time
import uuid
from typing import TYPE_CHECKING, NamedTuple

from fastapi import Request

from scheduler.protocol import Delta, Submit, pack_ids
from scheduler.sampling_params import Stopping
from server.engine.engine import TurnStream
from server.errors import bad_request
from server.http.sse import while_connected
from server.log.timeline import SessionRecord
from server.log.usage_rows import Spent
from server.turns.choices import explain_early_end
from server.turns.context import ServerContext

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


class SessionState(NamedTuple):
    """``vector [H]`` float32, as the model's output head reads it behind the session's last token; how many of its
    ``tokens`` had their KV ``cached``.
    """

    vector: npt.NDArray[np.float32]
    tokens: int
    cached: int


async def session_state(request: Request, context: ServerContext, name: str, record: SessionRecord) -> SessionState:
    """Compute the tokens of a session that have no KV, at least the last one. The log does not change. Raises a 400 for
    a session of another tokenizer, one without tokens and one with media, a 429 beyond the limits of the request's key,
    what the engine raises, and ClientLeft.
    """
    check(context, record)
    state = request.state
    state.rate_limit.admit()
    began = time.monotonic()
    submit = Submit(
        uuid.uuid4().hex,
        state.tenant,
        pack_ids(record.tokens),
        name,
        stopping=Stopping(max_tokens=0),
        speculate=False,
        spare=getattr(state, "spare", False),
        adapter=context.adapter,
        state=True,
    )
    stream = context.engine.submit(submit)
    try:
        last = await while_connected(request.receive, last_of(stream))
    finally:
        stream.cancel()
    if (early := explain_early_end(last, stream)) is not None:
        raise early
    tokens, cached = len(record.tokens), 0 if stream.receipt is None else stream.receipt.cached
    state.rate_limit.charge(tokens - cached)
    spent = Spent(1, tokens - cached, cached, 0, time.monotonic() - began)
    context.log.usage.add(state.tenant, state.key, spent)
    import numpy as np  # 6 MB, for which most servers have no use

    return SessionState(np.frombuffer(last.state, "<f4"), tokens, cached)


def check(context: ServerContext, record: SessionRecord) -> None:
    """Raises a 400 for a session of which this model has no state."""
    if not record.tokens:
        raise bad_request("Nothing was said in this session yet.", code="empty_session")
    if record.fingerprint != context.fingerprint:
        message = "This session's tokens are another model's: name an embedding model, or go on with this one first."
        raise bad_request(message, "model", "session_of_another_model")
    if max(record.tokens) >= context.facts.vocab_size:
        raise bad_request("Sessions with pictures or sounds have no state.", code="unsupported_media")


async def last_of(stream: TurnStream) -> Delta:
    """The delta that ends a turn. Raises TurnRefused or EngineDied."""
    while True:
        await stream.news.wait()
        stream.news.clear()
        delta = stream.take()
        if delta is not None and delta.finish_reason is not None:
            return delta
        await asyncio.sleep(0)
