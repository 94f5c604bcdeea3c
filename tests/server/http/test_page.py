"""The page's files as they are served: to anybody, with a policy that lets them do nothing but their work."""

from __future__ import annotations

import gzip
import hashlib
import re
import subprocess
from pathlib import Path

import httpx
import pytest
from http_context import Call, Site, served

from server.http.page import ASSETS, PAGES, version
from server.http.page_script import EXPORT, FOLDER, IMPORT, imported, joined, source
from server.startup_app import StartupApp

KEYS = {"ann": "key-a"}
KEY = {"authorization": "Bearer key-a"}
VENDORED = re.compile(r"^\| (\S+/\S+) \| `([0-9a-f]{64})` \|$", re.MULTILINE)
BROWSER = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


@pytest.mark.parametrize("path", sorted(ASSETS | PAGES))
@served(KEYS)
async def test_a_file_needs_no_key_and_comes_with_the_policy(site: Site, path: str) -> None:
    response = await site.http.get(path)
    assert response.status_code == 200
    assert response.content == (ASSETS | PAGES)[path].body
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


@served(KEYS)
async def test_a_document_names_all_its_files_by_addresses_that_are_kept(site: Site) -> None:
    for path in ("/ui/", "/ui/shared.html"):
        document = await site.http.get(path)
        assert document.headers["cache-control"] == "no-cache"
        named = set(re.findall(r'(?:src|href)="(.+?)"', document.text)) - {"manifest.webmanifest", "#composer"}
        assert {name.split("/")[0] for name in named} == {f"v-{version()}"}
        assert sum(name.endswith(".css") for name in named) == 1
        modules = {name.partition("/")[2] for name in named if name.endswith(("js", "mjs"))}
        assert len(modules) <= 4
        (script,) = [name for name in modules if "/" not in name]
        text = (await site.http.get(f"/ui/{script}")).text
        assert set(re.findall(r'from "\./(.+?)";', text)) == modules - {script}  # nothing is found out late
        for name in named:
            kept = await site.http.get(f"/ui/{name}")
            assert (kept.status_code, kept.headers["cache-control"].split(", ")[-1]) == (200, "immutable")
    styles = (await site.http.get(f"/ui/v-{version()}/index.css")).text
    order = re.findall(r'stylesheet" href="(.+?)"', (FOLDER / "index.html").read_text())
    assert styles == "".join((FOLDER / name).read_text() for name in order)


@served(KEYS)
async def test_a_tab_of_another_version_gets_the_files_of_this_one_and_does_not_keep_them(site: Site) -> None:
    older = await site.http.get(f"/ui/v-{'0' * 16}/math.js")
    assert older.content == (FOLDER / "math.js").read_bytes()
    assert older.headers["cache-control"] == "no-cache"
    for path in (f"/ui/v-{version()}/nothing.js", f"/ui/v-{version()}/index.html", f"/ui/v-{version()}//app.js"):
        assert await status(site, "GET", path) == 401, path


@pytest.mark.parametrize("path", ["/", "/ui"])
@served(KEYS)
async def test_a_browser_is_shown_the_way_and_the_host_it_claims_is_not_repeated(site: Site, path: str) -> None:
    response = await site.http.get(path, headers={**BROWSER, "host": "elsewhere.example"})
    assert (response.status_code, response.headers["location"]) == (303, "ui/")
    followed = await site.http.get(path, headers=BROWSER, follow_redirects=True)
    assert followed.content == PAGES["/ui/"].body


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


async def test_the_page_is_there_while_the_model_loads() -> None:
    transport = httpx.ASGITransport(StartupApp())
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        assert (await client.get("/ui/")).content == PAGES["/ui/"].body
        assert (await client.get("/ui/nothing")).status_code == 503


def test_modules_of_others_are_what_their_table_says() -> None:
    vendor = FOLDER / "vendor"
    listed = dict(VENDORED.findall((vendor / "README.md").read_text()))
    there = {path.relative_to(vendor).as_posix() for path in vendor.rglob("*") if path.is_file()} - {"README.md"}
    assert there == {*listed}
    for name, digest in listed.items():
        assert hashlib.sha256((vendor / name).read_bytes()).hexdigest() == digest, name
    for folder in vendor.iterdir():
        assert folder.name == "README.md" or (folder / "LICENSE").is_file(), folder


@pytest.mark.parametrize("name", ["app.js", "shared.js"])
def test_the_modules_can_be_joined(name: str) -> None:
    """Each stands behind what it imports, has exports that are never assigned again, and nothing else is an import."""
    names = imported(name)
    for at, one in enumerate(names):
        if one.startswith("vendor/"):
            continue
        text = source(one)
        assert all(other in names[:at] for _, _, other in IMPORT.findall(text)), one
        assert len(IMPORT.findall(text)) == len(re.findall(r"^import\b", text, re.MULTILINE))
        assert len(EXPORT.findall(text)) == len(re.findall(r"^export\b", text, re.MULTILINE))
    whole = joined(name)
    assert not re.search(r"^export\b", whole, re.MULTILINE)
    assert all(line.startswith("import * as $other") for line in re.findall(r"^import\b.*", whole, re.MULTILINE))


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
