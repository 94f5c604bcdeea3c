"""Static files of the page at ``/ui``, which is served without an API key.

Its documents name their files below ``v-`` and a digest of all of them, so that browsers keep these without asking
again. All stylesheets of a document are sent as one, and so are its modules.
"""

from __future__ import annotations

import gzip
import hashlib
import re
from collections.abc import Callable, Mapping
from functools import cache, cached_property, partial
from pathlib import Path

from starlette.datastructures import Headers
from starlette.responses import RedirectResponse, Response
from starlette.types import Scope

from server.http.page_script import FOLDER, OTHERS, imported, joined

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
    "media-src": "blob:",  # and sounds
    "connect-src": "'self'",
    "manifest-src": "'self'",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
    "require-trusted-types-for": "'script'",
    "trusted-types": "dompurify",
}
ASKED = "no-cache"  # kept, and asked about each time
KEPT = "public, max-age=31536000, immutable"
HEADERS = {
    "content-security-policy": "; ".join(f"{name} {value}" for name, value in POLICY.items()),
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "vary": "accept-encoding",
    "x-content-type-options": "nosniff",
}


STYLES = re.compile(r'<link rel="stylesheet" href="([\w.-]+)" />\s*')
SCRIPT = re.compile(r'<script type="module" src="([\w.-]+)"></script>')
LASTING = re.compile(r"/ui/v-([0-9a-f]{16})(/.+)")


class Asset:
    """Bytes with their content type and encodings: of a file, or of what ``make`` gives, when first asked for."""

    def __init__(self, path: Path, make: Callable[[], bytes] | None = None) -> None:
        self._make = make or path.read_bytes
        self.media_type = TYPES[path.suffix]

    @cached_property
    def body(self) -> bytes:
        return self._make()

    @cached_property
    def zipped(self) -> bytes:
        """The bytes compressed; they have an ETag of their own."""
        return gzip.compress(self.body, mtime=0)

    @cached_property
    def digest(self) -> str:
        return hashlib.sha256(self.body).hexdigest()[:24]

    def answer(self, headers: Mapping[str, str], *, lasting: bool = False) -> Response:
        """The answer to a request with these headers. ``lasting``: the address has the digest of the page."""
        zips = "gzip" in headers.get("accept-encoding", "")
        etag = f'"{self.digest}-gzip"' if zips else f'"{self.digest}"'
        told = {**HEADERS, "cache-control": KEPT if lasting else ASKED, "etag": etag}
        # A proxy that zips by itself has made a tag weak.
        held = {tag.strip().removeprefix("W/") for tag in headers.get("if-none-match", "").split(",")}
        if held & {etag, "*"}:
            return Response(status_code=304, headers=told)
        if not zips:
            return Response(self.body, headers=told, media_type=self.media_type)
        return Response(self.zipped, headers={**told, "content-encoding": "gzip"}, media_type=self.media_type)


def styles_of(path: Path) -> bytes:
    """All stylesheets of a document, in its order."""
    return b"".join((FOLDER / name).read_bytes() for name in STYLES.findall(path.read_text()))


def script_of(path: Path) -> str:
    found = SCRIPT.search(path.read_text())
    assert found is not None, path
    return found[1]


def script(path: Path) -> bytes:
    """All modules of a document, as one."""
    return joined(script_of(path)).encode()


def document(path: Path) -> bytes:
    """An HTML file, whose stylesheets and modules are one file each, at lasting addresses."""
    text, below = path.read_text(), f"v-{version()}/"
    styles = f'<link rel="stylesheet" href="{below}{path.stem}.css" />\n    '
    text = STYLES.sub("", STYLES.sub(styles, text, count=1))
    others = [name for name in imported(script_of(path)) if name.startswith(OTHERS)]
    lines = [f'<link rel="modulepreload" href="{below}{name}" />' for name in others]
    lines += [f'<script type="module" src="{below}{path.stem}-script.js"></script>']
    return SCRIPT.sub("\n    ".join(lines), text).replace('href="icon.svg"', f'href="{below}icon.svg"').encode()


FILES = [path for path in sorted(FOLDER.rglob("*.*")) if path.suffix in TYPES]
DOCUMENTS = [path for path in FILES if path.suffix == ".html"]
PAGES = {f"/ui/{path.name}": Asset(path, partial(document, path)) for path in DOCUMENTS}
PAGES["/ui/"] = PAGES["/ui/index.html"]
ASSETS = {f"/ui/{path.relative_to(FOLDER).as_posix()}": Asset(path) for path in FILES if path.suffix != ".html"}
for page in DOCUMENTS:
    ASSETS[f"/ui/{page.stem}.css"] = Asset(page.with_suffix(".css"), partial(styles_of, page))
    ASSETS[f"/ui/{page.stem}-script.js"] = Asset(page.with_suffix(".js"), partial(script, page))


@cache
def version() -> str:
    """A digest of all that lasts."""
    return hashlib.sha256("".join(asset.digest for asset in ASSETS.values()).encode()).hexdigest()[:16]


def asset_at(path: str) -> tuple[Asset, bool] | None:
    """What stands at a path, and whether that is what it will always be. A path with the digest of another version of
    the page has the file of this one: a tab may have been opened before an update, or by another replica.
    """
    if found := PAGES.get(path) or ASSETS.get(path):
        return found, False
    lasting = LASTING.fullmatch(path)
    if lasting is None or (found := ASSETS.get(f"/ui{lasting[2]}")) is None:
        return None
    return found, lasting[1] == version()


def is_page_request(scope: Scope) -> bool:
    """Whether a request is for the page, which needs no key: one of its files by exact path, or a redirect to it. At
    ``/``, only requests of browsers are, and those that only look whether somebody answers.
    """
    if scope["method"] not in ("GET", "HEAD"):
        return False
    path = scope["path"]
    return path == "/ui" or asset_at(path) is not None or (path == "/" and (is_a_look(scope) or is_browser(scope)))


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
    if (found := asset_at(scope["path"])) is None:
        return RedirectResponse("ui/", 303)
    asset, lasting = found
    return asset.answer(Headers(scope=scope), lasting=lasting)
