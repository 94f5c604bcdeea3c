"""The routes of ``/v1/audio``: transcriptions, and translations into English."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from typing import Any, Literal

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import PlainTextResponse, Response

from scheduler.speech_messages import SpokenPart
from server.api.audio.form import F, receive_sound
from server.api.audio.listening import Listening
from server.api.audio.objects import (
    Duration,
    SpokenSegment,
    TranscriptDelta,
    TranscriptDone,
    Transcription,
    VerboseTranscription,
    srt,
    vtt,
)
from server.api.audio.schemas import TranscriptionForm, TranslationForm
from server.errors import bad_request, unavailable
from server.http.body import log_ignored
from server.http.json_response import json_response
from server.http.multipart import FORM
from server.http.sse import EventStream, frame_event, while_connected
from server.media.sound_reader import SoundReader
from server.models.registry import registry_of
from server.turns.context import STOPPING_RETRY, context_of

router = APIRouter()
encode = msgspec.json.Encoder().encode


def form_schema(schema: type[TranslationForm]) -> dict[str, Any]:
    """The form for OpenAPI: the fields of ``schema`` and the file."""
    made = schema.model_json_schema()
    properties = {"file": {"type": "string", "format": "binary"}, **made["properties"]}
    return {
        "requestBody": {
            "required": True,
            "content": {FORM: {"schema": {"type": "object", "required": ["file"], "properties": properties}}},
        }
    }


@router.post("/v1/audio/transcriptions", openapi_extra=form_schema(TranscriptionForm), response_class=Response)
async def create_transcription(request: Request) -> Response:
    """Write down what is said in a sound: a form with `file`, at most 25 MiB and two hours of WAV, FLAC, Ogg or MP3. A
    long one is heard in windows. `stream` sends the text of each window as soon as it is there.
    """
    return await answer(request, TranscriptionForm)


@router.post("/v1/audio/translations", openapi_extra=form_schema(TranslationForm), response_class=Response)
async def create_translation(request: Request) -> Response:
    """The same in English, whatever is spoken, by models that translate."""
    return await answer(request, TranslationForm)


async def answer(request: Request, schema: type[F]) -> Response:
    """Read the form, hear its sound, write it down. Raises a 4xx for a form or a sound that cannot be used."""
    form, data = await receive_sound(request, schema)
    async with AsyncExitStack() as held:
        await held.enter_async_context(
            registry_of(request).using(request, form.model, request.receive, ("transcribe",))
        )
        context = context_of(request)
        context.check_model(form.model)
        speech = context.facts.speech
        assert speech is not None, "a model that transcribes"
        if not (speech.translates or isinstance(form, TranscriptionForm)):
            raise bad_request("This model does not translate speech.", "model", "unsupported_model")
        form.check(speech)
        if context.engine.state() == "stopping":
            raise unavailable("The server is shutting down.", STOPPING_RETRY)
        if (refusal := context.engine.turns_away(request.state.tenant)) is not None:
            raise refusal
        sounds: SoundReader = request.app.state.sounds
        reading = held.enter_async_context(sounds.read(data, speech.rate, "file"))
        sound = await while_connected(request.receive, reading)
        del data
        listening = Listening(context.engine, speech, form, sound)
        if isinstance(form, TranscriptionForm) and form.stream:
            kept = held.pop_all()
            return EventStream(events(listening, kept), lambda: None, done=b"")
        parts = await while_connected(request.receive, all_parts(listening))
        log_ignored()
        return make_response(listening, parts)


async def all_parts(listening: Listening) -> list[SpokenPart]:
    return [part async for parts in listening.windows() for part in parts]


async def events(listening: Listening, held: AsyncExitStack) -> AsyncGenerator[bytes]:
    """A delta for each window, then the whole text; ``held`` is closed behind them."""
    async with held:
        text = ""
        async for parts in listening.windows():
            longer = listening.join([text, *[part.text for part in parts]])
            if delta := longer[len(text) :]:
                yield frame_event(encode(TranscriptDelta(delta)))
            text = longer
        yield frame_event(encode(TranscriptDone(text, Duration.of(listening.sound.seconds))))


def make_response(listening: Listening, parts: list[SpokenPart]) -> Response:
    """The answer in the format that was asked for."""
    form, seconds = listening.form, listening.sound.seconds
    text = listening.join([part.text for part in parts])
    match form.response_format:
        case "json":
            return json_response(Transcription(text, Duration.of(seconds)))
        case "text":
            return PlainTextResponse(f"{text}\n")
        case "srt":
            return PlainTextResponse(srt(parts))
        case "vtt":
            return PlainTextResponse(vtt(parts))
    segments = [SpokenSegment.of(number, part) for number, part in enumerate(parts)]
    task: Literal["transcribe", "translate"] = "transcribe" if isinstance(form, TranscriptionForm) else "translate"
    told = round(seconds, 3), text, segments, Duration.of(seconds)
    return json_response(VerboseTranscription(task, listening.language, *told))
