"""Capsules: what is exported comes back, anything else is refused, and nothing is left behind."""

import asyncio
import base64
import errno
import hashlib
import io
import json
import random
import shutil
import struct
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from http_context import HELLO, MAX_CAPSULE, Call, Site, served, until

from scheduler.protocol import Exported, unpack_ids
from server.api.sessions import capsule
from server.api.sessions.capsule import Capsule, CapsuleFacts, Member
from server.api.sessions.transfers import AT_ONCE, Transfers
from server.config.usage_error import UsageError
from server.engine.engine import EngineDied, EngineUnavailable

URL = "/v1/sessions"
ZIP = {"content-type": "application/zip"}
MORE = [{"role": "user", "content": "And now?"}]
KEYS = {"ann": "key-a", "bob": "key-b"}
ANN = {"Authorization": "Bearer key-a"}
BOB = {"Authorization": "Bearer key-b"}
KV = [b"first segment", b"", b"x" * 3000]


async def make(site: Site, name: str = "s", tenant: str = "default", **kwargs: Any) -> bytes:
    """A session with two turns, metadata and KV; its capsule."""
    for number in range(2):
        await site.chat(session_id=name, messages=[{"role": "user", "content": f"Question {number}"}], **kwargs)
    await site.http.post(f"{URL}/{name}", json={"metadata": {"team": "ä"}, "ttl_seconds": 600}, **kwargs)
    site.engine.kv[tenant, name] = list(KV)
    response = await site.http.get(f"{URL}/{name}/export", **kwargs)
    assert response.status_code == 200
    return response.content


async def bring(site: Site, data: bytes, query: str = "", headers: Any = None) -> httpx.Response:
    return await site.http.post(f"{URL}/import{query}", content=data, headers={**ZIP, **(headers or {})})


def members(data: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.testzip() is None
        return {name: archive.read(name) for name in archive.namelist()}


def sealed(parts: dict[str, bytes]) -> bytes:
    """A capsule of these members as they are, with the checksums of a real one where a reader looks first."""
    made = [Member(name, len(data), zlib.crc32(data), data) for name, data in parts.items()]
    return b"".join(Capsule(made).chunks())


def forged(data: bytes, change: Callable[[dict[str, Any], dict[str, bytes]], object]) -> bytes:
    """The capsule with ``change(facts, members)`` made, and checksums that fit again."""
    parts = members(data)
    facts = json.loads(parts["capsule.json"])
    change(facts, parts)
    for member in facts["members"]:
        if member["name"] in parts:
            member["size"] = len(parts[member["name"]])
            member["sha256"] = hashlib.sha256(parts[member["name"]]).hexdigest()
    return sealed({**parts, "capsule.json": json.dumps(facts).encode()})


def left_behind(site: Site) -> list[Path]:
    folder: Path = site.app.state.transfers._folder
    return list(folder.iterdir())


def invalid(response: httpx.Response) -> None:
    assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_capsule"), response.text


# --- there and back -----------------------------------------------------------------------------------------


@served()
async def test_a_capsule_is_a_zip_that_says_what_is_in_it(site: Site) -> None:
    data = await make(site)
    response = await site.http.get(f"{URL}/s/export")
    assert response.headers["content-type"] == "application/zip"
    assert int(response.headers["content-length"]) == len(data)
    assert 'filename="s.zip"' in response.headers["content-disposition"]
    parts = members(data)
    assert list(parts) == ["capsule.json", "turns.json", "kv/000000.kv", "kv/000001.kv", "kv/000002.kv"]
    assert [parts[name] for name in list(parts)[2:]] == KV
    facts = json.loads(parts["capsule.json"])
    assert facts["session"] == {"id": "s", "metadata": {"team": "ä"}, "ttl_seconds": 600}
    assert (facts["turns"], facts["kv_tokens"], facts["model"]) == (2, sum(map(len, KV)), "demo")
    for member in facts["members"]:
        assert hashlib.sha256(parts[member["name"]]).hexdigest() == member["sha256"]
    assert left_behind(site) == []


@served(KEYS)
async def test_what_was_exported_comes_back_whole(site: Site) -> None:
    data = await make(site, tenant="ann", headers=ANN)
    assert site.engine.facts is not None
    response = await bring(site, data, headers=BOB)
    assert response.status_code == 201, response.text
    made = response.json()
    before = (await site.http.get(f"{URL}/s", headers=ANN)).json()
    assert {**made, "imported": 0} == {
        **before,
        "created_at": made["created_at"],
        "last_used_at": made["last_used_at"],
        "expires_at": made["expires_at"],
        "imported": 0,
    }
    assert made["imported"] == {
        "turns": 2,
        "tokens": before["tokens"],
        "kv_tokens": sum(map(len, KV)),
        "reason": None,
    }
    assert site.engine.kv["bob", "s"] == KV
    ours, theirs = await site.log.get("ann", "s"), await site.log.get("bob", "s")
    assert ours is not None
    assert theirs is not None
    assert [unpack_ids(ids).tolist() for ids in site.engine.exported] == [ours.tokens]
    turns = tuple(replace(turn, receipt=None) for turn in ours.turns)  # which may tell of words that were edited away
    assert (ours.tokens, ours.messages, turns) == (theirs.tokens, theirs.messages, theirs.turns)
    await site.chat(session_id="s", messages=MORE, headers=BOB)
    assert site.prompt_ids()[: len(ours.tokens)] == ours.tokens
    assert left_behind(site) == []


@served()
async def test_an_import_needs_a_free_id(site: Site) -> None:
    data = await make(site)
    response = await bring(site, data)
    assert (response.status_code, response.json()["error"]["code"]) == (409, "session_exists")
    assert (await bring(site, data, "?id=t")).json()["id"] == "t"
    for query, param in (("?id=a%20b", "id"), ("?id=import", "id"), ("?name=t", "name")):
        response = await bring(site, data, query)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    with site.log.claim("default", "u"):
        assert (await bring(site, data, "?id=u")).status_code == 409
    assert left_behind(site) == []


@served()
async def test_an_export_may_leave_the_cache_out(site: Site) -> None:
    await make(site)
    site.engine.call_failure = EngineDied("gone")
    assert (await site.http.get(f"{URL}/s/export")).status_code == 503
    data = (await site.http.get(f"{URL}/s/export?kv=false")).content
    assert list(members(data)) == ["capsule.json", "turns.json"]
    site.engine.call_failure = None
    made = (await bring(site, data, "?id=t")).json()
    assert (made["imported"]["kv_tokens"], made["imported"]["reason"]) == (0, "no_kv")
    assert (await site.http.get(f"{URL}/s/export?kv=maybe")).json()["error"]["param"] == "kv"


@served()
async def test_a_session_without_a_turn_is_a_capsule_too(site: Site) -> None:
    await site.http.post(URL, json={"id": "s", "messages": HELLO})
    data = (await site.http.get(f"{URL}/s/export")).content
    made = (await bring(site, data, "?id=t")).json()
    assert made["imported"] == {"turns": 0, "tokens": 0, "kv_tokens": 0, "reason": None}
    assert made["messages"] == 1


@served()
async def test_under_another_model_the_log_is_replayed(site: Site) -> None:
    data = await make(site)
    assert site.engine.facts is not None
    site.engine.facts = msgspec.structs.replace(site.engine.facts, fingerprint="e" * 32, vocab_size=300)
    made = (await bring(site, data, "?id=t")).json()
    assert (made["imported"]["kv_tokens"], made["imported"]["reason"]) == (0, "fingerprint")
    assert ("default", "t") not in site.engine.kv
    assert made["model_matches"] is False
    site.engine.facts = msgspec.structs.replace(site.engine.facts, vocab_size=1024)
    await site.chat(session_id="t", messages=MORE)
    assert site.prompt().count("Question") == 2


@pytest.mark.parametrize("failure", [EngineDied("gone"), None])
@served()
async def test_a_cache_that_is_not_taken_costs_only_time(site: Site, failure: Exception | None) -> None:
    data = await make(site)
    site.engine.call_failure, site.engine.import_reason = failure, "damaged"
    made = (await bring(site, data, "?id=t")).json()
    assert made["imported"]["kv_tokens"] == 0
    assert made["imported"]["reason"] == ("engine_unavailable" if failure else "damaged")
    site.engine.call_failure = None
    assert (await site.chat(session_id="t", messages=MORE)).status_code == 200


@served()
async def test_without_an_engine_nothing_is_imported(site: Site) -> None:
    data = await make(site)
    site.engine.facts = None
    response = await bring(site, data, "?id=t")
    assert response.status_code == 503
    assert int(response.headers["retry-after"]) >= 1


# --- the wire -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["application/json", "text/plain", "multipart/form-data", ""])
@served()
async def test_only_a_zip_is_taken(site: Site, kind: str) -> None:
    response = await site.http.post(f"{URL}/import", content=b"{}", headers={"content-type": kind})
    assert response.status_code == 415
    response = await site.http.post(f"{URL}/import", content=b"{}", headers={**ZIP, "content-encoding": "gzip"})
    assert response.status_code == 415


@pytest.mark.parametrize("chunked", [False, True])
@served()
async def test_a_capsule_beyond_the_limit_is_a_413(site: Site, chunked: bool) -> None:
    async def chunks() -> Any:
        for _ in range(MAX_CAPSULE // 1000 + 1):
            yield bytes(1000)

    body: Any = chunks() if chunked else bytes(MAX_CAPSULE + 1)
    response = await site.http.post(f"{URL}/import", content=body, headers=ZIP)
    assert (response.status_code, response.json()["error"]["code"]) == (413, "request_too_large")
    assert left_behind(site) == []


@served()
async def test_a_body_that_says_it_is_too_large_is_not_read(site: Site) -> None:
    headers = {**ZIP, "content-length": str(MAX_CAPSULE + 1)}
    call = Call.post(site.app, f"{URL}/import", None, [b"PK"], headers, slow=True)
    await call.finish()
    assert call.status == 413


@served()
async def test_a_body_larger_than_other_bodies_may_be_is_taken(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    data = await make(site)
    monkeypatch.setattr("server.http.body.MAX_BYTES", 100)
    monkeypatch.setattr("server.api.sessions.transfers.CHUNK", 64)
    monkeypatch.setattr("server.api.sessions.capsule.CHUNK", 50)
    assert (await site.http.get(f"{URL}/s/export")).content == data
    assert (await bring(site, data, "?id=t")).status_code == 201
    assert site.engine.kv["default", "t"] == KV


@served()
async def test_a_client_that_leaves_while_it_sends_leaves_nothing(site: Site) -> None:
    data = await make(site)
    call = Call.post(site.app, f"{URL}/import", None, [data[:100], data[100:200]], headers=ZIP, slow=True)
    await until(lambda: left_behind(site))
    await call.leave()
    assert left_behind(site) == []
    assert call.status == 499


@served()
async def test_a_client_that_leaves_before_its_capsule_is_made_leaves_nothing(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    await make(site)
    asked = asyncio.Event()

    async def slow(*args: Any) -> Any:
        asked.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(site.engine, "export", slow)
    call = Call.post(site.app, f"{URL}/s/export", None, [b""], method="GET")
    await asked.wait()
    assert len(left_behind(site)) == 1
    await call.leave()
    assert left_behind(site) == []


@pytest.mark.parametrize("stalls", [False, True])
@served()
async def test_a_client_that_reads_no_further_leaves_nothing(
    site: Site, monkeypatch: pytest.MonkeyPatch, stalls: bool
) -> None:
    await make(site)
    if stalls:
        monkeypatch.setattr("server.api.sessions.transfers.STALL_SECONDS", 0.01)
    sent: list[Any] = []
    leaving = asyncio.Event()

    async def send(message: Any) -> None:
        sent.append(message)
        if len(sent) == 3:
            leaving.set()
            await asyncio.Event().wait()

    async def receive() -> Any:
        if stalls:
            await asyncio.Event().wait()
        await leaving.wait()
        return {"type": "http.disconnect"}

    scope = {"type": "http", "method": "GET", "path": f"{URL}/s/export", "query_string": b"", "headers": []}
    await site.app({**scope, "http_version": "1.1", "scheme": "http"}, receive, send)
    assert sent[0]["status"] == 200
    assert len(sent) == 3
    assert left_behind(site) == []


@served()
async def test_a_capsule_leaves_in_small_pieces_so_that_a_slow_reader_gets_on(site: Site) -> None:
    await make(site)
    site.engine.kv["default", "s"] = [b"x" * 300_000]
    whole = (await site.http.get(f"{URL}/s/export")).content
    sent: list[bytes] = []

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))

    scope = {"type": "http", "method": "GET", "path": f"{URL}/s/export", "query_string": b"", "headers": []}
    await site.app({**scope, "http_version": "1.1", "scheme": "http"}, never, send)
    assert b"".join(sent) == whole
    assert max(map(len, sent)) <= 1 << 16
    assert left_behind(site) == []


async def never() -> Any:
    await asyncio.Event().wait()


@served()
async def test_an_engine_that_was_given_up_finds_the_folder_no_more(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Path] = []
    removed: list[Path] = []
    rmtree = shutil.rmtree

    async def export(tenant: str, session: str, folder: str, token_ids: bytes) -> Exported:
        asked.append(Path(folder))
        asked[0].mkdir()
        raise EngineUnavailable("not in time", 5)

    def late(folder: Path, ignore_errors: bool) -> None:
        with pytest.raises(FileNotFoundError):
            (asked[0] / "000000.kv").write_bytes(b"late")
        removed.append(folder)
        rmtree(folder, ignore_errors)

    await make(site)
    monkeypatch.setattr(site.engine, "export", export)
    with monkeypatch.context() as patch:
        patch.setattr("server.api.sessions.transfers.shutil.rmtree", late)
        assert (await site.http.get(f"{URL}/s/export")).status_code == 503
    assert len(removed) == 1
    assert left_behind(site) == []


async def get(site: Site, path: str) -> httpx.Response:
    return await site.http.get(path)


@served()
async def test_a_body_that_stops_coming_is_a_408(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.api.sessions.transfers.STALL_SECONDS", 0.01)

    async def never() -> Any:
        yield b"PK"
        await asyncio.Event().wait()

    response = await site.http.post(f"{URL}/import", content=never(), headers=ZIP)
    assert (response.status_code, response.json()["error"]["code"]) == (408, "request_timeout")
    assert left_behind(site) == []


@served()
async def test_a_full_disk_is_a_507(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    data = await make(site)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space")

    with monkeypatch.context() as patch:
        patch.setattr("server.api.sessions.transfers.write_all", full)
        response = await bring(site, data, "?id=t")
    assert (response.status_code, response.json()["error"]["code"]) == (507, "insufficient_storage")
    assert left_behind(site) == []
    with monkeypatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 10**6, "total": 10**9}))
        assert (await bring(site, data, "?id=t")).status_code == 507
    assert (await bring(site, data, "?id=t")).status_code == 201


@served()
async def test_so_many_at_once_and_no_more(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    await make(site)
    go, export, waiting = asyncio.Event(), site.engine.export, []

    async def slow(*args: Any) -> Any:
        waiting.append(args)
        await go.wait()
        return await export(*args)

    monkeypatch.setattr(site.engine, "export", slow)
    tasks = [asyncio.create_task(get(site, f"{URL}/s/export")) for _ in range(AT_ONCE)]
    await until(lambda: len(waiting) >= AT_ONCE)
    response = await site.http.get(f"{URL}/s/export")
    assert (response.status_code, response.json()["error"]["code"]) == (429, "too_many_transfers")
    go.set()
    assert {(await task).status_code for task in tasks} == {200}
    assert (await site.http.get(f"{URL}/s/export")).status_code == 200


def test_what_a_killed_server_left_is_removed(tmp_path: Path) -> None:
    folder = tmp_path / "transfer"
    Transfers(folder, 1)
    (folder / "old").mkdir()
    (folder / "old" / "capsule").write_bytes(b"x")
    Transfers(folder, 1)
    assert list(folder.iterdir()) == []
    assert folder.stat().st_mode & 0o777 == 0o700


def test_a_folder_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "precious").touch()
    (tmp_path / "transfer").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match="no folder of this user"):
        Transfers(tmp_path / "transfer", 1)
    assert (tmp_path / "elsewhere" / "precious").exists()


# --- what is no capsule -------------------------------------------------------------------------------------


@served()
async def test_damage_anywhere_is_refused(site: Site) -> None:
    data = await make(site)
    chance = random.Random(7)
    damaged = [data[:n] for n in (0, 1, 29, 30, 100, len(data) // 2, len(data) - 1)]
    damaged += [data + b"\0", data + data, b"\0" + data, b"not a zip" * 100]
    for _ in range(300):
        at = chance.randrange(len(data))
        damaged.append(data[:at] + bytes([data[at] ^ (1 << chance.randrange(8))]) + data[at + 1 :])
    for number, bad in enumerate(damaged):
        invalid(await bring(site, bad, f"?id=t{number}"))
    assert [s["id"] for s in (await site.http.get(URL)).json()["data"]] == ["s"]
    assert left_behind(site) == []


def turn(change: Callable[[dict[str, Any]], object]) -> Callable[[dict[str, Any], dict[str, bytes]], object]:
    def within(_: dict[str, Any], parts: dict[str, bytes]) -> None:
        log = json.loads(parts["turns.json"])
        change(log)
        parts["turns.json"] = json.dumps(log).encode()

    return within


def ending(tokens: str, last: int) -> str:
    """Token ids in base64 with another last one."""
    return base64.b64encode(base64.b64decode(tokens)[:-4] + struct.pack("<i", last)).decode()


def added(name: str) -> Callable[[dict[str, Any], dict[str, bytes]], object]:
    """One more member, listed under its name."""

    def within(facts: dict[str, Any], parts: dict[str, bytes]) -> None:
        parts[name] = b"x"
        facts["members"].append({"name": name})

    return within


FORGERIES: list[Callable[[dict[str, Any], dict[str, bytes]], object]] = [
    lambda f, p: f.update(format=2),
    lambda f, p: f.update(fingerprint="e" * 32),
    lambda f, p: f.update(extra=1),
    lambda f, p: f.update(turns=3),
    lambda f, p: f.pop("session"),
    lambda f, p: f["session"].update(id="../../etc"),
    lambda f, p: f["session"].update(id="import"),
    lambda f, p: f["session"].update(metadata={"k": "v" * 1000}),
    lambda f, p: f["session"].update(metadata={"k": 1}),
    lambda f, p: f["session"].update(ttl_seconds=-1),
    lambda f, p: f["session"].update(ttl_seconds=10**30),
    lambda f, p: f["members"].clear(),
    lambda f, p: f["members"].pop(),
    lambda f, p: f["members"].reverse(),
    lambda f, p: f["members"].append({"name": "kv/000003.kv", "size": 1, "sha256": ""}),
    lambda f, p: p.pop("turns.json"),
    lambda f, p: p.pop("kv/000001.kv"),
    lambda f, p: p.update({"turns.json": b"[" * 100_000}),
    lambda f, p: p.update({"turns.json": b"null"}),
    lambda f, p: p.update({"turns.json": b'{"a": NaN}'}),
    lambda f, p: p.update({"turns.json": b"\xff"}),
    added("../../etc/passwd"),
    added("/etc/passwd"),
    added("kv/x.kv"),
    added("kv/000004.kv"),
    added("kv/000002.kv"),
    turn(lambda log: log.update(format=9)),
    turn(lambda log: log.update(x=1)),
    turn(lambda log: log.update(created=-1)),
    turn(lambda log: log["rest"].append({"role": "user", "content": 5})),
    turn(lambda log: log["rest"].append({"role": ["user"], "content": ""})),
    turn(lambda log: log["rest"].append({"role": "user", "content": {"a": [[[]]]}})),
    turn(lambda log: log["rest"].append({"role": "wizard", "content": ""})),
    turn(lambda log: log["turns"][0].update(tokens="AAA=")),
    turn(lambda log: log["turns"][1].update(tokens=ending(log["turns"][1]["tokens"], 1024))),  # the vocabulary's end
    turn(lambda log: log["turns"][1].update(tokens=ending(log["turns"][1]["tokens"], -1))),
    turn(lambda log: log["turns"][0].update(prompt_tokens=10**6)),
    turn(lambda log: log["turns"][0].update(messages=[])),
    turn(lambda log: log["turns"][0].update(prompt_tokens=2**80)),
]


@pytest.mark.parametrize("number", range(len(FORGERIES)))
@served()
async def test_a_forged_capsule_is_refused(site: Site, number: int) -> None:
    data = await make(site)
    invalid(await bring(site, forged(data, FORGERIES[number]), "?id=t"))
    assert (await site.http.get(f"{URL}/t")).status_code == 404
    assert left_behind(site) == []


@served()
async def test_a_forgery_that_changes_nothing_is_taken(site: Site) -> None:
    data = await make(site)
    assert (await bring(site, forged(data, lambda f, p: None), "?id=t")).status_code == 201
    same = turn(lambda log: log["turns"][1].update(tokens=ending(log["turns"][1]["tokens"], 1023)))
    assert (await bring(site, forged(data, same), "?id=u")).status_code == 201


@served()
async def test_the_first_member_is_checked_too(site: Site) -> None:
    data = await make(site)
    assert data.count(b'"model":"demo"') == 1
    invalid(await bring(site, data.replace(b'"model":"demo"', b'"model":"memo"'), "?id=t"))


@pytest.mark.parametrize("name", ["MAX_FACTS", "MAX_TURNS", "MAX_MEMBERS"])
@served()
async def test_what_is_read_into_memory_is_bounded(site: Site, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    data = await make(site)
    monkeypatch.setattr(capsule, name, 4)
    invalid(await bring(site, data, "?id=t"))


def zipped(parts: dict[str, bytes], **options: Any) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", **options) as archive:
        for name, data in parts.items():
            archive.writestr(name, data)
    return made.getvalue()


@served()
async def test_other_zips_are_refused(site: Site) -> None:
    parts = members(await make(site))
    invalid(await bring(site, zipped(parts), "?id=t"))
    invalid(await bring(site, zipped(parts, compression=zipfile.ZIP_DEFLATED), "?id=t"))
    invalid(await bring(site, zipped({"bomb": bytes(10**8)}, compression=zipfile.ZIP_DEFLATED), "?id=t"))
    invalid(await bring(site, zipped({}), "?id=t"))


@pytest.mark.parametrize("size", [2**63, 2**32, 2**20, 5])
@served()
async def test_a_size_that_lies_is_refused_before_it_is_believed(site: Site, size: int) -> None:
    data = await make(site)
    for name in ("capsule.json", "turns.json", "kv/000000.kv"):
        at = data.index(name.encode()) + len(name) + 4
        lying = data[:at] + struct.pack("<QQ", size, size) + data[at + 16 :]
        invalid(await bring(site, lying, "?id=t"))


def test_the_length_is_told_before_a_byte_is_read(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"12345")
    size, crc, _ = capsule.checksums(tmp_path / "a")
    made = Capsule([Member("a", size, crc, tmp_path / "a"), Member("b", 2, zlib.crc32(b"xy"), b"xy")])
    assert made.length == len(b"".join(made.chunks()))
    (tmp_path / "a").write_bytes(b"123")
    with pytest.raises(OSError, match="cut short"):
        list(made.chunks())


def test_what_capsule_json_says_is_written_down() -> None:
    assert CapsuleFacts.__struct_fields__ == (
        *("format", "warmturn", "model", "fingerprint", "session", "turns", "tokens", "kv_tokens", "members"),
    )


def test_members_that_are_larger_than_four_gigabytes_fit() -> None:
    big = Member("kv/000000.kv", 5 << 32, 0, b"")
    entry = big.entry(3 << 40)
    assert struct.unpack("<HHQQQ", entry[-28:]) == (1, 24, 5 << 32, 5 << 32, 3 << 40)
    assert replace(big, size=1).header()[:30] == big.header()[:30]
