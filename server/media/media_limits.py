"""Limits on media in a request, and the refusal of media that are beyond them or are not what they say."""

from __future__ import annotations

MAX_MEDIA = 100  # in a request
MAX_BYTES = 20 * 2**20  # of one
MAX_TOTAL = 64 * 2**20  # bytes of a request's media
IN_HAND = 512 * 2**20  # bytes of all requests under way
MAX_PIXELS = 50_000_000
MAX_SIDE = 16_384  # pixels
LOW_SIDE = 512  # pixels of a picture with `detail: low`, as OpenAI has it
MAX_REDUCED = 64 * 2**20  # bytes of such pictures that are remembered
MAX_FRAMES = 1000  # of a video
MAX_SENT_FRAMES = 256  # of a video that is sent as pictures
MAX_SECONDS = 600  # of a sound in a message
LONGEST_SOUND = 7200  # seconds, of one to transcribe
MAX_FILE = 25 * 2**20  # bytes of that one, as with OpenAI
CHECK_SECONDS = 15.0  # to decode one


class MediaRefused(Exception):
    """A medium is refused. ``problem`` ends a sentence that begins with the field's name; it repeats nothing of what
    the client sent. HTTP 400.
    """

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.problem = problem


def too_large() -> MediaRefused:
    return MediaRefused(f"is larger than {MAX_BYTES} bytes")
