"""Bad media in requests: each has its answer, which names the part and repeats nothing; memory stays flat."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import resource
import struct
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_engine import SEEING
from http_context import Site, site
from media_kit import asks, changed_at, chunk, data_url, digest, encoded, png, saved, seeing_tokens, shown, wav
from msgspec import structs

from cache.media_frames import FRAMES, join_frames
from scheduler.model_facts import MediaMarks
from server.media.fetching import Fetcher
from server.media.media_limits import MAX_BYTES, MAX_MEDIA, MAX_PIXELS, MAX_SIDE

pytest.importorskip("PIL")
HOST = "pictures.example"
PUBLIC = "93.184.216.34"
PNG = png()
SVG = b'<svg xmlns="http://www.w3.org/2000/svg"><script>fetch("http://127.0.0.1")</script></svg>'


def headed(width: int, height: int, data: bytes = b"") -> bytes:
    """A PNG that says it has so many pixels."""
    head = struct.pack(">LLBBBBB", width, height, 8, 6, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", data or zlib.compress(b"")) + chunk(b"IEND", b"")
    )


@cache
def bomb(side: int = 7000) -> bytes:
    """A small file of many pixels: RGBA of one colour, within the limit; it has to be decoded, and is no harm."""
    return headed(side, side, zlib.compress(bytes((side * 4 + 1) * side), 9))


@cache
def text_bomb() -> bytes:
    """A PNG whose compressed text unpacks to 200 MB."""
    body = b"Comment\0\0" + zlib.compress(bytes(200 * 2**20), 9)
    return PNG[:33] + chunk(b"zTXt", body) + PNG[33:]


def animated(format: str, **options: Any) -> bytes:
    image = pytest.importorskip("PIL.Image")
    frames = [image.new("RGB", (8, 8), colour) for colour in ("red", "green", "blue")]
    target = io.BytesIO()
    frames[0].save(target, format, save_all=True, append_images=frames[1:], **options)
    return target.getvalue()


def gif(width: int, height: int) -> bytes:
    return b"GIF89a" + struct.pack("<HH", width, height) + b"\x00\x00\x00\x2c" + bytes(9) + b"\x02\x00\x3b"


def part(url: str) -> dict[str, Any]:
    return shown(url)


def sound(data: bytes, **more: Any) -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": encoded(data), "format": "wav", **more}}


def film(url: str) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": url}}


URL = "image_url.url"
PARTS: dict[str, tuple[Callable[[], Any], str]] = {  # the part, and the field that is named
    "svg": (lambda: part(data_url(SVG, "image/svg+xml")), URL),
    "svg that says png": (lambda: part(data_url(SVG)), URL),
    "html": (lambda: part(data_url(b"<html><img src=x>")), URL),
    "pdf": (lambda: part(data_url(b"%PDF-1.7\n")), URL),
    "bmp": (lambda: part(data_url(saved("BMP"))), URL),
    "tiff": (lambda: part(data_url(saved("TIFF"))), URL),
    "ico": (lambda: part(data_url(saved("ICO", 16, 16))), URL),
    "postscript": (lambda: part(data_url(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n")), URL),
    "text": (lambda: part(data_url(b"hello")), URL),
    "nothing": (lambda: part("data:image/png;base64,"), URL),
    "no base64": (lambda: part("data:image/png;base64,%%%%"), URL),
    "broken base64": (lambda: part(data_url(PNG)[:-3]), URL),
    "percent encoded": (lambda: part("data:image/png,%89PNG"), URL),
    "head of a png alone": (lambda: part(data_url(PNG[:8])), URL),
    "png cut short": (lambda: part(data_url(png(300, 300)[:-30])), URL),
    "png with a wrong checksum": (lambda: part(data_url(changed_at(PNG, 29, b"xxxx"))), URL),
    "jpeg cut short": (lambda: part(data_url(saved("JPEG", 400, 400)[:600])), URL),
    "webp cut short": (lambda: part(data_url(saved("WEBP", 64, 64)[:40])), URL),
    "gif cut short": (lambda: part(data_url(gif(8, 8)[:12])), URL),
    "png of too many pixels": (lambda: part(data_url(headed(MAX_SIDE, MAX_SIDE))), URL),
    "png of 2^31 pixels a side": (lambda: part(data_url(headed(2**31 - 1, 2**31 - 1))), URL),
    "png of no pixels": (lambda: part(data_url(headed(0, 5))), URL),
    "a long thin png": (lambda: part(data_url(headed(MAX_SIDE + 1, 1))), URL),
    "png that lacks its pixels": (lambda: part(data_url(headed(5000, 5000))), URL),
    "gif of too many pixels": (lambda: part(data_url(gif(65535, 65535))), URL),
    "compressed text of 200 MB": (lambda: part(data_url(text_bomb())), URL),
    "animated gif": (lambda: part(data_url(animated("GIF"))), URL),
    "animated png": (lambda: part(data_url(animated("PNG", default_image=False))), URL),
    "animated webp": (lambda: part(data_url(animated("WEBP"))), URL),
    "too many bytes": (lambda: part(data_url(PNG + bytes(MAX_BYTES))), URL),
    "file url": (lambda: part("file:///etc/passwd"), URL),
    "path": (lambda: part("/etc/passwd"), URL),
    "ftp": (lambda: part(f"ftp://{HOST}/a.png"), URL),
    "gopher": (lambda: part(f"gopher://{HOST}/_"), URL),
    "javascript": (lambda: part("javascript:alert(1)"), URL),
    "another host": (lambda: part("http://evil.example/a.png"), URL),
    "host as a prefix": (lambda: part(f"http://{HOST}.evil.example/a.png"), URL),
    "host as a suffix": (lambda: part(f"http://evil-{HOST}/a.png"), URL),
    "host as a user": (lambda: part(f"http://{HOST}@evil.example/a.png"), URL),
    "host with a user": (lambda: part(f"http://me@{HOST}/a.png"), URL),
    "host behind a backslash": (lambda: part(f"http://evil.example\\@{HOST}/a.png"), URL),
    "loopback": (lambda: part("http://127.0.0.1/a.png"), URL),
    "loopback as a number": (lambda: part("http://2130706433/a.png"), URL),
    "loopback in v6": (lambda: part("http://[::1]/a.png"), URL),
    "metadata service": (lambda: part("http://169.254.169.254/latest/meta-data/"), URL),
    "another port": (lambda: part(f"http://{HOST}:22/a.png"), URL),
    "line break": (lambda: part(f"http://{HOST}/a\r\nHost: x"), URL),
    "a very long url": (lambda: part(f"http://{HOST}/{'a' * 5000}"), URL),
    "a digest that nobody has": (lambda: part(f"/v1/media/{'0' * 64}"), URL),
    "a digest with a path": (lambda: part(f"/v1/media/{'../' * 20}abcd"), URL),
    "url that is a number": (lambda: {"type": "image_url", "image_url": {"url": 7}}, URL),
    "url that is missing": (lambda: {"type": "image_url", "image_url": {}}, URL),
    "picture that is a string": (lambda: {"type": "image_url", "image_url": "x"}, "image_url"),
    "unknown detail": (lambda: shown(data_url(PNG), detail="huge"), "image_url.detail"),
    "unknown field": (lambda: {**shown(data_url(PNG)), "extra": 1}, "extra"),
    "sound that is a picture": (lambda: sound(PNG), "input_audio.data"),
    "picture that is a sound": (lambda: part(data_url(wav())), URL),
    "mp3": (lambda: sound(b"ID3\x04" + bytes(64), format="mp3"), "input_audio.data"),
    "wav without samples": (lambda: sound(wav(0)), "input_audio.data"),
    "wav cut short": (lambda: sound(wav(1)[:60]), "input_audio.data"),
    "wav of floats": (lambda: sound(changed_at(wav(), 20, b"\x03\x00")), "input_audio.data"),
    "wav with a rate of 0": (lambda: sound(changed_at(wav(), 24, bytes(4))), "input_audio.data"),
    "wav of eleven minutes": (lambda: sound(wav(660, 4000)), "input_audio.data"),
    "video that is a picture": (lambda: film(data_url(PNG)), "video_url.url"),
    "video of one frame": (lambda: film(data_url(saved("GIF"))), "video_url.url"),
    "video that is a jpeg": (lambda: film(data_url(saved("JPEG"))), "video_url.url"),
    "video that is a sound": (lambda: film(data_url(wav())), "video_url.url"),
    "video that is svg": (lambda: film(data_url(SVG)), "video_url.url"),
    "gif cut between its frames": (lambda: film(data_url(animated("GIF")[:-20])), "video_url.url"),
    "webp cut between its frames": (lambda: film(data_url(animated("WEBP")[:-20])), "video_url.url"),
    "video of too many pixels": (lambda: film(data_url(gif(65535, 65535))), "video_url.url"),
    "head of an mp4 alone": (lambda: film(data_url(b"\0\0\0\x18ftypisom" + bytes(64))), "video_url.url"),
    "head of a webm alone": (lambda: film(data_url(b"\x1a\x45\xdf\xa3" + bytes(64))), "video_url.url"),
    "video with a host": (lambda: film("http://evil.example/a.mp4"), "video_url.url"),
    "video with a path": (lambda: film("file:///etc/passwd"), "video_url.url"),
    "frames that hold no picture": (lambda: film(data_url(FRAMES + bytes(40))), "video_url.url"),
    "frames that are cut short": (lambda: film(data_url(join_frames([PNG, PNG])[:-9])), "video_url.url"),
    "frames of too many pixels": (lambda: film(data_url(join_frames([headed(9000, 9000)] * 2))), "video_url.url"),
    "one frame": (lambda: {"type": "video", "video": [data_url(PNG)]}, "video"),
    "no frames": (lambda: {"type": "video", "video": []}, "video"),
    "too many frames": (lambda: {"type": "video", "video": [data_url(PNG)] * 257}, "video"),
    "a frame that is svg": (lambda: {"type": "video", "video": [data_url(PNG), data_url(SVG)]}, "video"),
    "a frame with a path": (lambda: {"type": "video", "video": [data_url(PNG), "/etc/passwd"]}, "video"),
    "frames that are numbers": (lambda: {"type": "video", "video": [1, 2]}, "video[0]"),
    "sound by a path": (lambda: {"type": "audio_url", "audio_url": {"url": "file:///etc/passwd"}}, "audio_url.url"),
    "sound url that is a picture": (
        lambda: {"type": "audio_url", "audio_url": {"url": data_url(PNG)}},
        "audio_url.url",
    ),
    "low detail of a bomb": (lambda: shown(data_url(headed(MAX_SIDE, MAX_SIDE)), detail="low"), URL),
    "low detail of svg": (lambda: shown(data_url(SVG), detail="low"), URL),
    "low detail of an animation": (lambda: shown(data_url(animated("GIF")), detail="low"), URL),
    "file id": (lambda: {"type": "file", "file": {"file_id": "file-1"}}, "file.file_id"),
}


def fetcher(answers: dict[str, Any], addresses: dict[str, list[str]] | None = None) -> Fetcher:
    """A Fetcher whose hosts have these addresses and answer so; what is connected to is in ``asked``."""

    async def resolve(host: str, port: int) -> list[str]:
        return (addresses or {}).get(host, [PUBLIC])

    def handle(request: httpx.Request) -> httpx.Response:
        assert request.url.host == PUBLIC  # of what was resolved, not the name
        given = answers.get(f"{request.headers['host']}{request.url.raw_path.decode()}", 404)
        if isinstance(given, int):
            return httpx.Response(given)
        if isinstance(given, str):
            return httpx.Response(302, headers={"location": given})
        if isinstance(given, bytes):
            return httpx.Response(200, stream=Once(given))
        made: httpx.Response = given()
        return made

    return Fetcher([HOST, "other.example"], resolve, transport=httpx.MockTransport(handle))


@asynccontextmanager
async def seeing(**parts: Any) -> AsyncIterator[Site]:
    """A site whose model sees and hears."""
    others = tuple(MediaMarks(f"<{kind}>", 0, "scripted", "f" * 32, kind) for kind in ("audio", "video"))
    facts = structs.replace(SEEING, media=("image", "audio", "video"), further_marks=others)
    async with site(tokens=seeing_tokens(), **parts) as at:
        at.engine.facts = facts
        try:
            yield at
        finally:
            await at.app.state.media_reader.close()


async def test_each_bad_part_is_a_400_that_names_it() -> None:
    assert len(PARTS) >= 85
    async with seeing(fetcher=fetcher({})) as at:
        for name, (make, field) in PARTS.items():
            given = make()
            answer = await at.chat(messages=[asks({"type": "text", "text": "See"}, given)])
            assert answer.status_code == 400, (name, answer.text)
            error = answer.json()["error"]
            assert error["param"] == f"messages[0].content[1].{field}", (name, error)
            assert len(answer.content) < 400, name
            assert name != "png of too many pixels" or "pixels" in error["message"], name  # before anything is decoded
            for told in ("/etc", "evil", "127.0.0.1", "Traceback", "site-packages", "PIL"):
                assert told not in answer.text, name
        assert not at.engine.submitted
        good = await at.chat(messages=[asks(shown(data_url(PNG)))])
        assert good.status_code == 200, good.text


FETCHES: dict[str, tuple[dict[str, Any], dict[str, list[str]] | None]] = {
    "redirect to another host": ({f"{HOST}/a": "http://evil.example/"}, None),
    "redirect to loopback": ({f"{HOST}/a": "http://127.0.0.1/"}, None),
    "redirect to the metadata service": ({f"{HOST}/a": "http://169.254.169.254/latest"}, None),
    "redirect to a file": ({f"{HOST}/a": "file:///etc/passwd"}, None),
    "redirect to another port": ({f"{HOST}/a": f"http://{HOST}:6379/"}, None),
    "redirect to nothing": ({f"{HOST}/a": ""}, None),
    "redirects in a circle": ({f"{HOST}/a": "/b", f"{HOST}/b": "/a"}, None),
    "redirect to a host that is private now": (
        {f"{HOST}/a": "http://other.example/b", "other.example/b": PNG},
        {"other.example": ["10.0.0.1"]},
    ),
    "404": ({}, None),
    "500": ({f"{HOST}/a": 500}, None),
    "204": ({f"{HOST}/a": 204}, None),
    "empty": ({f"{HOST}/a": b""}, None),
    "html": ({f"{HOST}/a": b"<html>"}, None),
    "svg": ({f"{HOST}/a": SVG}, None),
    "too many bytes": ({f"{HOST}/a": PNG + bytes(MAX_BYTES)}, None),
    "too many bytes without a length": (
        {f"{HOST}/a": lambda: httpx.Response(200, stream=Endless())},
        None,
    ),
    "compressed": (
        {f"{HOST}/a": lambda: httpx.Response(200, headers={"content-encoding": "gzip"}, stream=Endless())},
        None,
    ),
    "loopback by DNS": ({f"{HOST}/a": PNG}, {HOST: ["127.0.0.1"]}),
    "one of two addresses is private": ({f"{HOST}/a": PNG}, {HOST: [PUBLIC, "192.168.1.1"]}),
    "IPv6 loopback by DNS": ({f"{HOST}/a": PNG}, {HOST: ["::1"]}),
    "mapped loopback by DNS": ({f"{HOST}/a": PNG}, {HOST: ["::ffff:127.0.0.1"]}),
    "link-local by DNS": ({f"{HOST}/a": PNG}, {HOST: ["fe80::1%eth0"]}),
    "6to4 of a private address": ({f"{HOST}/a": PNG}, {HOST: ["2002:0a00:0001::1"]}),
    "NAT64 of a private address": ({f"{HOST}/a": PNG}, {HOST: ["64:ff9b::a00:1"]}),
    "no address": ({f"{HOST}/a": PNG}, {HOST: []}),
}


class Once(httpx.AsyncByteStream):
    """A body as it comes from a connection, in pieces."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    async def __aiter__(self) -> Any:
        for start in range(0, len(self._data), 2**20):
            yield self._data[start : start + 2**20]

    async def aclose(self) -> None:
        pass


class Endless(httpx.AsyncByteStream):
    """A body without an end."""

    async def __aiter__(self) -> Any:
        while True:
            yield PNG + bytes(2**20)

    async def aclose(self) -> None:
        pass


@pytest.mark.parametrize("name", FETCHES)
async def test_each_bad_fetch_is_a_400_that_names_the_part(name: str) -> None:
    answers, addresses = FETCHES[name]
    async with seeing(fetcher=fetcher(answers, addresses)) as at:
        answer = await at.chat(messages=[asks(shown(f"https://{HOST}/a"))])
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == "messages[0].content[0].image_url.url"
        for told in ("evil", "10.0.0.1", "127.0.0.1", "192.168", HOST, "passwd"):
            assert told not in answer.text


async def test_a_picture_is_fetched_once_and_kept() -> None:
    answers: dict[str, Any] = {f"{HOST}/a?size=1": "//other.example/b", "other.example/b": PNG}
    async with seeing(fetcher=fetcher(answers)) as at:
        path = "/v1/sessions/s/chat/completions"
        answer = await at.chat(path, messages=[asks(shown(f"https://{HOST.upper()}/a?size=1"))])
        assert answer.status_code == 200, answer.text
        answers.clear()
        assert (await at.chat(path)).status_code == 200
        assert await at.log.media.get("default", digest(PNG)) == PNG


async def test_nothing_is_fetched_unless_a_host_is_named() -> None:
    async with seeing() as at:
        answer = await at.chat(messages=[asks(shown("https://example.com/a.png"))])
        assert "--media-domains" in answer.json()["error"]["message"]


async def test_ten_thousand_pictures_are_refused_before_one_is_read() -> None:
    async with seeing() as at:
        checker = at.app.state.media_reader._checker
        answer = await at.chat(messages=[asks(*[shown(data_url(PNG))] * 10_000)])
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == f"messages[0].content[{MAX_MEDIA}]"
        assert checker._process._process is None


@pytest.mark.slow
@pytest.mark.wide
async def test_hostile_pictures_leave_memory_as_it_was() -> None:
    """The server's own memory, and that of the process that decodes."""
    large, many = bomb(), text_bomb()

    def own() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    async with seeing() as at:

        async def volley() -> None:
            for data in (large, many, headed(5000, 5000), gif(65535, 65535), PNG + os.urandom(2**20)):
                await asyncio.create_task(at.chat(messages=[asks(shown(data_url(data)))]))  # as a server does

        for _ in range(2):
            await volley()
        before, reader = own(), at.app.state.media_reader
        for _ in range(4):
            reader._known.clear()
            await volley()
        checker = reader._checker._process._process
        peak = int(Path(f"/proc/{checker.pid}/status").read_text().partition("VmHWM:")[2].split()[0]) * 1024
        assert own() - before < 30 * 2**20
        assert peak < 2**30
        assert reader._in_hand == 0


async def test_a_checker_that_is_killed_is_replaced() -> None:
    async with seeing() as at:
        assert (await at.chat(messages=[asks(shown(data_url(PNG)))])).status_code == 200
        reader = at.app.state.media_reader
        reader._checker._process._process.kill()
        await reader._checker._process._process.wait()
        assert (await at.chat(messages=[asks(shown(data_url(png(9, 9))))])).status_code == 200


async def test_a_checker_that_hangs_is_killed_and_the_loop_goes_on() -> None:
    async with seeing() as at:
        reader = at.app.state.media_reader
        assert (await at.chat(messages=[asks(shown(data_url(PNG)))])).status_code == 200
        os.kill(reader._checker._process._process.pid, 19)  # SIGSTOP
        reader._checker._process._seconds = 0.5
        stuck = asyncio.create_task(at.chat(messages=[asks(shown(data_url(png(7, 7))))]))
        assert (await at.http.get("/health")).status_code in (200, 503)
        answer = await stuck
        assert answer.json()["error"]["code"] == "invalid_media"
        reader._checker._process._seconds = 15.0
        assert (await at.chat(messages=[asks(shown(data_url(png(8, 8))))])).status_code == 200


async def test_too_many_bytes_in_hand_are_a_429(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.media.media_reader.IN_HAND", 100)
    async with seeing() as at:
        answer = await at.chat(messages=[asks(*(shown(data_url(png(40, 40, shade))) for shade in range(3)))])
        assert answer.status_code == 429
        assert answer.json()["error"]["code"] == "too_many_media"
        assert at.app.state.media_reader._in_hand == 0


async def test_a_picture_that_is_large_and_sound_is_taken() -> None:
    assert MAX_PIXELS > 7000 * 7000
    assert len(base64.b64encode(bomb())) < 2**20
    async with seeing() as at:
        answer = await at.chat(messages=[asks(shown(data_url(bomb())))])
        assert answer.status_code == 200, answer.text
        assert json.loads(answer.content)["usage"]
