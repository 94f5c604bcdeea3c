"""CORS: pages of allowed origins may read every answer, errors and streams too; others see no difference."""

import asyncio

import httpx
import pytest
from http_context import MODEL, Call, Site, served

from server.config.command_line import parse
from server.config.serve_options import ServeConfig
from server.config.usage_error import UsageError
from server.startup_app import StartupApp

ORIGIN = "https://app.example"
KEYS = {"ann": "key-a"}
PREFLIGHT = {
    "Origin": ORIGIN,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type,x-session-id",
}
ROUTES = ["/v1/chat/completions", "/v1/messages", "/v1/sessions/s", "/v1/responses/r", "/v1/models", "/health", "/no"]


@pytest.mark.parametrize("path", ROUTES)
@served(KEYS, allowed_origins=[ORIGIN])
async def test_a_preflight_needs_no_key_and_is_told_what_may_be_sent(site: Site, path: str) -> None:
    answer = await site.http.options(path, headers=PREFLIGHT)
    assert answer.status_code == 204
    assert answer.content == b""
    assert answer.headers["access-control-allow-origin"] == ORIGIN
    assert {"POST", "GET", "DELETE", "PUT"} <= {*answer.headers["access-control-allow-methods"].split(", ")}
    assert answer.headers["access-control-allow-headers"] == "authorization,content-type,x-session-id"
    assert answer.headers["vary"] == "Origin"
    assert "access-control-allow-credentials" not in answer.headers


@served(KEYS, allowed_origins=[ORIGIN])
async def test_answers_errors_and_streams_can_be_read(site: Site) -> None:
    key = {"Authorization": "Bearer key-a", "Origin": ORIGIN}
    answers = [
        await site.chat(headers=key),
        await site.chat(headers=key, stream=True),
        await site.chat(headers=key, colour="red"),
        await site.chat(headers={"Origin": ORIGIN}),
        await site.http.get("/nothing", headers=key),
        await site.http.delete("/v1/models", headers=key),
    ]
    assert [answer.status_code for answer in answers] == [200, 200, 400, 401, 404, 405]
    for answer in answers:
        assert answer.headers["access-control-allow-origin"] == ORIGIN
        assert "x-request-id" in answer.headers["access-control-expose-headers"]


@served(allowed_origins=[ORIGIN])
async def test_the_last_resort_can_be_read_too(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    site.engine.facts = "broken"  # type: ignore[assignment]
    answer = await site.chat(headers={"Origin": ORIGIN})
    assert answer.status_code == 500
    assert answer.headers["access-control-allow-origin"] == ORIGIN


@served(allowed_origins=[ORIGIN])
async def test_hosts_are_looked_at_behind_a_preflight(site: Site) -> None:
    rebound = {"Host": "evil.example", "Origin": ORIGIN}
    assert (await site.http.options("/v1/models", headers={**PREFLIGHT, "Host": "evil.example"})).status_code == 204
    refused = await site.http.get("/v1/models", headers=rebound)
    assert refused.status_code == 403
    assert refused.json()["error"]["code"] == "host_not_allowed"
    assert refused.headers["access-control-allow-origin"] == ORIGIN


@pytest.mark.parametrize("origin", ["https://evil.example", "http://app.example", f"{ORIGIN}:8443", "null", ""])
@served(allowed_origins=[ORIGIN])
async def test_other_origins_are_answered_as_without_cors(site: Site, origin: str) -> None:
    answer = await site.http.get("/v1/models", headers={"Origin": origin})
    assert answer.status_code == 200
    assert "access-control-allow-origin" not in answer.headers
    assert answer.headers["vary"] == "Origin"
    assert (await site.http.options("/v1/models", headers={**PREFLIGHT, "Origin": origin})).status_code == 405


@served()
async def test_it_is_off_by_default(site: Site) -> None:
    answer = await site.http.get("/v1/models", headers={"Origin": ORIGIN})
    assert not {name for name in answer.headers if name.startswith("access-control") or name == "vary"}
    assert (await site.http.options("/v1/models", headers=PREFLIGHT)).status_code == 405


@served(allowed_origins=["*"])
async def test_a_star_allows_every_page(site: Site) -> None:
    for origin in ("null", "http://localhost:3000"):
        preflight = await site.http.options("/v1/models", headers={**PREFLIGHT, "Origin": origin})
        answer = await site.http.get("/v1/models", headers={"Origin": origin})
        assert preflight.headers["access-control-allow-origin"] == "*"
        assert answer.headers["access-control-allow-origin"] == "*"
        assert "vary" not in answer.headers


@served(allowed_origins=[ORIGIN])
async def test_a_stream_has_its_headers_before_it_ends(site: Site) -> None:
    site.engine.pause_after = 1
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "stream": True}
    call = Call.post(site.app, "/v1/chat/completions", body, headers={"origin": ORIGIN.upper()})
    await call.until(lambda: b"data:" in call.body)
    assert call.headers["access-control-allow-origin"] == ORIGIN.upper()
    assert not call.done
    site.engine.go.set()
    await call.finish()
    assert b"[DONE]" in call.body


def test_a_server_that_loads_can_be_read_too() -> None:
    async def work() -> tuple[httpx.Response, httpx.Response]:
        transport = httpx.ASGITransport(StartupApp([ORIGIN]))
        async with httpx.AsyncClient(transport=transport, base_url="http://warm") as http:
            loading = await http.get("/v1/models", headers={"Origin": ORIGIN})
            return loading, await http.options("/v1/models", headers=PREFLIGHT)

    loading, preflight = asyncio.run(work())
    assert (loading.status_code, preflight.status_code) == (503, 204)
    assert loading.headers["access-control-allow-origin"] == ORIGIN


def test_origins_are_given_by_flag_or_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    given = parse(["serve", "--allow-origin", "https://App.Example", "--allow-origin", "http://localhost:3000"])
    assert isinstance(given, ServeConfig)
    assert given.allow_origin == [ORIGIN, "http://localhost:3000"]
    monkeypatch.setenv("WARMTURN_ALLOW_ORIGIN", "https://a.example,http://[::1]:3000")
    assert ServeConfig().allow_origin == ["https://a.example", "http://[::1]:3000"]


@pytest.mark.parametrize(
    "origin", ["app.example", "https://app.example/", "https://a.example/x", "ftp://a", "", "https://"]
)
def test_what_is_no_origin_is_a_fault_at_start(origin: str) -> None:
    with pytest.raises(UsageError, match="--allow-origin: expected an origin"):
        parse(["serve", "--allow-origin", origin])
