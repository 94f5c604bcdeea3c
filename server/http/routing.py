"""Extracts the session that a request's URL names, for load balancers that route by session.

``deploy/nginx.conf`` has the same rules for nginx.
"""

from __future__ import annotations

import re
from urllib.parse import parse_qs

PLACES = (
    re.compile(r"/v1/sessions/(?P<session>[A-Za-z0-9._:@-]+)(?:/|\Z)"),
    re.compile(r"/v1/conversations/conv_(?P<session>[A-Za-z0-9._:@-]+)(?:/|\Z)"),
    re.compile(r"/v1/responses/resp_(?P<session>[A-Za-z0-9._:@-]+)_[A-Za-z0-9]+(?:/|\Z)"),
)
IMPORT = "/v1/sessions/import"


def session_of(path: str, query: bytes = b"") -> str | None:
    """The session that a URL names; None if it names none."""
    if path.rstrip("/") == IMPORT:
        return parse_qs(query.decode("latin-1")).get("id", [None])[0]
    found = next((match for place in PLACES if (match := place.match(path)) is not None), None)
    return None if found is None else found["session"]
