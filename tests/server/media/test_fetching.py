"""Fetching over real connections: to the address that was checked, under the host's name, without proxies."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
from pathlib import Path

import httpx
import pytest
from media_kit import png

from server.media import targets
from server.media.addresses import is_public
from server.media.fetching import Fetcher
from server.media.media_limits import MediaRefused
from server.media.targets import target_of

HOST = "pictures.example"
PUBLIC = ("93.184.216.34", "8.8.8.8", "1.1.1.1", "2606:4700:4700::1111", "2a00:1450:4001:82b::200e")
NOT_PUBLIC = (
    "0.0.0.0 10.1.2.3 100.64.0.1 127.0.0.1 127.255.255.254 169.254.169.254 172.16.0.1 172.31.255.255 192.0.0.8 "
    "192.0.2.1 192.88.99.1 192.168.0.1 198.18.0.1 198.51.100.7 203.0.113.9 224.0.0.1 239.255.255.255 240.0.0.1 "
    "255.255.255.255 :: ::1 ::ffff:8.8.8.8 ::ffff:10.0.0.1 ::8.8.8.8 64:ff9b::808:808 64:ff9b:1::1 100::1 2001::1 "
    "2001:db8::1 2001:10::1 2002:808:808::1 3fff::1 fc00::1 fd12::1 fe80::1 fe80::1%eth0 fec0::1 ff02::1 "
    "2606:4700:4700::1111%1 localhost 2130706433 0x7f.1 0177.0.0.1"
).split()


@pytest.mark.parametrize("address", PUBLIC)
def test_public_addresses_may_be_connected_to(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize("address", NOT_PUBLIC)
def test_no_other_address_may_be(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize(
    ("url", "path"),
    [
        (f"http://{HOST}", "/"),
        (f"HTTPS://{HOST.upper()}./a?b=c#d", "/a?b=c"),
        (f"http://{HOST}:80/a%20b", "/a%20b"),
        (f"http://{HOST}?x", "/?x"),
    ],
)
def test_a_named_host_is_a_target(url: str, path: str) -> None:
    found = target_of(url, [HOST])
    assert (found.host, found.path) == (HOST, path)


class Origin:
    """A server on loopback that keeps the heads of what was asked."""

    def __init__(self, answer: bytes, context: ssl.SSLContext | None = None) -> None:
        self.heads: list[bytes] = []
        self._answer, self._context = answer, context

    async def __aenter__(self) -> Origin:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._context)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(self._answer) + self._answer)
        await writer.drain()
        writer.close()


def fetched(origin: Origin, url: str, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """What is fetched of a URL whose host is resolved to the origin."""
    resolved: list[str] = []

    async def resolve(host: str, port: int) -> list[str]:
        resolved.append(host)
        return ["127.0.0.1"]

    async def run() -> bytes:
        async with origin:
            monkeypatch.setattr(targets, "PORTS", {"http": origin.port, "https": origin.port})
            fetcher = Fetcher([HOST], resolve, allows=lambda address: address == "127.0.0.1")
            try:
                return await fetcher.fetch(url)
            finally:
                await fetcher.close()
                assert resolved == [HOST]

    return asyncio.run(run())


def test_the_host_is_asked_by_its_name_at_the_address_that_was_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    origin = Origin(png())
    assert fetched(origin, f"http://{HOST}/a%20b?c=1", monkeypatch) == png()
    (head,) = origin.heads
    assert head.startswith(b"GET /a%20b?c=1 HTTP/1.1\r\n")
    assert b"host: pictures.example\r\n" in head.lower()
    assert b"accept-encoding: identity\r\n" in head.lower()
    assert b"cookie" not in head.lower()


@pytest.mark.parametrize("name", [HOST, "other.example"])
def test_the_certificate_must_be_the_hosts(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-keyout", str(key)]
    command += ["-out", str(certificate), "-subj", f"/CN={name}", "-addext", f"subjectAltName=DNS:{name}"]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("openssl is not installed")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    trusting = ssl.create_default_context(cafile=str(certificate))
    plain = httpx.AsyncClient
    monkeypatch.setattr(httpx, "AsyncClient", lambda **options: plain(verify=trusting, **options))
    if name == HOST:
        assert fetched(Origin(png(), context), f"https://{HOST}/", monkeypatch) == png()
    else:
        with pytest.raises(MediaRefused, match="could not be fetched"):
            fetched(Origin(png(), context), f"https://{HOST}/", monkeypatch)
