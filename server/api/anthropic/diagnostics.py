"""Answers ``diagnostics`` of the Messages API: which part of a request differs from the request of an earlier message,
and how many tokens had to be computed again for that.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from dataclasses import dataclass, replace

import msgspec

from server.api.anthropic import objects as objects
from server.api.anthropic.as_chat import split_message, text_of, tool_of
from server.api.anthropic.schemas import PromptRequest
from server.chat.billing_line import fold_billing_line

MOST_REQUESTS = 256  # that are remembered per tenant, the newest ones
MOST_TENANTS = 1024  # with remembered requests, those that asked last
DIGEST_BYTES = 8


@dataclass(frozen=True)
class RequestDigest:
    """Digests of a request's parts: ``options`` of all else that its prompt depends on, ``messages`` of each message,
    one behind the other. ``tokens``: the length of its prompt.
    """

    model: bytes
    system: bytes
    tools: bytes
    options: bytes
    messages: bytes
    tokens: int = 0

    @classmethod
    def of(cls, request: PromptRequest, *, folds: bool) -> RequestDigest:
        """The digests of a request. ``folds``: its billing line is not in the prompt."""
        system = text_of(request.system)
        sent = [part for message in request.messages for part in split_message(message)]
        thinking = None if request.thinking is None else request.thinking.model_dump()
        effort = None if request.output_config is None else request.output_config.effort
        choice = None if request.tool_choice is None else request.tool_choice.model_dump()
        return cls(
            digest(request.model),
            digest(fold_billing_line(system) if folds else system),
            digest([tool_of(tool) for tool in request.functions if not tool.defer_loading]),
            digest([thinking, effort, choice]),
            b"".join(map(digest, sent)),
        )

    def change_since(self, before: RequestDigest) -> objects.ChangedPart | None:
        """The first part that differs from ``before``; None if messages were appended at most."""
        if self.model != before.model:
            return "model_changed"
        if self.system != before.system:
            return "system_changed"
        if self.tools != before.tools:
            return "tools_changed"
        return None if self.messages.startswith(before.messages) else "messages_changed"


class DiagnosticsTable:
    """The digests of the last requests that asked for diagnostics, by tenant and the id of the message that answered.
    Lost when the server stops.
    """

    def __init__(self) -> None:
        self._tenants: OrderedDict[str, OrderedDict[str, RequestDigest]] = OrderedDict()

    def get(self, tenant: str, id: str) -> RequestDigest | None:
        """The request that the message ``id`` answered; None if it is not known."""
        return self._tenants.get(tenant, OrderedDict()).get(id)

    def put(self, tenant: str, id: str, request: RequestDigest) -> None:
        """Remember a request; the oldest one of the tenant is forgotten if there are too many."""
        known = self._tenants.setdefault(tenant, OrderedDict())
        self._tenants.move_to_end(tenant)
        known[id] = request
        if len(known) > MOST_REQUESTS:
            known.popitem(last=False)
        if len(self._tenants) > MOST_TENANTS:
            self._tenants.popitem(last=False)


@dataclass(frozen=True)
class Diagnosis:
    """The diagnosis of one request against that of the message ``previous`` (None: there is none)."""

    table: DiagnosticsTable
    tenant: str
    previous: str | None
    request: RequestDigest

    def answer(self, id: str, tokens: int, cached: int) -> objects.Diagnostics | None:
        """What message ``id`` says, whose prompt has ``tokens``, of which ``cached`` were reused; the request is then
        remembered. None: nothing to say, as nothing that was computed before had to be computed again.
        """
        before = None if self.previous is None else self.table.get(self.tenant, self.previous)
        self.table.put(self.tenant, id, replace(self.request, tokens=tokens))
        if self.previous is None:
            return None
        if before is None:
            return objects.Diagnostics(objects.UnknownReason("previous_message_not_found"))
        missed = min(before.tokens, tokens - 1) - cached
        if missed <= 0:
            return None
        changed = self.request.change_since(before)
        if changed is not None:
            return objects.Diagnostics(objects.ChangeReason(changed, missed))
        same = self.request.options == before.options  # then it was lost here, as the receipt says
        return None if same else objects.Diagnostics(objects.UnknownReason("unavailable"))


def digest(value: object) -> bytes:
    """A digest of a JSON value, in which media stand as they are."""
    text = json.dumps(value, default=msgspec.to_builtins)
    return hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES).digest()
