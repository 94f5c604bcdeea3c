"""The forms of requests that turn speech into text, besides the file."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from scheduler.speech_messages import SpeechFacts
from server.errors import bad_request
from server.schemas.query import Query
from server.schemas.strict import Harmless

Format = Literal["json", "text", "srt", "verbose_json", "vtt"]
MOST_PROMPT = 8192  # characters
LISTS = ("timestamp_granularities", "include")  # fields that a form may have several times, with [] behind their name


class TranslationForm(Query):
    """The fields of ``POST /v1/audio/translations``."""

    model: str = ""
    prompt: Annotated[str, Field(max_length=MOST_PROMPT)] = ""
    response_format: Format = "json"
    temperature: Annotated[float, Field(ge=0, le=1)] = 0.0

    @property
    def wants_times(self) -> bool:
        """Whether the answer says when something is said."""
        return self.response_format not in ("json", "text")

    def check(self, speech: SpeechFacts) -> None:
        """Raises a 400 for what the model does not take."""
        if self.prompt and not speech.prompts:
            raise bad_request("prompt is not taken by this model.", "prompt", "unsupported_value")
        if self.response_format in ("srt", "vtt") and not speech.timestamps:
            message = "response_format: this model does not say when something is said."
            raise bad_request(message, "response_format", "unsupported_value")


class TranscriptionForm(TranslationForm):
    """The fields of ``POST /v1/audio/transcriptions``."""

    LATER: ClassVar[Harmless] = {"include": ([],), "known_speaker_names": (), "known_speaker_references": ()}
    IDLE: ClassVar[frozenset[str]] = frozenset({"chunking_strategy"})
    language: Annotated[str, Field(max_length=32)] = ""
    stream: bool = False
    chunking_strategy: Literal["auto"] = "auto"
    timestamp_granularities: list[Literal["segment"]] = Field(default_factory=list)

    @model_validator(mode="before")
    @classmethod
    def only_segments(cls, data: Any) -> Any:
        """Times of words are not told."""
        if isinstance(data, dict) and "word" in (data.get("timestamp_granularities") or ()):
            raise PydanticCustomError("unsupported", "is not supported for words", {"field": "timestamp_granularities"})
        return data

    def check(self, speech: SpeechFacts) -> None:
        """Raises a 400 for what this model cannot do, or the fields do not allow together."""
        super().check(speech)
        if self.language and self.language not in speech.languages:
            known = ", ".join(speech.languages) or "none: it is not told the language"
            raise bad_request(f"language is none that this model takes ({known}).", "language", "unsupported_value")
        if self.timestamp_granularities and self.response_format != "verbose_json":
            message = "timestamp_granularities need response_format: verbose_json."
            raise bad_request(message, "timestamp_granularities", "invalid_value")
        if self.stream and self.wants_times:
            raise bad_request("stream needs response_format json or text.", "stream", "invalid_value")
