"""`RemoteServer`: a JSON client of a running server's sessions and models."""

from __future__ import annotations

import contextlib
from typing import Any
from urllib.parse import quote

import httpx

from server.config.usage_error import UsageError

Answer = dict[str, Any]


class RequestFailed(Exception):
    """The server refused the request; the text is one line for the user."""


class RemoteServer:
    """A JSON client of the server. Raises RequestFailed for every answer but a 2xx."""

    def __init__(self, http: httpx.Client) -> None:
        self.http = http

    def ask(self, method: str, path: str = "", body: Answer | None = None, parameters: Answer | None = None) -> Answer:
        """One request below /v1/sessions. Values that are None are left out of body and parameters, but for those
        of the body under a key that ends in "!", which is dropped."""
        content = None
        if body is not None:
            content = {k.removesuffix("!"): v for k, v in body.items() if v is not None or k.endswith("!")}
        wanted = {k: v for k, v in (parameters or {}).items() if v is not None}
        return self.read(self.http.request(method, f"/v1/sessions{path}", json=content, params=wanted or None))

    def read(self, response: httpx.Response) -> Answer:
        """The answer's object. Raises RequestFailed, and UsageError when no server answers."""
        if response.status_code == 401:
            raise UsageError("--api-key: the server refused this key, or needs one")
        if not response.is_success:
            raise RequestFailed(explain(response))
        try:
            answer = response.json()
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise RequestFailed("the program at this address does not have this API")
        return answer

    def first_model(self, url: str) -> Answer:
        """The object of the first model served. Raises UsageError when there is no server, no access or no model."""
        try:
            response = self.http.get("/v1/models")
        except httpx.HTTPError:
            raise no_server(url) from None
        if response.status_code == 401:
            raise UsageError("--api-key: the server refused this key, or needs one")
        if response.status_code != 200:
            raise UsageError(f"the server at {url} says: {explain(response)}")
        try:
            model: Answer = response.json()["data"][0]
            model["id"]
        except (ValueError, LookupError, TypeError):
            raise UsageError(f"--url: the program at {url} does not have OpenAI's API") from None
        return model


def session_path(name: str) -> str:
    """The path of a session below /v1/sessions. Raises UsageError for what would be a path to something else."""
    if "/" in name or name in ("", ".", ".."):
        raise UsageError("SESSION: no session can have this id")
    return "/" + quote(name, safe=":@")


def base_url(url: str) -> str:
    """The address of the server, of which ``url`` may also be that of its API."""
    return url.rstrip("/").removesuffix("/v1")


def key_header(api_key: str | None) -> dict[str, str]:
    return {"authorization": f"Bearer {api_key}"} if api_key else {}


def no_server(url: str) -> UsageError:
    """What is said where nothing answers."""
    return UsageError(f"no server answers at {url}; `warmturn serve` starts one")


def explain(response: httpx.Response) -> str:
    """An error response in one line."""
    with contextlib.suppress(ValueError, LookupError, TypeError):
        return str(response.json()["error"]["message"])
    return f"HTTP {response.status_code}"
