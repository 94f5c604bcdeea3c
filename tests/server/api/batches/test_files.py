"""`/v1/files`: uploaded, listed, read, deleted, expired; bad forms; another tenant's are not there."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from http_context import Call, Site, served, site

from server.api.batches import upload
from server.batches.storage import BatchStorage
from server.middleware.key_file import KeyFile, new_key, write_keys

KEYS = {"ann": "key-a", "bob": "key-b"}
ANN, BOB = ({"authorization": f"Bearer {key}"} for key in KEYS.values())


async def upload_file(made: Site, data: bytes = b"{}\n", headers: Any = ANN, **fields: Any) -> Any:
    form = {"purpose": "batch", **fields}
    files = {"file": ("lines.jsonl", data)}
    return await made.http.post("/v1/files", data=form, files=files, headers=headers)


@served(KEYS)
async def test_a_file_is_kept_for_its_tenant_only(made: Site) -> None:
    answer = await upload_file(made, b'{"a": 1}\n')
    file = answer.json()
    assert answer.status_code == 200
    assert (file["object"], file["bytes"], file["filename"], file["purpose"]) == ("file", 9, "lines.jsonl", "batch")
    assert file["expires_at"] - file["created_at"] == 30 * 86_400
    path = f"/v1/files/{file['id']}"
    assert (await made.http.get(path, headers=ANN)).json() == file
    assert (await made.http.get(f"{path}/content", headers=ANN)).content == b'{"a": 1}\n'
    assert (await made.http.get("/v1/files", headers=ANN)).json()["data"] == [file]
    assert (await made.http.get("/v1/files", headers=BOB)).json()["data"] == []
    for method, where in (("GET", path), ("GET", f"{path}/content"), ("DELETE", path)):
        theirs = await made.http.request(method, where, headers=BOB)
        assert (theirs.status_code, theirs.json()["error"]["code"]) == (404, "file_not_found")
    assert (await made.http.delete(path, headers=ANN)).json() == {"id": file["id"], "object": "file", "deleted": True}
    assert (await made.http.get(path, headers=ANN)).status_code == 404


@served()
async def test_files_are_listed_in_pages(made: Site) -> None:
    ids = {(await upload_file(made, headers=None)).json()["id"] for _ in range(3)}
    first = (await made.http.get("/v1/files?limit=2&order=asc")).json()
    assert first["has_more"]
    rest = (await made.http.get(f"/v1/files?after={first['last_id']}&order=asc")).json()
    assert {file["id"] for file in first["data"] + rest["data"]} == ids
    assert not rest["has_more"]
    assert (await made.http.get("/v1/files?purpose=batch_output")).json()["data"] == []
    for query, param in (("after=file-x", "after"), ("limit=0", "limit"), ("purpose=other", "purpose"), ("x=1", "x")):
        refused = await made.http.get(f"/v1/files?{query}")
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"purpose": "fine-tune"}, "purpose"),
        ({"other": "x"}, "other"),
        ({"expires_after[anchor]": "created_at"}, "expires_after.seconds"),
        ({"expires_after[anchor]": "created_at", "expires_after[seconds]": "60"}, "expires_after.seconds"),
        ({"expires_after": "x"}, "expires_after"),
        ({"purpose": "CANARY" * 1000}, None),
    ],
)
@served()
async def test_a_wrong_field_is_a_400(made: Site, fields: dict[str, Any], param: str | None) -> None:
    answer = await upload_file(made, headers=None, **fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert "CANARY" not in answer.text
    assert [*made.app.state.batches.files.content("x").parent.iterdir()] == []


@served()
async def test_what_is_no_form_with_a_file_is_refused(made: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (await made.http.post("/v1/files", json={"purpose": "batch"})).status_code == 415
    assert (await made.http.post("/v1/files", data={"purpose": "batch"})).status_code == 415
    only = await made.http.post("/v1/files", files={"purpose": (None, "batch")})
    assert (only.status_code, only.json()["error"]["param"]) == (400, "file")
    text = await made.http.post("/v1/files", files={"purpose": (None, "batch"), "file": (None, "x")})
    assert (text.status_code, text.json()["error"]["param"]) == (400, "file")
    twice: Any = [("purpose", (None, "batch")), ("file", ("a", b"1")), ("file", ("b", b"2"))]
    assert (await made.http.post("/v1/files", files=twice)).status_code == 400
    missing = await made.http.post("/v1/files", files={"file": ("a", b"1")})
    assert (missing.status_code, missing.json()["error"]["param"]) == (400, "purpose")
    monkeypatch.setattr(upload, "MOST_BYTES", 100_000)
    assert (await upload_file(made, bytes(100_000), headers=None)).status_code == 200
    for size in (100_001, 200_000):
        assert (await upload_file(made, bytes(size), headers=None)).status_code == 413
    assert len([*made.app.state.batches.files.content("x").parent.iterdir()]) == 2


@served()
async def test_an_upload_that_is_cut_off_leaves_nothing(made: Site) -> None:
    head = b'--x\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n' + bytes(100_000)
    kind = {"content-type": "multipart/form-data; boundary=x"}
    call = Call.post(made.app, "/v1/files", None, [head], kind, slow=True)
    await asyncio.sleep(0.05)
    await call.leave()
    assert [*made.app.state.batches.files.content("x").parent.iterdir()] == []


@served()
async def test_a_full_disk_is_a_507(made: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.api.batches.upload.disk_floor", lambda total: total)
    answer = await upload_file(made, headers=None)
    assert (answer.status_code, answer.json()["error"]["code"]) == (507, "insufficient_storage")


@served()
async def test_pages_of_other_origins_cannot_upload_without_a_preflight(made: Site) -> None:
    answer = await upload_file(made, headers={"origin": "http://evil.example"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "origin_not_allowed")
    assert (await upload_file(made, headers={"origin": "http://warm"})).status_code == 200


@served()
async def test_an_expired_file_is_gone(made: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    fields: dict[str, Any] = {"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}
    file = (await upload_file(made, headers=None, **fields)).json()
    assert file["expires_at"] == file["created_at"] + 3600
    monkeypatch.setattr("server.batches.tenant_files.time.time", lambda: file["expires_at"])
    assert (await made.http.get(f"/v1/files/{file['id']}")).status_code == 404
    assert [one.id for one in made.app.state.batches.files.expired()] == [file["id"]]


async def test_files_count_as_bytes_of_their_tenant(tmp_path: Path) -> None:
    (ann, entry), (bob, other) = new_key("ann", None, None, max_bytes=5000), new_key("bob", None, None)
    write_keys(tmp_path / "keys.json", [entry, other])
    async with site(key_file=KeyFile(tmp_path / "keys.json")) as made:
        keys = [{"authorization": f"Bearer {key}"} for key in (ann, bob)]
        assert (await upload_file(made, bytes(4000), keys[0])).status_code == 200
        refused = await upload_file(made, bytes(4000), keys[0])
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "insufficient_quota")
        assert (await upload_file(made, bytes(4000), keys[1])).status_code == 200
        assert (await made.http.get("/v1/usage", headers=keys[0])).json()["kept"]["bytes"] == 4000
        assert (await made.chat(headers=keys[0], session_id="s")).status_code == 200


def test_files_outlive_the_server_and_halves_do_not(tmp_path: Path) -> None:
    async def first() -> str:
        async with site(storage=tmp_path) as made:
            return str((await upload_file(made, headers=None)).json()["id"])

    id = asyncio.run(first())
    for name in ("file-half.jsonl", "file-torn.json", "file-torn.jsonl", f"{id}.json.new"):
        (tmp_path / "files" / name).write_bytes(b"{")
    storage = BatchStorage(tmp_path)
    assert [file.id for file in storage.files.of_tenant("default")] == [id]
    assert sorted(path.name for path in (tmp_path / "files").iterdir()) == [f"{id}.json", f"{id}.jsonl"]
