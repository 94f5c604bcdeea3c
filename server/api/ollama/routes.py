"""Routes of Ollama's API that generate; requests are translated to chats and completions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

from fastapi import APIRouter, Request
from msgspec.structs import replace
from starlette.responses import Response

from server.api.ollama.as_turns import as_chat, as_completion, prompt_chat
from server.api.ollama.models import keep_model
from server.api.ollama.reply import GenerateReply, OllamaChatReply, OllamaReply
from server.api.ollama.schemas import ChatBody, GenerateBody, GeneratingRequest, plain_name
from server.api.openai.chat import chat
from server.chat.prompts import check_room, completion_prompts
from server.errors import ApiError
from server.http.body import JsonRoute, takes_turn
from server.http.json_response import json_response
from server.turns.context import context_of
from server.turns.naming import named_session
from server.turns.pending_turn import open_turn
from server.turns.replies import Reply, ReplyHead
from server.turns.reply_rules import text_rules
from server.turns.turn_runner import TurnRunner

router = APIRouter(route_class=JsonRoute)


@router.post("/api/chat")
@takes_turn
async def ollama_chat(body: ChatBody, request: Request) -> Response:
    """Generate a reply to a whole conversation; without messages: whether the model is loaded."""
    keep_model(request, body.model, body.keep_alive, "generate")
    if not body.messages:
        return answer_load(body, request, OllamaChatReply)
    with named_as_sent():
        made = maker(body, request, OllamaChatReply)
        return await chat(as_chat(body), request, await named_session(request, None), made)


@router.post("/api/generate")
@takes_turn
async def ollama_generate(body: GenerateBody, request: Request) -> Response:
    """Generate a reply to one prompt; without a prompt: whether the model is loaded."""
    keep_model(request, body.model, body.keep_alive, "generate")
    if not body.prompt and not body.suffix:
        return answer_load(body, request, GenerateReply)
    with named_as_sent():
        if body.is_completion:
            return await complete(body, request)
        made = maker(body, request, GenerateReply)
        return await chat(prompt_chat(body), request, await named_session(request, None), made)


async def complete(body: GenerateBody, request: Request) -> Response:
    """Complete a prompt that is used as it is."""
    made = as_completion(body)
    with ExitStack() as claim:
        turn = await open_turn(request, made, None, claim)
        tokens, facts = turn.context.tokens, turn.context.facts
        prompts = await tokens.run(completion_prompts, made, tokens, facts, None)
        check_room(prompts[0], made, facts)
        rules = await text_rules(turn.context, made, made)
        reply = maker(body, request, GenerateReply)(turn.reply_head("cmpl"))
        return await TurnRunner(turn, prompts, rules, reply).respond()


@contextmanager
def named_as_sent() -> Iterator[None]:
    """Errors about a chat's format name the field that the client sent."""
    try:
        yield
    except ApiError as error:
        param = error.body.error.param
        if param is None or not param.startswith("response_format"):
            raise
        raise ApiError(error.status_code, error.detail.replace(param, "format"), param="format") from None


def answer_load(body: GeneratingRequest, request: Request, kind: type[OllamaReply]) -> Response:
    """The answer to a request that generates nothing: its model was loaded for it. Raises a 503 while the engine is
    not ready.
    """
    context = context_of(request)
    context.check_model(plain_name(body.model))
    head = ReplyHead.new("load", context.served_name, context.facts.fingerprint, None)
    piece = kind(head, logprobs=False, thinks=False).piece("", "", ())
    return json_response(replace(piece, done=True, done_reason="unload" if body.unloads else "load"))


def maker(body: GeneratingRequest, request: Request, kind: type[OllamaReply]) -> Callable[[ReplyHead], Reply]:
    """What makes the writer of the reply, when its head is known."""
    return partial(
        kind, logprobs=body.logprobs, thinks=body.think is not False, load_ns=getattr(request.state, "load_ns", 0)
    )
