"""``json_response``: a response with one JSON object."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.responses import Response

encoder = msgspec.json.Encoder()


def json_response(
    answer: msgspec.Struct | Mapping[str, Any], status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    return Response(encoder.encode(answer), status, headers, media_type="application/json")
