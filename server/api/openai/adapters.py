"""Routes that load and unload adapters, as vLLM has them. They are off unless the server was told a folder of
adapters.
"""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse
from pydantic import Field

from server.errors import ApiError, bad_request
from server.http.body import JsonRoute
from server.models.offered_model import AdapterRefused, OfferedModel
from server.models.registry import ModelRegistry, allowed_models, registry_of
from server.schemas.strict import Strict

router = APIRouter(route_class=JsonRoute)


class LoadAdapterBody(Strict):
    """An adapter to load into ``model``, by default the first one. ``lora_path``: its folder, which is below the
    server's folder of adapters. With ``load_inplace`` it may take the place of an adapter of that name.
    """

    lora_name: str = Field(min_length=1, max_length=512)
    lora_path: str = Field(min_length=1, max_length=4096)
    load_inplace: bool = False
    model: str = ""


class UnloadAdapterBody(Strict):
    """An adapter to forget. ``lora_int_id`` is vLLM's number of it, which changes nothing."""

    lora_name: str = Field(min_length=1, max_length=512)
    lora_int_id: int | None = None


@router.post("/v1/load_lora_adapter")
async def load_lora_adapter(body: LoadAdapterBody, request: Request) -> PlainTextResponse:
    """Load an adapter, whose name is then a model's name."""
    folder, registry = folder_of(request), registry_of(request)
    model = registry.find(body.model)
    check_name(body, registry, model)
    source = inside(folder, body.lora_path)
    try:
        await model.load_adapter(body.lora_name, str(source))
    except AdapterRefused as error:
        raise bad_request(f"The adapter cannot be used: {error}.", "lora_path", "invalid_adapter") from None
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


@router.post("/v1/unload_lora_adapter")
async def unload_lora_adapter(body: UnloadAdapterBody, request: Request) -> PlainTextResponse:
    """Forget an adapter. Turns that run with it go on."""
    folder_of(request)
    for model, name in registry_of(request).adapters(None):
        if name == body.lora_name:
            model.unload_adapter(name)
            return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")
    raise ApiError(404, "There is no adapter of this name.", param="lora_name", code="model_not_found")


def folder_of(request: Request) -> Path:
    """The folder below which adapters may be loaded. Raises a 403 where there is none, and for a key that may use some
    models only.
    """
    folder: Path | None = request.app.state.adapter_folder
    if folder is None:
        message = "Adapters are not loaded over HTTP here: see --adapter-folder."
        raise ApiError(403, message, code="adapters_fixed")
    if allowed_models(request) is not None:
        raise ApiError(403, "This key is for some models only, and loads no adapters.", code="key_not_allowed")
    return folder


def check_name(body: LoadAdapterBody, registry: ModelRegistry, model: OfferedModel) -> None:
    """Raises a 400 where the name of a new adapter is taken."""
    if not registry.has(body.lora_name) or (body.load_inplace and body.lora_name in model.adapters):
        return
    raise bad_request(
        "A model or an adapter has this name already: an adapter is replaced with load_inplace, or unloaded first.",
        "lora_name",
        "name_taken",
    )


def inside(folder: Path, path: str) -> Path:
    """The folder that a request names, by itself or from ``folder`` on. Raises a 400 for one that is not below
    ``folder``, also by a link.
    """
    try:
        found = (folder / path).resolve()
        if found.is_relative_to(folder) and found != folder and found.is_dir():
            return found
    except (OSError, ValueError, RuntimeError):  # a null byte, a circle of links
        pass
    raise bad_request("lora_path is no folder below the server's folder of adapters.", "lora_path", "invalid_value")
