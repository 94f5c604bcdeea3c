"""``Listening``: a sound is heard, one window after the other."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from msgspec import structs

from scheduler.speech_messages import SpeechFacts, SpokenPart, Transcribe, Transcribed
from server.api.audio.objects import compression
from server.api.audio.schemas import TranscriptionForm, TranslationForm
from server.engine.engine import Engine
from server.errors import ApiError
from server.media.sound_decoder import DecodedSound

SHORTEST = 0.1  # seconds behind the last window that are worth another one
WIDTH = 2  # bytes of a sample
HIGHER = (0.2, 0.4, 0.6, 0.8, 1.0)  # temperatures; these and the thresholds are whisper's
LEAST_LOGPROB, MOST_COMPRESSED, SILENCE = -1.0, 2.4, 0.6


def is_doubtful(parts: Sequence[SpokenPart]) -> bool:
    """Whether what was heard in a window repeats itself or is unlikely, and not because nobody speaks in it."""
    if not parts:
        return False
    text = "".join(part.text for part in parts).encode()
    unlikely = parts[0].logprob < LEAST_LOGPROB
    if unlikely and parts[0].no_speech > SILENCE:
        return False
    return unlikely or compression(text) > MOST_COMPRESSED


@dataclass
class Listening:
    """What a request asks of a sound. ``language``: named, or found in the first window that has one."""

    engine: Engine
    speech: SpeechFacts
    form: TranslationForm
    sound: DecodedSound
    language: str = ""

    def __post_init__(self) -> None:
        if isinstance(self.form, TranscriptionForm):
            self.language = self.form.language

    async def windows(self) -> AsyncIterator[list[SpokenPart]]:
        """The parts of each window, with times from the begin of the sound. Raises what the engine does, and a 500
        where the model fails.
        """
        rate, samples = self.speech.rate, self.sound.samples
        size, total, at = int(self.speech.window * rate), len(samples) // WIDTH, 0
        translate = not isinstance(self.form, TranscriptionForm)
        while at == 0 or total - at >= SHORTEST * rate:
            more = at + size < total
            window = Transcribe(
                "",
                samples[at * WIDTH : (at + size) * WIDTH],
                more,
                self.language if self.language in self.speech.languages else "",
                translate,
                self.form.prompt,
                self.form.temperature,
                self.speech.timestamps and (more or at > 0 or self.form.wants_times),
            )
            heard, temperature = await self._hear(window)
            self.language = self.language or heard.language
            offset = at / rate
            yield [
                structs.replace(part, start=part.start + offset, end=part.end + offset, temperature=temperature)
                for part in heard.parts
            ]
            if not more:
                return
            at += max(1, round(heard.used * rate))

    async def _hear(self, window: Transcribe) -> tuple[Transcribed, float]:
        """The answer for a window, and the temperature at which it was given: where that is 0, a doubtful answer is
        asked for again at higher ones, as in whisper's own method.
        """
        tried = HIGHER if self.speech.timestamps and not window.temperature else ()
        for temperature in (window.temperature, *tried):
            heard = await self.engine.transcribe(
                structs.replace(window, request=uuid.uuid4().hex, temperature=temperature)
            )
            if heard.error:
                raise ApiError(500, heard.error, code="transcription_failed")
            if not is_doubtful(heard.parts):
                break
        return heard, temperature

    def join(self, texts: list[str]) -> str:
        """The text of windows or parts. What a model that tells times writes begins with its own space."""
        return "".join(texts).strip() if self.speech.timestamps else " ".join(text.strip() for text in texts).strip()
