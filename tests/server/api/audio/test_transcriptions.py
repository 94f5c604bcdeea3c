"""Speech to text over HTTP: openai's client, the five formats, windows, streams, and each bad request's answer."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from fake_engine import FACTS, LISTENING, spoken
from http_context import Site, site, until
from media_kit import changed_at, encoded, png, wav
from msgspec import structs
from speech_kit import recogniser_of, sound_file

from scheduler.speech_messages import SpeechFacts, Transcribe, Transcribed
from server.media.media_limits import MAX_FILE
from server.media.sound_decoder import SoundDecoder
from server.media.sound_reader import SoundReader

pytest.importorskip("soundfile")
PATH = "/v1/audio/transcriptions"
SOUND = sound_file(seconds=0.5)
LONG = sound_file(seconds=4.5)


@asynccontextmanager
async def listening(facts: Any = LISTENING, **parts: Any) -> AsyncIterator[Site]:
    """A site whose model transcribes."""
    async with site(**parts) as at:
        at.engine.facts = facts
        try:
            yield at
        finally:
            await at.app.state.media_reader.close()
            await at.app.state.sounds.close()


def client_of(at: Site) -> openai.AsyncOpenAI:
    http: Any = at.http
    return openai.AsyncOpenAI(base_url="http://warm/v1", api_key="x", http_client=http)


async def post(at: Site, data: bytes = SOUND, path: str = PATH, **fields: Any) -> Any:
    return await at.http.post(path, files={"file": ("a.wav", data)}, data={"model": "demo", **fields})


async def test_openais_client_gets_what_was_said() -> None:
    async with listening() as at:
        recogniser = recogniser_of("whisper")

        def hear(window: Transcribe) -> Transcribed:
            (heard,) = recogniser.hear([window])
            # Random weights are never sure of what they say, and repeat themselves.
            sure = [structs.replace(part, logprob=-0.5, text=f" Part {n}.") for n, part in enumerate(heard.parts)]
            return structs.replace(heard, parts=tuple(sure))

        at.engine.facts = structs.replace(LISTENING, speech=recogniser.facts)
        at.engine.hears = hear
        client = client_of(at)
        told = await client.audio.transcriptions.create(
            model="demo",
            file=("a.flac", sound_file("FLAC", 1.5)),
            language="en",
            prompt="Ann",
            temperature=0.0,
            response_format="verbose_json",
            timestamp_granularities=["segment"],
        )
        assert told.language == "en"
        assert told.duration == 1.5
        assert told.segments
        assert told.text == "".join(segment.text for segment in told.segments).strip()
        window = at.engine.heard[0]
        (want,) = recogniser.hear([structs.replace(window, request="x")])
        assert [tuple(segment.tokens) for segment in told.segments] == [part.tokens for part in want.parts]
        plain = await client.audio.transcriptions.create(model="demo", file=("a.wav", SOUND))
        assert plain.usage is not None
        assert plain.usage.model_dump() == {"type": "duration", "seconds": 1}
        with pytest.warns(DeprecationWarning, match="deprecated"):  # of the client, which has it as deprecated
            english = await client.audio.translations.create(model="demo", file=("a.wav", SOUND))
        assert isinstance(english.text, str)
        assert [one.translate for one in at.engine.heard] == [False, False, True]


async def test_a_long_sound_is_heard_in_windows() -> None:
    """Each window begins where the one before has been used; the language that was found stays."""
    async with listening() as at:

        def hear(window: Transcribe) -> Transcribed:
            heard = spoken(window)
            return structs.replace(heard, used=1.5) if window.more else heard

        at.engine.hears = hear
        answer = (await post(at, LONG, response_format="verbose_json", language="de")).json()
        sizes = [len(window.samples) / 32_000 for window in at.engine.heard]
        assert sizes == [2.0, 2.0, 1.5]
        assert [window.more for window in at.engine.heard] == [True, True, False]
        assert {window.language for window in at.engine.heard} == {"de"}
        assert all(window.timestamps for window in at.engine.heard)
        assert [segment["start"] for segment in answer["segments"]] == [0.0, 1.0, 1.5, 2.5, 3.0, 3.75]
        assert [segment["id"] for segment in answer["segments"]] == [*range(6)]
        assert answer["text"] == "Hello there. Goodbye." + 2 * " Hello there. Goodbye."
        assert answer["usage"] == {"seconds": 5, "type": "duration"}


@pytest.mark.parametrize(
    ("changed", "asked"),
    [
        ({}, [0.0]),
        ({"logprob": -1.5}, [0.0, 0.2, 0.4]),  # a sure answer comes at the third
        ({"logprob": -1.5, "no_speech": 0.9}, [0.0]),
        ({"text": " no" * 40}, [0.0, 0.2, 0.4]),
    ],
)
async def test_a_doubtful_window_is_heard_again_at_higher_temperatures(
    changed: dict[str, Any], asked: list[float]
) -> None:
    async with listening() as at:

        def hear(window: Transcribe) -> Transcribed:
            heard = spoken(window)
            doubted = changed if window.temperature < 0.4 else {}
            return structs.replace(heard, parts=tuple(structs.replace(part, **doubted) for part in heard.parts))

        at.engine.hears = hear
        answer = (await post(at, response_format="verbose_json")).json()
        assert [window.temperature for window in at.engine.heard] == asked
        assert len({window.request for window in at.engine.heard}) == len(asked)
        assert {segment["temperature"] for segment in answer["segments"]} == {asked[-1]}
        del at.engine.heard[:]
        await post(at, temperature="0.7")
        assert [window.temperature for window in at.engine.heard] == [0.7]


async def test_a_stream_has_a_delta_for_each_window() -> None:
    async with listening() as at:
        client = client_of(at)
        stream = await client.audio.transcriptions.create(model="demo", file=("a.wav", LONG), stream=True)
        events: list[Any] = [event async for event in stream]
        assert [event.type for event in events] == [*["transcript.text.delta"] * 3, "transcript.text.done"]
        text = "".join(event.delta for event in events[:-1])
        assert text == events[-1].text == " ".join(["Hello there. Goodbye."] * 3)
        assert at.app.state.sounds._in_hand == 0
        assert at.app.state.models.first.users == 0


async def test_a_server_that_stops_ends_what_it_hears_and_begins_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async with listening() as at:
        models, go = at.app.state.models, asyncio.Event()
        models.first.facts = LISTENING

        async def slowly(window: Transcribe) -> Transcribed:
            await go.wait()
            return spoken(window)

        monkeypatch.setattr(at.engine, "transcribe", slowly)
        asked = asyncio.create_task(post(at))
        await until(lambda: models.in_hand)
        at.engine.draining = True
        assert (await post(at)).status_code == 503
        assert models.in_hand == 1
        go.set()
        assert (await asked).status_code == 200
        assert models.in_hand == 0


async def test_text_and_subtitles() -> None:
    async with listening() as at:
        assert (await post(at, response_format="text")).text == "Hello there. Goodbye.\n"
        srt = "1\n00:00:00,000 --> 00:00:00,250\nHello there.\n\n2\n00:00:00,250 --> 00:00:00,500\nGoodbye.\n\n"
        assert (await post(at, response_format="srt")).text == srt
        vtt = "WEBVTT\n\n00:00:00.000 --> 00:00:00.250\nHello there.\n\n00:00:00.250 --> 00:00:00.500\nGoodbye.\n\n"
        assert (await post(at, response_format="vtt")).text == vtt


@pytest.mark.parametrize("format", ["WAV", "FLAC", "OGG", "MP3"])
async def test_sounds_of_all_formats_come_as_mono_at_the_models_rate(format: str) -> None:
    """A tone keeps its pitch and its loudness, whatever the file's rate and channels."""
    soundfile = pytest.importorskip("soundfile")
    import io

    target = io.BytesIO()
    tone = 0.5 * np.sin(2 * np.pi * 440 * np.arange(44_100) / 44_100)
    soundfile.write(target, np.stack([tone, tone], 1), 44_100, format=format)
    async with listening() as at:
        assert (await post(at, target.getvalue())).status_code == 200
        samples = np.frombuffer(b"".join(one.samples for one in at.engine.heard), "<i2") / 32767
        assert abs(len(samples) - 16_000) < 1200  # MP3 pads
        spectrum = np.abs(np.fft.rfft(samples[2000:12_000]))
        assert abs(int(spectrum.argmax()) * 1.6 - 440) < 2
        assert 0.45 < samples.max() < 0.56


def nan_sound() -> bytes:
    floats = sound_file("WAV", 0.1, subtype="FLOAT")
    return floats[:-4] + struct.pack("<f", float("nan"))


def claims(seconds: int, data: bytes = SOUND) -> bytes:
    """A WAV file whose header says that it is so long."""
    at = data.index(b"data") + 4
    return changed_at(data, at, struct.pack("<I", min(2**32 - 2**17, seconds * 32_000)))


BAD: dict[str, tuple[Callable[[], bytes], str]] = {
    "a picture": (png, "is not WAV"),
    "text": (lambda: b"hello", "is not WAV"),
    "an m4a file": (lambda: b"\0\0\0\x20ftypM4A " + bytes(64), "is not WAV"),
    "webm": (lambda: b"\x1aE\xdf\xa3" + bytes(64), "is not WAV"),
    "nothing": (bytes, "is empty"),
    "a head alone": (lambda: SOUND[:12], "damaged"),
    "wav cut short": (lambda: SOUND[:4000], "cut short"),
    "ten hours that are not there": (lambda: claims(36_000), "cut short"),
    "no samples": (lambda: wav(0), "no samples"),
    "a rate of 0": (lambda: changed_at(wav(), 24, bytes(4)), "damaged|not supported"),
    "a rate of 4 GHz": (lambda: changed_at(wav(), 24, b"\xff\xff\xff\xff"), "damaged|not supported"),
    "no channels": (lambda: changed_at(wav(), 22, bytes(2)), "damaged|not supported"),
    "65535 channels": (lambda: changed_at(wav(), 22, b"\xff\xff"), "damaged|not supported"),
    "not a number": (nan_sound, "not numbers"),
    "flac cut short": (lambda: sound_file("FLAC")[:3000], "damaged"),
    "flac that says 2^36 samples": (lambda: changed_at(sound_file("FLAC"), 21, b"\xff" * 5), "longer|damaged|cut"),
    "mp3 that ends early": (lambda: sound_file("MP3", 3)[:4000], "cut short|damaged"),
    "mp3 of noise": (lambda: b"ID3\x04" + bytes(range(256)) * 40, "damaged"),
    "ogg of nothing": (lambda: b"OggS" + bytes(200), "cut short"),
    "ogg cut between its pages": (lambda: sound_file("OGG", 3).rpartition(b"OggS")[0], "Ogg file that is cut short"),
    "ogg cut within a page": (lambda: sound_file("OGG", 3)[:-100], "Ogg file that is cut short"),
    "longer than the limit": (lambda: wav(70, 4000), "longer than 60 seconds"),
}


async def test_bad_sounds_have_an_answer_and_leave_memory_as_it_was() -> None:
    async with listening() as at:
        at.app.state.sounds = SoundReader(SoundDecoder(60))
        for name, (make, problem) in BAD.items():
            answer = await post(at, make())
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, "file"), name
            assert any(part in error["message"] for part in problem.split("|")), (name, error["message"])
        assert at.engine.heard == []
        assert (await post(at)).status_code == 200
        process = at.app.state.sounds._decoder._process._process
        peak = int(Path(f"/proc/{process.pid}/status").read_text().partition("VmHWM:")[2].split()[0])
        assert peak < 400 * 1024  # of which the libraries are most
        assert at.app.state.sounds._in_hand == 0


FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"language": "klingon"}, "language"),
    ({"temperature": "2"}, "temperature"),
    ({"temperature": "warm"}, "temperature"),
    ({"response_format": "xml"}, "response_format"),
    ({"timestamp_granularities[]": "word", "response_format": "verbose_json"}, "timestamp_granularities"),
    ({"timestamp_granularities[]": "segment"}, "timestamp_granularities"),
    ({"stream": "true", "response_format": "srt"}, "stream"),
    ({"include[]": "logprobs"}, "include"),
    ({"prompt": "x" * 9000}, "prompt"),
    ({"extra": "1"}, "extra"),
]


async def test_bad_fields_are_named() -> None:
    async with listening() as at:
        for fields, param in FIELDS:
            answer = await post(at, **fields)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), fields
        assert (await at.http.post(PATH, json={})).status_code == 415
        assert (await at.http.post(PATH, files={"model": (None, "demo")})).json()["error"]["param"] == "file"
        assert (await post(at, path="/v1/audio/translations", language="en")).json()["error"]["param"] == "language"
        assert (await post(at, bytes(MAX_FILE + 1))).status_code == 413
        assert at.engine.heard == []


async def test_a_model_takes_speech_or_text() -> None:
    async with listening(facts=FACTS) as at:
        for path in (PATH, "/v1/audio/translations"):
            answer = await post(at, path=path)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "model")
    async with listening() as at:
        for answer in (await at.chat(), await at.complete()):
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "model")
        sound = {"type": "input_audio", "input_audio": {"data": encoded(SOUND), "format": "wav"}}
        assert (await at.chat(messages=[{"role": "user", "content": [sound]}])).status_code == 400
        at.engine.full_for.add("default")
        assert (await post(at)).status_code == 429
        at.engine.full_for.clear()
        at.engine.hears = lambda window: Transcribed(window.request, error="The model failed at this sound.")
        assert (await post(at)).status_code == 500
    plain = structs.replace(LISTENING, speech=SpeechFacts(16_000, 2.0, timestamps=True))
    async with listening(facts=plain) as at:
        assert (await post(at, path="/v1/audio/translations")).json()["error"]["param"] == "model"
        assert (await post(at, language="en")).json()["error"]["param"] == "language"
