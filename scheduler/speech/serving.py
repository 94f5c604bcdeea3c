"""The engine process of a model that turns speech into text: it hears windows and does nothing else."""

from __future__ import annotations

import time

from scheduler.protocol import Shutdown, StepOutputs
from scheduler.sessionless import HEARTBEAT, MessageChannel, answer_without_sessions
from scheduler.speech.speech_core import SpeechCore
from scheduler.speech_messages import Transcribe

_BUSY_MS = 5
NO_TEXT = "This model turns speech into text, and answers no text."


def serve(core: SpeechCore, channel: MessageChannel) -> None:
    """Serve until the server ends it."""
    sent_at = 0.0
    while True:
        for answer in core.take():
            channel.send(answer)
        if time.monotonic() - sent_at >= 0.9 * HEARTBEAT:
            channel.send(StepOutputs((), core.stats))
            sent_at = time.monotonic()
        for message in channel.receive(_BUSY_MS if core.busy else int(1000 * HEARTBEAT)):
            if isinstance(message, Shutdown):
                channel.send(StepOutputs((), core.stats))
                return
            if isinstance(message, Transcribe):
                core.ask(message)
            elif (answered := answer_without_sessions(message, NO_TEXT)) is not None:
                channel.send(answered)
