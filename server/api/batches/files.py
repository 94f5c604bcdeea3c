"""Routes of files: upload, list, retrieve, read, delete."""

from __future__ import annotations

import time
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import FileResponse, Response

from server.api.batches.objects import FileDeleted, FileObject, page_after
from server.api.batches.schemas import ListFiles, files_of, runner_of
from server.api.batches.upload import receive_file, room_on_disk
from server.batches.batch_record import KEPT_SECONDS
from server.batches.tenant_files import StoredFile, new_id
from server.errors import ApiError
from server.http.json_response import json_response
from server.http.multipart import FORM, declared_size
from server.turns.context import context_of

router = APIRouter()

FORM_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {
        "file": {"type": "string", "format": "binary"},
        "purpose": {"type": "string", "enum": ["batch"]},
        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
        "expires_after[seconds]": {"type": "integer", "minimum": 3600, "maximum": 2_592_000},
    },
}


@router.post("/v1/files", openapi_extra={"requestBody": {"required": True, "content": {FORM: {"schema": FORM_SCHEMA}}}})
async def create_file(request: Request) -> Response:
    """Upload a file for a batch: a form with `file`, JSONL of at most 200 MiB, and `purpose`, which is `batch`. It is
    kept for 30 days, or as `expires_after` says."""
    files, tenant, holdings = files_of(request), request.state.tenant, context_of(request).log.holdings
    await holdings.check(tenant, begins=False, more=declared_size(request))
    id, now = new_id("file-"), int(time.time())
    try:
        with room_on_disk():
            form, name, size = await receive_file(request, files.content(id))
            await holdings.check(tenant, begins=False, more=size)
            seconds = KEPT_SECONDS if form.expires_after is None else form.expires_after.seconds
            file = StoredFile(id, tenant, size, now, name, form.purpose, now + seconds)
            await run_in_threadpool(files.add, file)
    except BaseException:
        files.delete(id)
        raise
    return json_response(FileObject.of(file))


@router.get("/v1/files")
async def list_files(query: Annotated[ListFiles, Query()], request: Request) -> Response:
    """List the tenant's files."""
    found = files_of(request).of_tenant(request.state.tenant)
    chosen = [file for file in found if query.purpose in (None, file.purpose)]
    ordered = chosen if query.order == "asc" else chosen[::-1]
    return json_response(page_after(ordered, query.after, query.limit, lambda file: file.id, FileObject.of))


@router.get("/v1/files/{file_id}")
async def retrieve_file(file_id: str, request: Request) -> Response:
    """Describe a file."""
    return json_response(FileObject.of(require_file(request, file_id)))


@router.get("/v1/files/{file_id}/content", response_class=Response)
async def read_file(file_id: str, request: Request) -> Response:
    """The content of a file."""
    file = require_file(request, file_id)
    return FileResponse(files_of(request).content(file.id), media_type="application/jsonl")


@router.delete("/v1/files/{file_id}")
async def delete_file(file_id: str, request: Request) -> Response:
    """Delete a file. One that a batch still reads gets a 409."""
    file = require_file(request, file_id)
    if runner_of(request).records.uses(file.id):
        raise ApiError(409, "A batch that is not over reads this file: cancel it first.", code="file_in_use")
    await run_in_threadpool(partial(files_of(request).delete, file.id))
    return json_response(FileDeleted(file.id))


def require_file(request: Request, id: str) -> StoredFile:
    """A file of the request's tenant. Raises a 404, also for another tenant's."""
    file = files_of(request).get(request.state.tenant, id)
    if file is None:
        raise ApiError(404, "There is no such file.", param="file_id", code="file_not_found")
    return file
