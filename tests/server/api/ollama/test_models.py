"""Ollama's API: what it says of the served model."""

from __future__ import annotations

import pytest
from http_context import Site, served

from server.api.ollama.models import parameter_size


@served(aliases=["small"])
async def test_the_model_is_listed_under_each_of_its_names(site: Site) -> None:
    listed = (await site.http.get("/api/tags")).json()["models"]
    assert [model["name"] for model in listed] == ["demo", "small"]
    assert listed[0]["details"]["family"]
    running = (await site.http.get("/api/ps")).json()["models"]
    assert [model["model"] for model in running] == ["demo"]
    assert running[0]["context_length"] == site.context.facts.max_context


@served()
async def test_what_clients_ask_before_they_use_a_model(site: Site) -> None:
    shown = (await site.http.post("/api/show", json={"model": "demo:latest", "verbose": False})).json()
    assert {"completion", "tools"} <= {*shown["capabilities"]}
    kind = shown["model_info"]["general.architecture"]
    assert shown["model_info"][f"{kind}.context_length"] == site.context.facts.max_context
    assert shown["template"]
    assert "temperature" in shown["parameters"]
    version = (await site.http.get("/api/version")).json()["version"]
    assert tuple(int(part) for part in version.split(".")) >= (0, 6, 4)  # what VS Code wants
    missing = await site.http.post("/api/show", json={"name": "other"})
    assert (missing.status_code, [*missing.json()]) == (404, ["error"])


@pytest.mark.parametrize(("parameters", "said"), [(134_515_008, "134.5M"), (8_030_000_000, "8.0B"), (12, "12")])
def test_sizes_are_short(parameters: int, said: str) -> None:
    assert parameter_size(parameters) == said
