"""Adapters over HTTP: names of models, loaded and unloaded as vLLM has it."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
from models_kit import ModelSite, model_site

from server.engine.engine import TurnRefused
from server.middleware.key_file import KeyFile, new_key, write_keys


def over(folder: Path | None, **parts: Any) -> AbstractAsyncContextManager[ModelSite]:
    """A site with the models a and b, both of which may be loaded, and this folder of adapters."""
    return model_site("a", "b", adapter_folder=folder, **parts)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("sql", "poems"):
        (tmp_path / "adapters" / name).mkdir(parents=True)
    (tmp_path / "outside").mkdir()
    (tmp_path / "adapters" / "link").symlink_to(tmp_path / "outside")
    return (tmp_path / "adapters").resolve()


async def load(site: ModelSite, name: str = "sql", path: str = "sql", headers: Any = None, **more: Any) -> Any:
    body = {"lora_name": name, "lora_path": path, **more}
    return await site.http.post("/v1/load_lora_adapter", json=body, headers=headers)


async def unload(site: ModelSite, name: str = "sql") -> Any:
    return await site.http.post("/v1/unload_lora_adapter", json={"lora_name": name})


async def test_an_adapter_is_a_model_from_its_load_to_its_unload(folder: Path) -> None:
    async with over(folder) as site:
        assert (await site.chat("sql")).status_code == 404
        loaded = await load(site, path=str(folder / "sql"))
        assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'sql' added successfully.")
        assert site.engine("a").adapters == {"sql": str(folder / "sql")}
        reply = (await site.chat("sql", session="s")).json()
        assert reply["model"] == "sql"
        assert [turn.adapter for turn in site.engine("a").submitted] == ["sql"]
        await site.chat("a", session="s")
        assert site.engine("a").submitted[-1].adapter == ""
        listed = (await site.http.get("/v1/models")).json()["data"]
        (found,) = [model for model in listed if model.get("parent")]
        assert (found["id"], found["parent"], found["root"]) == ("sql", "a", "a")
        assert found == (await site.http.get("/v1/models/sql")).json()
        assert [adapter["name"] for adapter in found["warmturn"]["adapters"]] == ["sql"]
        assert "sql" in [model["name"] for model in (await site.http.get("/api/tags")).json()["models"]]
        assert (await site.http.post("/v1/models/sql/unload")).status_code == 404
        assert (await unload(site)).text == "Success: LoRA adapter 'sql' removed successfully."
        assert site.engine("a").adapters == {}
        assert (await site.chat("sql")).status_code == (await unload(site)).status_code == 404


async def test_an_adapter_belongs_to_a_model_and_comes_back_with_it(folder: Path) -> None:
    async with over(folder) as site:
        assert (await load(site, "poems", "poems", model="b")).status_code == 200  # which is loaded for it
        assert (await site.http.post("/v1/models/b/unload")).status_code == 200
        assert (await site.chat("poems")).json()["model"] == "poems"
        assert site.events == ["load a", "load b", "stop b 30", "load b"]
        assert site.engine("b").adapters == {"poems": str(folder / "poems")}
        assert site.engine("a").adapters == {}


async def test_names_and_folders_are_checked(folder: Path) -> None:
    async with over(folder) as site:
        for path in ("../outside", "link", str(folder), str(folder.parent / "outside"), "nowhere", "x\0y", "/", "."):
            refused = await load(site, path=path)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "lora_path"), path
            assert str(folder.parent) not in refused.text
        for name in ("a", "b-alias"):
            refused = await load(site, name)
            assert (refused.status_code, refused.json()["error"]["code"]) == (400, "name_taken")
        assert (await load(site)).status_code == 200
        assert (await load(site, path="poems")).json()["error"]["code"] == "name_taken"
        assert (await load(site, path="poems", load_inplace=True)).status_code == 200
        assert site.engine("a").adapters == {"sql": str(folder / "poems")}
        site.engine("a").adapter_error = "it is of another model"
        refused = await load(site, "poems", "poems")
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_adapter")
        assert "of another model" in refused.json()["error"]["message"]
        assert (await site.chat("poems")).status_code == 404
        nameless, numbered = {"lora_name": "", "lora_path": "sql"}, {"lora_name": 1, "lora_path": "sql"}
        for body in ({}, {"lora_name": "x"}, nameless, numbered):
            assert (await site.http.post("/v1/load_lora_adapter", json=body)).status_code == 400


async def test_nothing_is_loaded_without_a_folder_or_by_a_limited_key(folder: Path, tmp_path: Path) -> None:
    async with over(None) as site:
        for refused in (await load(site), await unload(site)):
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "adapters_fixed")
    ann, entry = new_key("ann", None, None, ["sql"])
    bob, other = new_key("bob", None, None)
    write_keys(tmp_path / "keys", [entry, other])
    async with over(folder, key_file=KeyFile(tmp_path / "keys"), any_model=True) as site:
        own, all_ = {"authorization": f"Bearer {ann}"}, {"authorization": f"Bearer {bob}"}
        assert (await load(site, headers=own)).status_code == (await site.chat("", headers=own)).status_code == 404
        assert (await load(site, headers=all_)).status_code == 200
        assert (await load(site, headers=own)).json()["error"]["code"] == "key_not_allowed"
        assert (await load(site, "poems", "poems", headers=all_)).status_code == 200
        for name in ("sql", "a", "poems", ""):  # it means what it may use
            assert (await site.chat(name, headers=own)).json()["model"] == "sql"
        listed = (await site.http.get("/v1/models", headers=own)).json()["data"]
        assert [model["id"] for model in listed] == ["sql"]
        assert (await site.chat("poems", headers=all_)).json()["model"] == "poems"


async def test_an_adapter_that_is_gone_is_not_found(folder: Path) -> None:
    """Its name was there when the request came, and not any more when its turn did."""
    async with over(folder) as site:
        await load(site)
        site.engine("a").refusal = TurnRefused("model_not_found", "This adapter is not loaded any more.")
        gone = await site.chat("sql")
        assert (gone.status_code, gone.json()["error"]["code"]) == (404, "model_not_found")
