"""The route of media: the bytes of a picture or sound that a session of the tenant has."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from server.errors import ApiError
from server.media.media import MediaKind
from server.media.media_format import format_of
from server.media.media_limits import MediaRefused
from server.turns.context import context_of

router = APIRouter()
KINDS: tuple[MediaKind, ...] = ("image", "audio", "video")
HEADERS = {
    "cache-control": "private, max-age=31536000, immutable",
    "content-security-policy": "default-src 'none'; sandbox",
    "x-content-type-options": "nosniff",
}


@router.get("/v1/media/{digest}")
async def retrieve_media(digest: str, request: Request) -> Response:
    """Get the bytes of a picture or sound, by the SHA-256 that messages name. Another tenant's are not found."""
    data = await context_of(request).log.media.get(request.state.tenant, digest)
    if data is None:
        raise ApiError(404, "There is no picture or sound with this digest.", code="media_not_found")
    return Response(data, media_type=media_type_of(data), headers=HEADERS)


def media_type_of(data: bytes) -> str:
    """The type of checked bytes, as HTTP names it."""
    for kind in KINDS:
        try:
            return f"{kind}/{format_of(data, kind)}"
        except MediaRefused:
            continue
    return "application/octet-stream"
