"""Client events of the WebSocket at ``/v1/responses``, in OpenAI's shape."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from server.api.responses.call_schemas import InputAddedTools
from server.api.responses.item_schemas import InputMessage
from server.api.responses.schemas import ResponseRequest
from server.chat.system_places import SYSTEM_ROLES
from server.log.logged_message import LoggedMessage
from server.schemas.messages import Id
from server.schemas.strict import Strict, wrong

LANE_ID = r"[A-Za-z0-9_.-]{1,256}"
LaneId = Annotated[str, Field(pattern=f"^{LANE_ID}$")]


class CreateEvent(ResponseRequest):
    """``response.create``: the body of ``POST /v1/responses``. ``stream_id`` names the lane whose requests run one
    after the other. With ``generate`` false the prompt is only read, into the cache, and can be continued.
    """

    type: Literal["response.create"]
    stream_id: LaneId | None = None
    generate: bool = True

    @model_validator(mode="after")
    def runs_here(self) -> Self:
        """A response that runs in the background needs no connection."""
        if self.background:
            raise wrong("background", "is not available over a WebSocket")
        return self

    @property
    def token_limit(self) -> int | None:
        return super().token_limit if self.generate else 0


def lacks_user(body: CreateEvent, past: Iterable[LoggedMessage]) -> bool:
    """Whether the prompt has system messages and tools and nothing else."""
    return (
        not isinstance(body.input, str)
        and all(
            isinstance(item, InputAddedTools) or (isinstance(item, InputMessage) and item.role in SYSTEM_ROLES)
            for item in body.input or ()
        )
        and all(message.role in SYSTEM_ROLES for message in past)
    )


def with_user_message(body: CreateEvent) -> CreateEvent:
    """The same prompt with a short message of a user behind it; the input is not a text."""
    return body.model_copy(update={"input": [*(body.input or []), InputMessage(role="user", content=".")]})


class CancelEvent(Strict):
    """``response.cancel``: ends a response of this connection; what it has generated is kept."""

    type: Literal["response.cancel"]
    response_id: Id
