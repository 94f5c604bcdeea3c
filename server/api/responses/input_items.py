"""Reads the input items of a request: gives them ids, resolves references; and makes pages of items."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from server.api.responses.client_tools import ToolNames
from server.api.responses.gathering import Gathering
from server.api.responses.item_schemas import InputItem, Reference
from server.api.responses.schemas import ListItems
from server.errors import ApiError, bad_request
from server.log.logged_message import LoggedMessage
from server.schemas.common_objects import DataPage
from server.schemas.item_texts import InputText
from server.schemas.items import ITEM_KINDS, Item, MessageItem, items_of, kind_of, new_id, parse_id
from server.turns.context import ServerContext

MAX_REFERRED = 64  # sessions that the references of one request are of: all of each is read


async def gather_input(
    context: ServerContext,
    tenant: str,
    session: str | None,
    past: Sequence[LoggedMessage],
    given: str | Sequence[InputItem],
    param: str = "input",
    names: ToolNames | None = None,
) -> tuple[list[Item], list[LoggedMessage]]:
    """The input items of a request to ``session`` (None: not stored) after ``past``, and the messages that they become.
    ``names``: the functions that the request's tools are. Raises a 400 for calls and outputs that do not match, a 404
    for unknown references.
    """
    gathering = Gathering.after(past, names or ToolNames())
    if isinstance(given, str):
        items: list[Item] = [MessageItem(new_id("msg", session), "user", [InputText(given)])]
        gathering.add(items[0], param)
        return items, gathering.messages
    items = []
    seen: dict[str, dict[str, Item]] = {}
    for index, one in enumerate(given):
        where = f"{param}[{index}]"
        if isinstance(one, Reference):
            found = await resolve_reference(context, tenant, one.id, where, seen)
            item = replace(found, id=new_id(kind_of([found.id]), session))
        elif (made := one.to_item(session)) is None:
            continue
        else:
            item = made
        gathering.add(item, where)
        items.append(item)
    if param == "input":  # which is answered now
        gathering.go_on()
    return items, gathering.messages


async def resolve_reference(
    context: ServerContext, tenant: str, id: str, where: str, seen: dict[str, dict[str, Item]]
) -> Item:
    """The item with an id, in any session of the tenant. ``seen`` caches the items of sessions that were read for this
    request. Raises a 404.
    """
    place = parse_id(id, *ITEM_KINDS)
    session = "" if place is None else place[0]
    if place is not None and session not in seen:
        if len(seen) >= MAX_REFERRED:
            raise bad_request(
                f"{where}.id is of one session too many: {MAX_REFERRED} can be referred to.", f"{where}.id"
            )
        record = await context.log.get(tenant, session)
        messages = [] if record is None else record.messages
        seen[session] = {item.id: item for _, item in items_of(messages, session)}
    item = seen.get(session, {}).get(id)
    if item is None:
        raise ApiError(404, f"{where}.id is not the id of an item.", param=f"{where}.id", code="item_not_found")
    return item


def page_of(items: Sequence[dict[str, Any]], query: ListItems) -> DataPage[dict[str, Any]]:
    """A page of items, which come oldest first. Raises a 404 for an ``after`` that is not among them."""
    ordered = [*items] if query.order == "asc" else [*reversed(items)]
    if query.after is not None:
        ids = [item["id"] for item in ordered]
        if query.after not in ids:
            raise ApiError(404, "after is not the id of an item in this list.", param="after", code="item_not_found")
        ordered = ordered[ids.index(query.after) + 1 :]
    data = ordered[: query.limit]
    first, last = (data[0]["id"], data[-1]["id"]) if data else ("", "")
    return DataPage(data, first, last, len(ordered) > len(data))
