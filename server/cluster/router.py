"""Ray Serve's request router: requests of one session go to the same replica as long as it exists."""

from __future__ import annotations

import pickle
from typing import Any

from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter

from server.cluster.body_routing import HEADER as FROM_BODY
from server.http.routing import session_of
from server.lines.hints import conversation_in


class SessionRouter(ConsistentHashRouter):
    """Consistent hashing of ``X-Session-ID``, else of the session that the URL names, else of a client's own id of its
    conversation in a header, else of what the body names (see ``BodyRouting``), else anywhere.
    """

    def _routing_key(self, pending_request: Any) -> str | None:
        if pending_request is not None and not pending_request.metadata.session_id:
            named = session_or_conversation(pending_request)
            if named is not None:
                return named
        key: str | None = super()._routing_key(pending_request)
        return key


def session_or_conversation(pending_request: Any) -> str | None:
    """The session in the URL of a request, else the conversation in its headers, else what its body names. Its head was
    pickled by Ray's proxy a moment ago, in this process.
    """
    first = pending_request.args[0] if pending_request.args else None
    if not pending_request.metadata.is_http_request or not isinstance(first, bytes):
        return None
    scope = pickle.loads(first).asgi_scope
    headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope.get("headers", ())}
    named = session_of(scope["path"], scope.get("query_string", b"")) or conversation_in(headers)
    return named or headers.get(FROM_BODY)
