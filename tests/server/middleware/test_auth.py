"""Keys: every route but /health needs one, tenants are their names, request ids come back."""

from typing import Any

import pytest
from http_context import Site, served

from server.middleware.auth import DEFAULT_TENANT, Hosts, Keyring

KEYS = {"ann": "key-a", "bob": "kéy-b"}
ROUTES = [
    ("GET", "/v1/models"),
    ("GET", "/v1/models/demo"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/sessions/s/chat/completions"),
    ("GET", "/metrics"),
    ("GET", "/openapi.json"),
    ("GET", "/nothing"),
    ("GET", "/health/"),
    ("GET", "/health/live/"),
    ("GET", "/health/other"),
    ("GET", "//health"),
    ("GET", "/Health"),
    ("GET", "/health%2f.."),
    ("OPTIONS", "/v1/models"),
]


@pytest.mark.parametrize(("method", "path"), ROUTES)
@pytest.mark.parametrize(
    "key", [None, "Bearer wrong", "Bearer ", "Bearer key-a2", "Basic key-a", "key-a", "Bearer key"]
)
@served(KEYS)
async def test_every_route_needs_a_valid_key(site: Site, method: str, path: str, key: str | None) -> None:
    headers = {} if key is None else {"Authorization": key}
    response = await site.http.request(method, path, headers=headers)
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    assert response.headers["x-request-id"]
    error = response.json()["error"]
    assert (error["type"], error["code"], error["param"]) == ("authentication_error", "invalid_api_key", None)


@served(KEYS)
async def test_health_is_open_and_the_host_header_opens_nothing(site: Site) -> None:
    assert (await site.http.get("/health")).status_code == 200
    assert (await site.http.get("/health/live")).status_code == 200
    for host in ("x/health?", "warm/health"):
        assert (await site.http.get("/v1/models", headers={"Host": host})).status_code == 401


@pytest.mark.parametrize("authorization", ["Bearer key-a", "bearer key-a", "Bearer  key-a "])
@served(KEYS)
async def test_a_key_opens_and_names_its_tenant(site: Site, authorization: str) -> None:
    assert (await site.chat(headers={"Authorization": authorization})).status_code == 200
    assert site.engine.submitted[0].tenant == "ann"


@served(KEYS)
async def test_two_keys_at_once_are_none(site: Site) -> None:
    headers: Any = [("Authorization", "Bearer key-a"), ("Authorization", "Bearer wrong")]
    assert (await site.http.get("/v1/models", headers=headers)).status_code == 401


def tenant_of(keyring: Keyring, authorization: bytes | None) -> str | None:
    access = keyring.access(authorization)
    return None if access is None else access.tenant


def test_keys_are_bytes_and_need_not_be_ascii() -> None:
    keyring = Keyring(KEYS)
    assert tenant_of(keyring, "Bearer kéy-b".encode()) == "bob"
    assert tenant_of(keyring, b"Bearer \xff\xfe") is None
    assert tenant_of(keyring, b"") is None


def test_without_keys_everybody_is_one_tenant() -> None:
    assert tenant_of(Keyring({}), None) == DEFAULT_TENANT
    assert tenant_of(Keyring({}), b"Bearer whatever") == DEFAULT_TENANT


@served()
async def test_request_ids_come_back_if_they_are_harmless(site: Site) -> None:
    for given in ("abc-1.2_3", "x" * 128):
        response = await site.http.get("/health", headers={"X-Request-ID": given})
        assert response.headers["x-request-id"] == given
    for given in ("", "a b", "x" * 129, "<b>", "http://x"):
        response = await site.http.get("/health", headers={"X-Request-ID": given})
        assert len(response.headers["x-request-id"]) == 32
    ids = {(await site.http.get("/health")).headers["x-request-id"] for _ in range(3)}
    assert len(ids) == 3


@served()
async def test_streams_and_errors_carry_a_request_id_too(site: Site) -> None:
    for response in (await site.chat(stream=True), await site.chat(foo=1), await site.http.get("/nothing")):
        assert response.headers["x-request-id"]


@served(KEYS)
async def test_websockets_that_nobody_serves_are_closed(site: Site) -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    await site.app({"type": "websocket", "path": "/health", "headers": [], "query_string": b""}, receive, send)
    assert [message["type"] for message in sent] == ["websocket.close"]


@pytest.mark.parametrize(
    "host",
    [
        *("localhost", "localhost:8000", "LOCALHOST", "localhost.", "127.0.0.1", "127.0.0.1:8000", "10.1.2.3:80"),
        *("[::1]", "[::1]:8000", "[2001:db8::1]", "our.name", "OUR.name:8000"),
    ],
)
def test_without_keys_a_server_answers_to_addresses_localhost_and_its_names(host: str) -> None:
    assert Hosts(["our.name"]).allow([host])


@pytest.mark.parametrize(
    "host",
    [
        *("evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "our.name.example"),
        *(
            "",
            " ",
            "[::1",
            "[evil.example]",
            "localhost/",
            "localhost@evil.example",
            "evil.example#127.0.0.1",
            "*",
            "a,b",
        ),
    ],
)
def test_a_name_that_anybody_can_point_here_is_refused(host: str) -> None:
    assert not Hosts(["our.name"]).allow([host])


def test_hosts_are_one_or_none_and_a_star_is_all() -> None:
    assert Hosts([]).allow([])
    assert not Hosts([]).allow(["localhost", "evil.example"])
    assert not Hosts([]).allow(["127.0.0.1", "evil.example"])
    assert Hosts(["*"]).allow(["evil.example"])


@served()
async def test_a_page_of_another_name_gets_nothing_but_the_health(site: Site) -> None:
    for method, path in (("GET", "/v1/models"), ("POST", "/v1/chat/completions"), ("GET", "/metrics"), ("GET", "/x")):
        response = await site.http.request(method, path, headers={"host": "evil.example:8000"})
        assert (response.status_code, response.json()["error"]["code"]) == (403, "host_not_allowed")
        assert "evil" not in response.text
    assert (await site.http.get("/health", headers={"host": "evil.example"})).status_code == 200


@served(KEYS)
async def test_where_keys_are_hosts_do_not_matter(site: Site) -> None:
    headers = {"host": "proxy.example", "authorization": "Bearer key-a"}
    assert (await site.http.get("/v1/models", headers=headers)).status_code == 200
