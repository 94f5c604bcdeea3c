"""Requests for embeddings between the server and its engine: answered, refused, given up."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest
from http_context import until

from scheduler.pooling_messages import Pool, Pooled, PoolInput
from server.engine.engine import TurnRefused
from server.engine.pooling_calls import PoolingCalls


async def test_the_answer_is_handed_on_and_a_refusal_raised() -> None:
    calls = PoolingCalls(lambda name: None)
    sent: list[Pool] = []

    async def send(question: Pool) -> Pooled:
        sent.append(question)
        assert len(calls) == 1
        return Pooled(question.request, b"1234", *([] if question.spare else ["queue_full", "Later."]))

    assert (await calls.ask("ann", [PoolInput(b"abcd")], True, send)).vectors == b"1234"
    with pytest.raises(TurnRefused) as refused:
        await calls.ask("ann", [PoolInput(b"abcd")], False, send)
    assert (refused.value.code, refused.value.retry_after, len(calls)) == ("queue_full", 1, 0)
    assert (sent[0].tenant, sent[0].inputs) == ("ann", (PoolInput(b"abcd"),))
    assert sent[0].request != sent[1].request


async def test_one_that_is_given_up_leaves_the_engines_queue() -> None:
    cancelled: list[str] = []
    sent: list[str] = []
    calls = PoolingCalls(cancelled.append)

    async def send(question: Pool) -> Pooled:
        sent.append(question.request)
        await asyncio.Event().wait()
        raise AssertionError

    task = asyncio.create_task(calls.ask("ann", [PoolInput(b"abcd")], False, send))
    await until(lambda: sent)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    assert (cancelled, len(calls)) == (sent, 0)
