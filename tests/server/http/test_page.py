"""The page's files as they are served: to anybody, with a policy that lets them do nothing but their work."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import re
import subprocess
from pathlib import Path

import httpx
import pytest
from http_context import Call, Site, served

from server.http.page import ASSETS, FOLDER
from server.startup_app import StartupApp

KEYS = {"ann": "key-a"}
KEY = {"authorization": "Bearer key-a"}
VENDORED = re.compile(r"^\| (\S+/\S+) \| `([0-9a-f]{64})` \|$", re.MULTILINE)
BROWSER = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


@pytest.mark.parametrize("path", sorted(ASSETS))
@served(KEYS)
async def test_a_file_needs_no_key_and_comes_with_the_policy(site: Site, path: str) -> None:
    response = await site.http.get(path)
    assert response.status_code == 200
    assert response.content == ASSETS[path].body
    assert response.headers["content-encoding"] == "gzip"
    assert response.headers["x-content-type-options"] == "nosniff"
    policy = dict(rule.split(" ", 1) for rule in response.headers["content-security-policy"].split("; "))
    assert (policy["default-src"], policy["connect-src"]) == ("'none'", "'self'")
    assert (policy["script-src"], policy["style-src"], policy["frame-ancestors"]) == ("'self'", "'self'", "'none'")
    assert "unsafe" not in str(policy)
    assert policy["require-trusted-types-for"] == "'script'"


@served()
async def test_a_file_that_has_not_changed_is_not_sent_again(site: Site) -> None:
    plain = {"accept-encoding": "identity"}
    first = await site.http.get("/ui/app.js", headers=plain)
    assert first.content == (FOLDER / "app.js").read_bytes()
    assert first.headers["content-type"] == "text/javascript; charset=utf-8"
    etag = first.headers["etag"]
    for tags in (etag, f"W/{etag}", f'"other", {etag}', "*"):
        again = await site.http.get("/ui/app.js", headers={**plain, "if-none-match": tags})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", etag)
    other = await site.http.get("/ui/base.css", headers={**plain, "if-none-match": etag})
    assert other.status_code == 200
    head = await site.http.head("/ui/app.js", headers=plain)
    assert (head.status_code, head.headers["etag"]) == (200, etag)
    zipped = await site.http.get("/ui/app.js", headers={"if-none-match": etag})
    assert (zipped.status_code, zipped.headers["etag"] == etag) == (200, False)  # other bytes
    assert gzip.decompress(ASSETS["/ui/app.js"].zipped) == first.content


@pytest.mark.parametrize("path", ["/", "/ui"])
@served(KEYS)
async def test_a_browser_is_shown_the_way_and_the_host_it_claims_is_not_repeated(site: Site, path: str) -> None:
    response = await site.http.get(path, headers={**BROWSER, "host": "elsewhere.example"})
    assert (response.status_code, response.headers["location"]) == (303, "ui/")
    followed = await site.http.get(path, headers=BROWSER, follow_redirects=True)
    assert followed.text == (FOLDER / "index.html").read_text()


@served(KEYS)
async def test_nothing_else_is_open(site: Site) -> None:
    for path in (
        "/ui/vendor/README.md",
        "/ui/nothing.js",
        "/ui/../page.py",
        "/ui/../v1/sessions",
        "/ui//app.js",
        "/UI/app.js",
        "/ui/app.js/",
        "//ui/app.js",
        "/index.html",
        "/",
    ):
        assert await status(site, "GET", path) == 401, path
        assert await status(site, "GET", path, KEY) == 404, path
    for path in ("/", "/ui", "/ui/", "/ui/app.js"):
        assert await status(site, "POST", path) == 401, path
        assert await status(site, "POST", path, KEY) == 405, path


async def status(site: Site, method: str, path: str, headers: dict[str, str] | None = None) -> int:
    """What a request with this very path is answered: clients would tidy it up."""
    call = Call.post(site.app, path, None, method=method, headers=headers)
    await call.until(lambda: call.done)
    await call.leave()
    return call.status


@served()
async def test_without_keys_a_strange_host_does_not_get_the_page(site: Site) -> None:
    response = await site.http.get("/ui/", headers={"host": "rebound.example"})
    assert (response.status_code, response.json()["error"]["code"]) == (403, "host_not_allowed")


def test_the_page_is_there_while_the_model_loads() -> None:
    async def run() -> None:
        transport = httpx.ASGITransport(StartupApp())
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            assert (await client.get("/ui/")).content == (FOLDER / "index.html").read_bytes()
            assert (await client.get("/ui/nothing")).status_code == 503

    asyncio.run(run())


def test_modules_of_others_are_what_their_table_says() -> None:
    vendor = FOLDER / "vendor"
    listed = dict(VENDORED.findall((vendor / "README.md").read_text()))
    there = {path.relative_to(vendor).as_posix() for path in vendor.rglob("*") if path.is_file()} - {"README.md"}
    assert there == {*listed}
    for name, digest in listed.items():
        assert hashlib.sha256((vendor / name).read_bytes()).hexdigest() == digest, name
    for folder in vendor.iterdir():
        assert folder.name == "README.md" or (folder / "LICENSE").is_file(), folder


def test_every_import_of_the_page_is_a_file_of_it_and_nothing_is_inline() -> None:
    page = "".join(path.read_text() for path in FOLDER.glob("*.html"))
    assert not re.search(r"<style|\son\w+=|style=|<script(?![^>]*\ssrc=)", page)
    sources = {path: path.read_text() for path in FOLDER.glob("*.js")}
    wanted = {path.parent / name for path, text in sources.items() for name in re.findall(r'from "(.+?)";', text)}
    wanted |= {FOLDER / name for name in re.findall(r'(?:src|href)="([^#"]+)"', page)}
    wanted |= {path.parent / name for path, text in sources.items() for name in re.findall(r'import\("(.+?)"\)', text)}
    assert len(wanted) > 12
    assert [path for path in wanted if not path.is_file()] == []
    assert {path.resolve() for path in sources} <= {path.resolve() for path in wanted}
    for text in sources.values():
        assert not re.search(r"\beval\(|new Function|https?://", text)


def test_the_files_go_into_the_wheel() -> None:
    """The wheel has all of ``server/`` that git does not ignore."""
    root = FOLDER.parent.parent
    if not (root / ".git").exists():
        pytest.skip("this is no checkout")
    files = [str(path.relative_to(root)) for path in FOLDER.rglob("*") if path.is_file()]
    ran = subprocess.run(["git", "check-ignore", *files], cwd=root, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (1, "")
    assert Path(FOLDER / "vendor").is_dir()
