"""Resources that a later version serves: a clear 400, as a 404 would send people to look for a typo."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from server.errors import ApiError, bad_request

router = APIRouter(include_in_schema=False)
METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE"]


@router.api_route("/v1/responses", methods=METHODS)
@router.api_route("/v1/responses/{rest:path}", methods=METHODS)
async def responses() -> Response:
    """Responses, and everything below them."""
    raise refusal("Responses")


@router.api_route("/v1/conversations", methods=METHODS)
@router.api_route("/v1/conversations/{rest:path}", methods=METHODS)
async def conversations() -> Response:
    """Conversations, and everything below them."""
    raise refusal("Conversations")


def refusal(noun: str) -> ApiError:
    """Says what to use instead."""
    message = f"{noun} are not supported by this server yet: use /v1/chat/completions, with a session_id to go on."
    return bad_request(message, code="unsupported_endpoint")
