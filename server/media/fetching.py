"""``Fetcher``: downloads media from the hosts that the server's operator has named, and from no other address.

A host is resolved once for each hop, and the connection goes to the address that was checked. Redirects are hops like
the first one. Neither proxies nor cookies nor compression are used.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable, Collection
from urllib.parse import urljoin

import httpx

from server.media.addresses import is_public
from server.media.media_limits import MAX_BYTES, MediaRefused, too_large
from server.media.targets import Target, target_of

MAX_HOPS = 4
SECONDS = 20.0  # for all hops of one download
AT_ONCE = 8  # downloads

Resolver = Callable[[str, int], Awaitable[list[str]]]


class Fetcher:
    """Downloads from ``domains``. ``resolve`` gives the addresses of a host, and ``allows`` says which ones may be
    connected to; both are of the system, and public ones, unless a test says otherwise.
    """

    def __init__(
        self,
        domains: Collection[str],
        resolve: Resolver | None = None,
        allows: Callable[[str], bool] = is_public,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._domains = frozenset(domains)
        self._resolve = resolve or resolve_host
        self._allows = allows
        self._transport = transport
        self._client: httpx.AsyncClient | None = None
        self._slots = asyncio.Semaphore(AT_ONCE)

    async def fetch(self, url: str) -> bytes:
        """The bytes at a URL. Raises MediaRefused."""
        target = target_of(url, self._domains)
        try:
            async with self._slots, asyncio.timeout(SECONDS):
                for _ in range(MAX_HOPS):
                    found = await self._hop(target)
                    if isinstance(found, bytes):
                        return found
                    target = target_of(urljoin(f"{target.scheme}://{target.host}{target.path}", found), self._domains)
        except TimeoutError:
            raise MediaRefused(f"could not be fetched within {SECONDS:.0f} seconds") from None
        except (httpx.HTTPError, httpx.StreamError, httpx.InvalidURL, ssl.SSLError, OSError, ValueError):
            raise MediaRefused("could not be fetched") from None
        raise MediaRefused(f"is redirected more than {MAX_HOPS - 1} times")

    async def close(self) -> None:
        if self._client is not None:
            await self._client.aclose()

    async def _hop(self, target: Target) -> bytes | str:
        """The body of one response, or where it redirects to."""
        address = await self._address(target)
        netloc = f"[{address}]" if ":" in address else address
        url = httpx.URL(f"{target.scheme}://{netloc}:{target.port}").copy_with(raw_path=target.path.encode("ascii"))
        request = self._make_client().build_request(
            "GET",
            url,
            headers={"host": target.host, "accept": "*/*", "accept-encoding": "identity", "user-agent": "warmturn"},
            extensions={"sni_hostname": target.host},  # the certificate is checked for this name too
        )
        response = await self._make_client().send(request, stream=True, follow_redirects=False)
        try:
            if response.status_code in (301, 302, 303, 307, 308):
                return str(response.headers.get("location", ""))
            if response.status_code != 200:
                raise MediaRefused("could not be fetched: the host answered another status than 200")
            return await body_of(response)
        finally:
            await response.aclose()

    async def _address(self, target: Target) -> str:
        """The address to connect to: the first of the host's, if all of them may be connected to."""
        try:
            addresses = await self._resolve(target.host, target.port)
        except (OSError, UnicodeError):
            raise MediaRefused("names a host that has no address") from None
        if not addresses or not all(map(self._allows, addresses)):
            raise MediaRefused("names a host that has no public address")
        return addresses[0]

    def _make_client(self) -> httpx.AsyncClient:
        if self._client is None:
            limits = httpx.Limits(max_connections=AT_ONCE, max_keepalive_connections=0)
            self._client = httpx.AsyncClient(
                transport=self._transport, trust_env=False, limits=limits, timeout=httpx.Timeout(SECONDS, connect=5.0)
            )
        return self._client


async def body_of(response: httpx.Response) -> bytes:
    """The body as it was sent, read no further than the limit. Raises MediaRefused."""
    if response.headers.get("content-encoding", "identity").lower() != "identity":
        raise MediaRefused("could not be fetched: the host compressed it")
    length = response.headers.get("content-length", "")
    if length.isdecimal() and int(length[:20]) > MAX_BYTES:
        raise too_large()
    data = bytearray()
    async for chunk in response.aiter_raw():
        data += chunk
        if len(data) > MAX_BYTES:
            raise too_large()
    if not data:
        raise MediaRefused("could not be fetched: it is empty")
    return bytes(data)


async def resolve_host(host: str, port: int) -> list[str]:
    """The addresses of a host, as the system resolves it. Raises OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [*dict.fromkeys(str(entry[4][0]) for entry in found)]
