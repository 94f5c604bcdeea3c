"""The loop of an engine that embeds: order, budgets, cancellation, failures, and what it answers about sessions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from scheduler.pooling.pooler import Pooler, VectorHead
from scheduler.pooling.pooling_loop import MAX_FAILURES, PoolingLoop
from scheduler.pooling.pooling_queue import PoolingQueue
from scheduler.pooling_messages import Pool, Pooled, PoolInput
from scheduler.protocol import (
    Cancel,
    Expand,
    Expanded,
    Export,
    Exported,
    Forget,
    Forgotten,
    FromEngine,
    Import,
    Imported,
    Inspect,
    Inspected,
    MediaItem,
    Refused,
    Shutdown,
    StepOutputs,
    Submit,
    ToEngine,
    pack_ids,
    unpack_ids,
)


class ScriptedChannel:
    """Gives the messages of one ``receive`` after the other, then shuts down; ``sent`` is what the loop has said."""

    def __init__(self, *batches: list[ToEngine]) -> None:
        self._batches = [*batches]
        self.sent: list[FromEngine] = []

    def send(self, message: FromEngine) -> None:
        self.sent.append(message)

    def receive(self, wait_ms: int) -> list[ToEngine]:
        if self._batches:
            return self._batches.pop(0)
        return [] if wait_ms == 0 else [Shutdown()]

    @property
    def answers(self) -> dict[str, Pooled]:
        return {message.request: message for message in self.sent if isinstance(message, Pooled)}


class CountingPooler(Pooler):
    """Its vectors are the sum and the number of an input's ids; ``steps`` are the ids of each forward. An input with
    the id 13 fails.
    """

    def __init__(self) -> None:
        super().__init__(None, VectorHead(None), 0, False)
        self.pads = True
        self.steps: list[list[list[int]]] = []

    def run(self, inputs: Sequence[PoolInput]) -> torch.Tensor:
        rows = [[*unpack_ids(one.ids)] for one in inputs]
        self.steps.append(rows)
        if any(13 in row for row in rows):
            raise RuntimeError("out of memory")
        return torch.tensor([[float(sum(row)), float(len(row))] for row in rows])


def pool(name: str, *rows: list[int], tenant: str = "a") -> Pool:
    return Pool(name, tenant, tuple(PoolInput(pack_ids(row)) for row in rows))


def serve(
    *batches: list[ToEngine], budget: int = 100, queued: int = 9
) -> tuple[CountingPooler, ScriptedChannel, PoolingLoop]:
    pooler, channel = CountingPooler(), ScriptedChannel(*batches)
    loop = PoolingLoop(pooler, channel, queued, budget)
    loop.run()
    return pooler, channel, loop


def vectors(answer: Pooled) -> list[list[float]]:
    found: list[list[float]] = np.frombuffer(answer.vectors, "<f4").reshape(-1, 2).tolist()
    return found


def test_several_requests_share_a_forward_and_get_their_own_rows_in_order() -> None:
    pooler, channel, loop = serve([pool("x", [1] * 4, [2] * 5), pool("y", [3] * 5)])
    assert len(pooler.steps) == 1
    assert {name: vectors(answer) for name, answer in channel.answers.items()} == {
        "x": [[4.0, 4.0], [10.0, 5.0]],
        "y": [[15.0, 5.0]],
    }
    assert (loop.stats().pooled, loop.stats().prompt_tokens, loop.stats().steps, loop.stats().waiting) == (3, 14, 1, 0)


def test_a_step_keeps_to_its_budget_but_a_longer_input_runs_alone() -> None:
    pooler, channel, _ = serve([pool("x", [1] * 6, [2] * 6, [3] * 30)], budget=12)
    assert [sum(map(len, step)) for step in pooler.steps] == [12, 30]
    assert vectors(channel.answers["x"])[2] == [90.0, 30.0]


def test_inputs_of_other_lengths_run_apart_where_little_would_be_left() -> None:
    pooler = CountingPooler()
    assert pooler.groups([10, 1, 9, 1, 10]) == [[0, 4, 2], [1, 3]]
    pooler.pads = False
    assert pooler.groups([10, 1, 9, 1, 10]) == [[0, 4], [2], [1, 3]]


def test_a_tenant_with_many_inputs_does_not_hold_up_another() -> None:
    big = pool("big", *([1] * 10 for _ in range(50)))
    pooler, channel, _ = serve([big], [pool("small", [2] * 10, tenant="b")], budget=10)
    order = [message.request for message in channel.sent if isinstance(message, Pooled)]
    assert order == ["small", "big"]
    assert [2] * 10 in pooler.steps[1] + pooler.steps[2]


def test_a_tenant_gains_nothing_by_having_been_idle() -> None:
    queue = PoolingQueue(9)
    queue.add(pool("first", *([1] * 10 for _ in range(8))))
    queue.take(40)
    queue.add(pool("late", *([2] * 10 for _ in range(8)), tenant="b"))
    assert [request.message.request for request, _ in queue.take(40)].count("late") == 2


def test_what_nobody_waits_for_goes_last() -> None:
    spare = [Pool(name, "a", pool(name, *([1] * 10 for _ in range(3))).inputs, spare=True) for name in ("s", "t")]
    _, channel, _ = serve([*spare], [pool("now", *([2] * 10 for _ in range(9)), tenant="b")], budget=10)
    order = [message.request for message in channel.sent if isinstance(message, Pooled)]
    assert order == ["now", "s", "t"]


def test_a_cancelled_request_leaves_the_queue() -> None:
    pooler, channel, loop = serve([pool("x", *([1] * 10 for _ in range(9)))], [Cancel("x"), Cancel("other")], budget=10)
    assert len(pooler.steps) == 1
    assert channel.answers == {}
    assert loop.stats().waiting == 0


def test_a_full_queue_refuses() -> None:
    _, channel, _ = serve([pool("x", [1]), pool("y", [1])], queued=1)
    assert {name: answer.code for name, answer in channel.answers.items()} == {"x": "", "y": "queue_full"}


def test_a_request_that_fails_takes_no_other_with_it() -> None:
    _, channel, _ = serve([pool("good", [1, 1]), pool("bad", [13, 1]), pool("too", [2, 2])])
    assert {name: answer.code for name, answer in channel.answers.items()} == {
        "good": "",
        "bad": "engine_error",
        "too": "",
    }
    assert "memory" not in channel.answers["bad"].error


def test_an_engine_whose_steps_all_fail_ends() -> None:
    with pytest.raises(RuntimeError):
        serve([pool(str(n), [13]) for n in range(MAX_FAILURES)])


def test_what_is_asked_about_sessions_is_answered() -> None:
    asked: list[Any] = [
        Forget("a", "s", 7),
        Inspect("i", "a", "s"),
        Export("e", "a", "s", "/f"),
        Import("m", "a", "s", "/f"),
        Expand("p", "a", (MediaItem("d"),)),
        Submit("t", "a", pack_ids([1])),
    ]
    _, channel, _ = serve(asked)
    kinds = [type(message) for message in channel.sent if not isinstance(message, StepOutputs)]
    assert kinds == [Forgotten, Inspected, Exported, Imported, Expanded, Refused]
