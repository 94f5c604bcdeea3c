"""The engine process's loop: what it says, and in which order."""

from __future__ import annotations

from typing import Any, cast

from engine_kit import Kit

from scheduler.process import Channel, ServingLoop
from scheduler.protocol import FinishReason, Refused, Shutdown, StepOutputs, Submit, pack_ids
from scheduler.sampling_params import Stopping


class Script:
    """A channel on which these messages come, each list at once; ``sent`` is what was said."""

    def __init__(self, *batches: list[Any]) -> None:
        self._batches = [*batches]
        self.sent: list[Any] = []

    def send(self, message: Any) -> None:
        self.sent.append(message)

    def receive(self, wait_ms: int) -> list[Any]:
        return self._batches.pop(0)


def waiting(turn: str, tenant: str) -> Submit:
    return Submit(turn, tenant, pack_ids([65, 66]), stopping=Stopping(max_tokens=5))


def test_a_refusal_is_told_before_the_end() -> None:
    """Two turns of one tenant fill the queue: the second leaves it for another tenant's, as the server goes."""
    kit = Kit(max_queued=2)
    turns = [waiting("t1", "a"), waiting("t2", "a"), waiting("t3", "b")]
    channel = Script([*turns, Shutdown(0.0)])
    ServingLoop(kit.engine, kit.commands, cast(Channel, channel)).run()
    *_, refused, outputs = channel.sent
    assert isinstance(refused, Refused)
    assert (refused.turn, refused.code) == ("t2", "queue_full")
    assert isinstance(outputs, StepOutputs)
    ended = {delta.turn: delta.finish_reason for delta in outputs.deltas}
    assert ended == dict.fromkeys(("t1", "t3"), FinishReason.CANCELLED)
