"""Which session a URL names: told alike by our router and by nginx's maps."""

from __future__ import annotations

import json
import pickle
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from server.http.routing import session_of
from server.lines.hints import HEADERS
from server.log.identity import HEADER
from server.schemas.items import new_id
from server.turns.replies import ReplyHead

ROOT = Path(__file__).resolve().parent.parent.parent
NGINX = (ROOT / "deploy" / "nginx.conf").read_text()
URLS = {
    "/v1/sessions/alice": "alice",
    "/v1/sessions/alice/": "alice",
    "/v1/sessions/a.b:c@d-e_f/messages/3": "a.b:c@d-e_f",
    "/v1/sessions/alice/chat/completions": "alice",
    "/v1/sessions": None,
    "/v1/sessions/": None,
    "/v1/sessions/a b": None,
    "/v1/conversations/conv_7c/items": "7c",
    "/v1/conversations/conv_a_b": "a_b",
    "/v1/conversations/other": None,
    "/v1/responses/resp_chain-5f_9a": "chain-5f",
    "/v1/responses/resp_a_b_9a/cancel": "a_b",
    "/v1/responses/resp_9a": None,
    "/v1/responses/input_tokens": None,
    "/v1/chat/completions": None,
    "/": None,
    "/x/v1/sessions/alice": None,
}


@pytest.mark.parametrize("url", URLS)
def test_the_session_of_a_url(url: str) -> None:
    assert session_of(url) == URLS[url]


@pytest.mark.parametrize("url", URLS)
def test_nginx_says_the_same(url: str) -> None:
    body = re.search(r"map \$uri \$named \{(.*?)\n    \}", NGINX, re.DOTALL)
    assert body is not None
    patterns = re.findall(r'"~(\^[^"]+)" \$of_', body[1])
    assert len(patterns) == 3
    found = next((match for pattern in patterns if (match := re.search(pattern.replace("(?<", "(?P<"), url))), None)
    assert (found.group(1) if found else None) == URLS[url]


@pytest.mark.parametrize(("query", "session"), [(b"id=alice", "alice"), (b"x=1&id=a%40b", "a@b"), (b"", None)])
def test_an_import_names_the_session_that_it_makes(query: bytes, session: str | None) -> None:
    assert session_of("/v1/sessions/import", query) == session


@pytest.mark.parametrize("name", ["alice", "a_b", "a-b_c", "chain-5f"])
def test_ids_have_the_session_in_them(name: str) -> None:
    assert session_of(f"/v1/responses/{new_id('resp', name)}") == name
    id = ReplyHead.new("chatcmpl", "m", "f", name).id
    assert id.removeprefix("chatcmpl-").rpartition("-")[0] == name


class Pickled:
    """A request's head as Ray's proxy hands it to the router."""

    def __init__(self, path: str, headers: dict[str, str]) -> None:
        raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        self.asgi_scope = {"path": path, "query_string": b"", "headers": raw}


def test_rays_router_looks_at_the_header_then_at_the_url(ray: None) -> None:
    from server.cluster.router import SessionRouter

    def key(session: str, path: str, http: bool = True, **headers: str) -> str | None:
        metadata = SimpleNamespace(session_id=session, internal_request_id="random", is_http_request=http)
        request = SimpleNamespace(metadata=metadata, args=[pickle.dumps(Pickled(path, headers))])
        return SessionRouter._routing_key(object.__new__(SessionRouter), request)

    assert key("header", "/v1/sessions/path") == "header"
    assert key("", "/v1/sessions/path") == "path"
    assert key("", "/v1/models") == "random"
    assert key("", "/v1/sessions/path", http=False) == "random"
    assert key("", "/v1/messages", thread_id="t", accept="x") == "t"
    assert key("", "/v1/sessions/path", thread_id="t") == "path"
    assert key("", "/v1/responses", x_warmturn_conversation="c") == "c"
    assert key("", "/v1/responses", x_warmturn_conversation="c", thread_id="t") == "t"


def test_rays_proxy_takes_the_middleware_from_the_environment(ray: None) -> None:
    from ray._common.utils import import_attr
    from ray.serve._private.http_util import validate_http_proxy_callback_return

    from server.cluster.ray_serve import PROXY_CALLBACK

    assert validate_http_proxy_callback_return(import_attr(PROXY_CALLBACK[1])())


def test_the_headers_that_clients_send_are_those_of_the_docs() -> None:
    sent: dict[str, set[str]] = {}
    for file in (ROOT / "tests" / "agents" / "recordings").glob("*/*.json"):
        headers = {name.lower(): value for name, value in json.loads(file.read_text())["headers"].items()}
        named = [name for name in HEADERS if headers.get(name)]
        sent.setdefault(file.parent.name, set()).update(named[:1])
    assert {client: names for client, names in sent.items() if names} == {
        "claude": {"x-claude-code-session-id"},
        "codex": {"thread-id"},
        "codex-websocket": {"thread-id"},
        "goose": {"agent-session-id"},
        "librechat": {HEADER},  # with our setting
        "open-webui": {"x-openwebui-chat-id"},
        "opencode": {"x-session-affinity"},
    }
    table = (ROOT / "docs" / "cluster.md").read_text().lower()
    assert all(f"`{name}`" in table for names in sent.values() for name in names)


def test_nginx_looks_at_every_header_that_may_name_a_conversation() -> None:
    body = re.search(r'map "((?:\$http_[a-z_]+)+)" \$conversation', NGINX)
    assert body is not None
    named = [name.replace("_", "-") for name in re.findall(r"\$http_([a-z_]+)", body[1])]
    assert {*named} == {name for name in HEADERS if "_" not in name} - {HEADER}  # nginx drops headers with underscores
    assert named == [name for name in HEADERS if name in named]
