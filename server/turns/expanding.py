"""Asks the engine by what the pictures of a request are replaced in its prompt."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Mapping, Sequence
from weakref import ref

from starlette.requests import HTTPConnection

from scheduler.protocol import ExpandedMedium, MediaItem
from server.chat.expansions import Expander, Expansion
from server.engine.engine import Engine
from server.errors import bad_request
from server.log.media_rows import NO_MEDIA
from server.log.session_log import SessionLog

PATIENCE = 120.0  # seconds


def expander_of(request: HTTPConnection, engine: Engine, log: SessionLog) -> Expander:
    """Called on another thread than that of the event loop, it waits for the answer. It raises a 400 for a picture that
    cannot be used, and what the engine and the log raise.
    """
    loop, asking = asyncio.get_running_loop(), ref(request)  # threads keep their last context, and so its expander

    def expand(kinds: Mapping[str, str]) -> Mapping[str, Expansion]:
        connection = asking()
        assert connection is not None
        asked = expand_media(connection, engine, log, kinds)
        return asyncio.run_coroutine_threadsafe(asked, loop).result(PATIENCE)

    return expand


async def expand_media(
    request: HTTPConnection, engine: Engine, log: SessionLog, kinds: Mapping[str, str]
) -> Mapping[str, Expansion]:
    """What stands for media, of whose digests ``kinds`` has the kinds. Bytes are sent only if the engine does not know
    them. Raises a 400 if one is gone.
    """
    tenant: str = request.state.tenant
    held: Mapping[str, bytes] = getattr(request.state, "media", NO_MEDIA)
    answer = await engine.expand(tenant, [MediaItem(digest) for digest in kinds])
    found = _check(answer.media)
    if answer.unknown:
        items = []
        for digest in answer.unknown:
            data = held.get(digest) or await log.media.get(tenant, digest)
            if not data:
                raise bad_request("A picture or sound of the conversation is gone.", "messages", "invalid_media")
            items.append(MediaItem(digest, data, kinds[digest]))
        found |= _check((await engine.expand(tenant, items)).media)
    return found


def _check(media: Sequence[ExpandedMedium]) -> dict[str, Expansion]:
    made = {}
    for one in media:
        if one.error:
            raise bad_request(one.error, "messages", "invalid_media")
        ids: array[int] = array("i")
        ids.frombytes(one.ids)
        made[one.digest] = Expansion(one.text, ids)
    return made
