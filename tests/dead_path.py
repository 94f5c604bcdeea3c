"""A network path that can die without a word: a TCP proxy that goes on taking connections and bytes, and passes nothing
on. Nobody is refused or cut off by it, as where packets are lost on the way."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

Address = tuple[str, int] | Path  # of a port, or a Unix socket


class NetworkPath:
    """From ``port`` of this machine to ``target``, alive until ``die``. What came meanwhile arrives after ``heal``."""

    def __init__(self, target: Address) -> None:
        self.port = 0
        self._target = target
        self._loop = asyncio.new_event_loop()
        self._alive = asyncio.Event()
        self._alive.set()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),))
        self._over = asyncio.Event()

    def start(self) -> None:
        self._thread.start()
        assert self._ready.wait(10)

    def die(self) -> None:
        """Nothing passes from now on."""
        self._tell(self._alive.clear)

    def heal(self) -> None:
        self._tell(self._alive.set)

    def stop(self) -> None:
        """The end of it, and of its connections."""
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()
        self._loop.close()

    def _tell(self, what: Callable[[], object]) -> None:
        told = threading.Event()

        def tell() -> None:
            what()
            told.set()

        self._loop.call_soon_threadsafe(tell)
        assert told.wait(10)

    async def _serve(self) -> None:
        tasks: set[asyncio.Task[None]] = set()

        def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            tasks.add(task := asyncio.create_task(self._carry(reader, writer)))
            task.add_done_callback(tasks.discard)

        server = await asyncio.start_server(accepted, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._over.wait()
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _carry(self, near: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        writers = [back]
        try:
            await self._alive.wait()
            if isinstance(self._target, Path):
                far, forth = await asyncio.open_unix_connection(self._target)
            else:
                far, forth = await asyncio.open_connection(*self._target)
            writers.append(forth)
            await asyncio.gather(self._one_way(near, forth), self._one_way(far, back))
        except OSError:
            pass
        finally:
            for writer in writers:
                writer.transport.abort()

    async def _one_way(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while data := await source.read(65_536):
            await self._alive.wait()
            sink.write(data)
            await sink.drain()
        await self._alive.wait()
        with suppress(OSError):
            sink.write_eof()


@contextmanager
def path_to(target: Address) -> Iterator[NetworkPath]:
    """A path that is gone afterwards."""
    path = NetworkPath(target)
    path.start()
    try:
        yield path
    finally:
        path.stop()
