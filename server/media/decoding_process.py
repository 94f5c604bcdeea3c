"""``DecodingProcess``: a process with limits that decodes media, one at a time."""

from __future__ import annotations

import asyncio
import json
import struct
import sys
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple

from server.media import media_check
from server.media.media_limits import MediaRefused

PROGRAM = Path(media_check.__file__)


class Decoded(NamedTuple):
    """What a process tells of a medium, and what it has made of it."""

    told: dict[str, object]
    data: bytes


class DecodingProcess:
    """Starts its process with the first medium, and another one where that one has ended."""

    def __init__(self, kind: Literal["picture", "sound", "video"], seconds: float, *limits: int) -> None:
        """``seconds``: for one medium. ``limits``: of ``media_check``."""
        self._arguments = kind, max(1, round(seconds)), *limits
        self._seconds = seconds
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()

    async def decode(self, data: bytes, rate: int = 0) -> Decoded:
        """What is told of a medium that is valid. ``rate``: the second number of ``media_check``. Raises
        MediaRefused.
        """
        async with self._turn:
            try:
                process = await self._ensure_running()
                async with asyncio.timeout(self._seconds):
                    decoded = await ask(process, data, rate)
            except (TimeoutError, OSError, ValueError, EOFError):
                await self.close()
                raise MediaRefused("takes too long or too much memory to be decoded") from None
            except BaseException:
                await self.close()  # its answer would be taken for that of the next medium
                raise
        if "refused" in decoded.told:
            raise MediaRefused(str(decoded.told["refused"]))
        return decoded

    async def close(self) -> None:
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _ensure_running(self) -> asyncio.subprocess.Process:
        if self._process is None or self._process.returncode is not None:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-I",
                str(PROGRAM),
                *map(str, self._arguments),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                env={"OPENBLAS_NUM_THREADS": "1"},  # it may start no threads
                start_new_session=True,  # a Ctrl-C is for the server
            )
        return self._process


async def ask(process: asyncio.subprocess.Process, data: bytes, rate: int) -> Decoded:
    """The process's answer to one medium. Raises OSError, ValueError or EOFError where it has ended."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(struct.pack(">QQ", len(data), rate))
    process.stdin.write(data)
    await process.stdin.drain()
    line = await process.stdout.readline()
    if not line:
        raise EOFError
    answer = json.loads(line)
    if not isinstance(answer, dict):
        raise ValueError("no answer")
    return Decoded(answer, await process.stdout.readexactly(answer.pop("bytes")))
