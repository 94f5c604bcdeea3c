"""``Listening``: a sound is heard, one window after the other."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass

from msgspec import structs

from scheduler.speech_messages import SpeechFacts, SpokenPart, Transcribe
from server.api.audio.schemas import TranscriptionForm, TranslationForm
from server.engine.engine import Engine
from server.errors import ApiError
from server.media.sound_decoder import DecodedSound

SHORTEST = 0.1  # seconds behind the last window that are worth another one
WIDTH = 2  # bytes of a sample


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
                uuid.uuid4().hex,
                samples[at * WIDTH : (at + size) * WIDTH],
                more,
                self.language if self.language in self.speech.languages else "",
                translate,
                self.form.prompt,
                self.form.temperature,
                self.speech.timestamps and (more or at > 0 or self.form.wants_times),
            )
            heard = await self.engine.transcribe(window)
            if heard.error:
                raise ApiError(500, heard.error, code="transcription_failed")
            self.language = self.language or heard.language
            offset = at / rate
            yield [structs.replace(part, start=part.start + offset, end=part.end + offset) for part in heard.parts]
            if not more:
                return
            at += max(1, round(heard.used * rate))

    def join(self, texts: list[str]) -> str:
        """The text of windows or parts. What a model that tells times writes begins with its own space."""
        return "".join(texts).strip() if self.speech.timestamps else " ".join(text.strip() for text in texts).strip()
