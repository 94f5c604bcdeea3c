"""Which URLs may be fetched: those of named hosts, with nothing in them that two readers could read in two ways."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from urllib.parse import urlsplit

from server.media.media_limits import MediaRefused

MAX_URL = 4096  # characters
PORTS = {"http": 80, "https": 443}
VISIBLE = re.compile(r"[!-\[\]-~]+\Z")  # ASCII without backslashes and spaces
HOST = re.compile(r"[a-z0-9._-]{1,253}\Z")


@dataclass(frozen=True)
class Target:
    """Where a hop goes: parts of its URL."""

    scheme: str
    host: str
    port: int
    path: str


def target_of(url: str, domains: Collection[str]) -> Target:
    """The target of a URL. Raises MediaRefused unless it is http(s) and its host is one of ``domains``."""
    if len(url) > MAX_URL or not VISIBLE.match(url):
        raise MediaRefused(f"is not a URL of at most {MAX_URL} visible ASCII characters")
    try:
        parts = urlsplit(url)
        host, port = (parts.hostname or "").rstrip("."), parts.port
    except ValueError:
        raise MediaRefused("is not a valid URL") from None
    if parts.scheme not in PORTS:
        raise MediaRefused("must be a data:, http: or https: URL")
    if not domains:
        raise MediaRefused("must be a data: URL: this server fetches nothing (--media-domains)")
    if "@" in parts.netloc:
        raise MediaRefused("can have no user name")
    if not HOST.match(host) or host not in domains:
        raise MediaRefused("names a host that this server does not fetch from (--media-domains)")
    if port not in (None, PORTS[parts.scheme]):
        raise MediaRefused("can have no port but that of its scheme")
    path = parts.path or "/"
    return Target(parts.scheme, host, PORTS[parts.scheme], f"{path}?{parts.query}" if parts.query else path)
