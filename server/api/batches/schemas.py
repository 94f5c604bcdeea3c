"""Request schemas of files and batches, and the storage that their routes use."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import Request
from pydantic import Field

from server.batches.batch_runner import BatchRunner
from server.batches.tenant_files import Purpose, TenantFiles
from server.schemas.metadata import Metadata
from server.schemas.query import Query
from server.schemas.strict import Strict

Endpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"]
FileId = Annotated[str, Field(max_length=64)]


class ExpiresAfter(Query):
    """When a file expires: so many seconds after it was made. A form has them as text."""

    anchor: Literal["created_at"]
    seconds: int = Field(ge=3600, le=2_592_000)


class FileForm(Query):
    """The fields of the form of ``POST /v1/files``, besides the file."""

    purpose: Literal["batch"]
    expires_after: ExpiresAfter | None = None


class ListFiles(Query):
    """``GET /v1/files``: a page of the tenant's files."""

    purpose: Purpose | None = None
    limit: int = Field(10_000, ge=1, le=10_000)
    order: Literal["asc", "desc"] = "desc"
    after: FileId | None = None


class CreateBatch(Strict):
    """``POST /v1/batches``."""

    input_file_id: FileId
    endpoint: Endpoint
    completion_window: Literal["24h"]
    metadata: Metadata | None = None
    output_expires_after: ExpiresAfter | None = None


class ListBatches(Query):
    """``GET /v1/batches``: a page of the tenant's batches, the newest first."""

    limit: int = Field(20, ge=1, le=100)
    after: FileId | None = None


def runner_of(request: Request) -> BatchRunner:
    runner: BatchRunner = request.app.state.batches
    return runner


def files_of(request: Request) -> TenantFiles:
    return runner_of(request).files
