"""Routes of the page at ``/ui``, and the redirect to it."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from server.errors import ApiError
from server.http.error_responses import SENTENCES
from server.http.page import page_answer

router = APIRouter(include_in_schema=False)


@router.api_route("/", methods=["GET", "HEAD"])
@router.api_route("/ui", methods=["GET", "HEAD"])
@router.api_route("/ui/{path:path}", methods=["GET", "HEAD"])
async def page(request: Request) -> Response:
    """A file of the page, or a redirect to it for browsers. Raises a 404."""
    answer = page_answer(request.scope)
    if answer is None:
        raise ApiError(404, SENTENCES[404])
    return answer
