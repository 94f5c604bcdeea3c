"""Static files of the page at ``/ui``, which is served without an API key."""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

from starlette.datastructures import Headers
from starlette.responses import RedirectResponse, Response
from starlette.types import Scope

FOLDER = Path(__file__).parents[1] / "ui"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".webmanifest": "application/manifest+json",
    ".woff2": "font/woff2",
}
POLICY = {  # of the page: what it may load and do; everything else is forbidden
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "font-src": "'self'",
    "img-src": "'self' blob:",  # pictures of messages, which are fetched with the key
    "connect-src": "'self'",
    "manifest-src": "'self'",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
    "require-trusted-types-for": "'script'",
    "trusted-types": "dompurify",
}
HEADERS = {
    "cache-control": "no-cache",  # kept, and asked about each time
    "content-security-policy": "; ".join(f"{name} {value}" for name, value in POLICY.items()),
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "vary": "accept-encoding",
    "x-content-type-options": "nosniff",
}


class Asset:
    """A file with its content type and encodings, read when it is first asked for."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.media_type = TYPES[path.suffix]

    @cached_property
    def body(self) -> bytes:
        """The file's bytes."""
        return self._path.read_bytes()

    @cached_property
    def zipped(self) -> bytes:
        """The bytes compressed; they have an ETag of their own."""
        return gzip.compress(self.body, mtime=0)

    @cached_property
    def digest(self) -> str:
        """Of the bytes, for ETags."""
        return hashlib.sha256(self.body).hexdigest()[:24]

    def answer(self, headers: Mapping[str, str]) -> Response:
        """The answer to a request with these headers."""
        zips = "gzip" in headers.get("accept-encoding", "")
        etag = f'"{self.digest}-gzip"' if zips else f'"{self.digest}"'
        told = {**HEADERS, "etag": etag}
        # A proxy that zips by itself has made a tag weak.
        held = {tag.strip().removeprefix("W/") for tag in headers.get("if-none-match", "").split(",")}
        if held & {etag, "*"}:
            return Response(status_code=304, headers=told)
        if not zips:
            return Response(self.body, headers=told, media_type=self.media_type)
        return Response(self.zipped, headers={**told, "content-encoding": "gzip"}, media_type=self.media_type)


ASSETS = {
    f"/ui/{path.relative_to(FOLDER).as_posix()}": Asset(path) for path in FOLDER.rglob("*.*") if path.suffix in TYPES
}
ASSETS["/ui/"] = ASSETS["/ui/index.html"]


def is_page_request(scope: Scope) -> bool:
    """Whether a request is for the page, which needs no key: one of its files by exact path, or a redirect to it. At
    ``/``, only requests of browsers are, and those that only look whether somebody answers.
    """
    if scope["method"] not in ("GET", "HEAD"):
        return False
    path = scope["path"]
    return path in ASSETS or path == "/ui" or (path == "/" and (is_a_look(scope) or is_browser(scope)))


def is_browser(scope: Scope) -> bool:
    """Whether a request wants a page."""
    return "text/html" in Headers(scope=scope).get("accept", "")


def is_a_look(scope: Scope) -> bool:
    """Whether a client only looks whether somebody answers: ``HEAD /``."""
    return scope["method"] == "HEAD" and scope["path"] == "/" and not is_browser(scope)


def page_answer(scope: Scope) -> Response | None:
    """The response with a file of the page, or a redirect to it; None for other requests. The redirect has no host, as
    the request's Host header cannot be trusted.
    """
    if not is_page_request(scope):
        return None
    if is_a_look(scope):
        return Response()
    asset = ASSETS.get(scope["path"])
    return RedirectResponse("ui/", 303) if asset is None else asset.answer(Headers(scope=scope))
