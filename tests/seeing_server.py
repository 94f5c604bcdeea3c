"""A server whose scripted model sees and hears, for clients in other processes: prints its port and runs until its
input ends.
"""

from __future__ import annotations

import asyncio
import sys

from fake_engine import SEEING
from media_kit import seeing_tokens
from msgspec import structs
from real_port import port

from scheduler.model_facts import MediaMarks


async def main() -> None:
    async with port(tokens=seeing_tokens()) as opened:
        hears = MediaMarks("<audio>", 0, "scripted", "f" * 32, "audio")
        opened.site.engine.facts = structs.replace(SEEING, media=("image", "audio"), further_marks=(hears,))
        print(opened.number, flush=True)
        await asyncio.to_thread(sys.stdin.read)
        await opened.site.app.state.media_reader.close()


if __name__ == "__main__":
    asyncio.run(main())
