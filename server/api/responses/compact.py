"""``POST /v1/responses/compact``: the served model summarises a conversation, which is continued from the summary."""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import Annotated, ClassVar

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from server.api.responses.compacting import folding_of
from server.api.responses.objects import CompactedResponse
from server.api.responses.reading import ReadInput, read_conversation
from server.api.responses.reply import usage_of
from server.api.responses.response_branch import ResponseBranch, find_branch
from server.api.responses.schemas import InputRequest
from server.api.responses.sealed_reasoning import seal
from server.errors import bad_request
from server.http.body import JsonRoute, takes_turn
from server.http.json_response import json_response
from server.http.sse import while_connected
from server.schemas.items import CompactionItem, Item, MessageItem, items_of, new_id
from server.turns.context import context_of
from server.turns.pending_turn import PendingTurn

router = APIRouter(route_class=JsonRoute)


class CompactRequest(InputRequest):
    """The conversation to summarise, as a response's request has it."""

    IDLE: ClassVar[frozenset[str]] = InputRequest.IDLE | {"service_tier", "store", "truncation"}
    service_tier: Annotated[str, Field(max_length=64)] | None = None
    store: bool = False


@router.post("/v1/responses/compact")
@takes_turn
async def compact(body: CompactRequest, request: Request) -> Response:
    """Summarise a conversation: all messages of the user and one compaction item, which take its place in the input of
    later requests. Of a conversation that is too long, the oldest part is summarised first, and then its summary with
    the rest.
    """
    context, tenant = context_of(request), request.state.tenant
    context.check(body, None)
    branch = await find_branch(context, tenant, body)
    read = await read_conversation(context, tenant, body, branch)
    kept = user_items(read, branch)
    if not kept:
        raise bad_request("input has no message of a user: there is nothing to summarise.", "input", "invalid_value")
    with ExitStack() as claim:
        turn = PendingTurn(request, body, context, None, branch.past, None, claim)
        folding = folding_of(turn, body, branch.past, read.names)
        summary = await while_connected(request.receive, folding.summarise(read.conversation.messages))
    item = CompactionItem(new_id("cmp", None), seal(summary))
    usage = usage_of(folding.usage)
    return json_response(CompactedResponse(new_id("resp", None), int(time.time()), [*kept, item], usage))


def user_items(read: ReadInput, branch: ResponseBranch) -> list[Item]:
    """All messages of the user, in order."""
    past = [] if branch.past is None else [item for _, item in items_of(branch.past.messages, "")]
    return [item for item in [*past, *read.items] if isinstance(item, MessageItem) and item.role == "user"]
