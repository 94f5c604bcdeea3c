"""Routes of batches: create, list, retrieve, cancel."""

from __future__ import annotations

import time
from typing import Annotated

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from server.api.batches.objects import BatchObject, page_after
from server.api.batches.schemas import CreateBatch, ListBatches, files_of, runner_of
from server.api.batches.upload import room_on_disk
from server.batches.batch_record import KEPT_SECONDS, WINDOW_SECONDS, BatchRecord
from server.batches.tenant_files import new_id
from server.errors import ApiError, bad_request
from server.http.body import JsonRoute
from server.http.json_response import json_response

router = APIRouter(route_class=JsonRoute)
MOST = 32  # batches of a tenant that are not over


@router.post("/v1/batches")
async def create_batch(body: CreateBatch, request: Request) -> Response:
    """Run the requests of a file, one JSON object a line with `custom_id`, `method`, `url` and `body`, when no other
    turn needs the model. The results are in `output_file_id` and `error_file_id` when the batch is over."""
    runner, state = runner_of(request), request.state
    if files_of(request).get(state.tenant, body.input_file_id) is None:
        raise bad_request("There is no such file.", "input_file_id", "file_not_found")
    if sum(not record.is_over for record in runner.records.of_tenant(state.tenant)) >= MOST:
        message = f"{MOST} batches of this tenant are not over: more are not taken now."
        raise ApiError(429, message, code="too_many_batches", headers={"retry-after": "60"})
    now, expires = int(time.time()), body.output_expires_after
    record = BatchRecord(
        id=new_id("batch_"),
        tenant=state.tenant,
        key=state.key,
        endpoint=body.endpoint,
        input_file=body.input_file_id,
        output_file=new_id("file-"),
        error_file=new_id("file-"),
        created_at=now,
        expires_at=now + WINDOW_SECONDS,
        metadata=body.metadata or {},
        output_seconds=KEPT_SECONDS if expires is None else expires.seconds,
    )
    with room_on_disk():
        await runner.create(record)
    return json_response(BatchObject.of(record))


@router.get("/v1/batches")
async def list_batches(query: Annotated[ListBatches, Query()], request: Request) -> Response:
    """List the tenant's batches, the newest first. They are told of for 30 days after their end."""
    found = runner_of(request).records.of_tenant(request.state.tenant)
    return json_response(page_after(found, query.after, query.limit, lambda record: record.id, BatchObject.of))


@router.get("/v1/batches/{batch_id}")
async def retrieve_batch(batch_id: str, request: Request) -> Response:
    """Describe a batch, with how many of its requests have results."""
    return json_response(BatchObject.of(require_batch(request, batch_id)))


cancelling = APIRouter()  # its body is not read: OpenAI's clients send none


@cancelling.post("/v1/batches/{batch_id}/cancel")
async def cancel_batch(batch_id: str, request: Request) -> Response:
    """End a batch: requests that have no result yet get none."""
    record = require_batch(request, batch_id)
    if record.is_over:
        raise ApiError(409, f"This batch is over: it is {record.status}.", code="batch_over")
    with room_on_disk():
        return json_response(BatchObject.of(await runner_of(request).cancel(record)))


def require_batch(request: Request, id: str) -> BatchRecord:
    """A batch of the request's tenant. Raises a 404, also for another tenant's."""
    record = runner_of(request).records.get(request.state.tenant, id)
    if record is None:
        raise ApiError(404, "There is no such batch.", param="batch_id", code="batch_not_found")
    return record


router.include_router(cancelling)
