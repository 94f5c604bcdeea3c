"""A server whose scripted model sees, for clients in other processes: prints its port and runs until its input ends."""

from __future__ import annotations

import asyncio
import sys

from fake_engine import SEEING
from media_kit import seeing_tokens
from real_port import port


async def main() -> None:
    async with port(tokens=seeing_tokens()) as opened:
        opened.site.engine.facts = SEEING
        print(opened.number, flush=True)
        await asyncio.to_thread(sys.stdin.read)
        await opened.site.app.state.media_reader.close()


if __name__ == "__main__":
    asyncio.run(main())
