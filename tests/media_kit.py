"""Pictures and sounds for tests, a chat template that takes them, and sites whose fake engine sees."""

from __future__ import annotations

import base64
import functools
import hashlib
import io
import struct
import wave
import zlib
from typing import Any

import pytest
from template_styles import tokens_with

from server.chat.chat_tokenizer import ChatTokenizer

SEES = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for part in m.content %}{{ part.text if part.type == 'text' else '<' + part.type + '>' }}{% endfor %}"
    "{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@functools.cache
def seeing_tokens() -> ChatTokenizer:
    """The demo model's tokenizer with a template that takes pictures."""
    return tokens_with(SEES)


def png(width: int = 3, height: int = 2, shade: int = 0) -> bytes:
    """A grey PNG, made without Pillow."""
    rows = b"".join(b"\0" + bytes([shade]) * width for _ in range(height))
    head = struct.pack(">LLBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def chunk(name: bytes, data: bytes) -> bytes:
    """A chunk of a PNG."""
    return struct.pack(">L", len(data)) + name + data + struct.pack(">L", zlib.crc32(name + data))


def saved(format: str, width: int = 4, height: int = 2, mode: str = "RGB", **options: Any) -> bytes:
    """A picture as Pillow writes it."""
    image = pytest.importorskip("PIL.Image")
    target = io.BytesIO()
    image.new(mode, (width, height)).save(target, format, **options)
    return target.getvalue()


def wav(seconds: float = 0.01, rate: int = 8000) -> bytes:
    """Silence."""
    target = io.BytesIO()
    with wave.open(target, "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(2)
        sound.setframerate(rate)
        sound.writeframes(bytes(2 * round(seconds * rate)))
    return target.getvalue()


def changed_at(data: bytes, at: int, value: bytes) -> bytes:
    """A file with other bytes in one place."""
    return data[:at] + value + data[at + len(value) :]


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{encoded(data)}"


def shown(url: str, **more: Any) -> dict[str, Any]:
    """A picture as a part of a chat."""
    return {"type": "image_url", "image_url": {"url": url, **more}}


def said(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def asks(*parts: Any, role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": [*parts]}
