"""Routes of text completions: prompts are used as sent, without a chat template."""

from __future__ import annotations

from contextlib import ExitStack

from fastapi import APIRouter, Request
from starlette.responses import Response

from server.chat.prompts import Prompt, check_room, completion_prompts
from server.http.body import JsonRoute, takes_turn
from server.schemas.completion_requests import CompletionRequest
from server.schemas.vendor_fields import TokenOptions
from server.turns.completion_reply import CompletionReply
from server.turns.naming import named_session
from server.turns.pending_turn import PendingTurn, open_turn
from server.turns.replies import UsageOptions
from server.turns.reply_rules import text_rules
from server.turns.turn_runner import TurnRunner

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/completions")
@takes_turn
async def create_completion(body: CompletionRequest, request: Request) -> Response:
    """Complete one or several prompts; with a session id, continue that session's text."""
    session = await named_session(request, body.session_id)
    with ExitStack() as claim:
        turn = await open_turn(request, body, session, claim)
        answer = await turn.replay(lambda created: replay_completion(turn, body, created))
        if answer is not None:
            return answer
        tokens, facts = turn.context.tokens, turn.context.facts
        prompts = await tokens.run(completion_prompts, body, tokens, facts, turn.continued)
        for prompt in prompts:  # before a grammar is compiled for nothing
            check_room(prompt, body, facts)
        rules = await text_rules(turn.context, body, body)
        reply = CompletionReply(
            turn.reply_head("cmpl"),
            UsageOptions.of(body),
            [prompt for prompt in prompts for _ in range(body.candidates)],
            body.echo,
            TokenOptions.of(body, body.token_logprobs),
            (body.n, body.candidates),
        )
        return await TurnRunner(turn, prompts, rules, reply).respond()


def replay_completion(turn: PendingTurn, body: CompletionRequest, created: int) -> CompletionReply:
    """The reply of a replayed turn, without logprobs, which the log does not have. ``created`` is in Unix seconds."""
    given = body.prompts[0]  # a session takes one
    prompt = Prompt([], echo=given if isinstance(given, str) else turn.context.tokens.decode(given))
    return CompletionReply(turn.reply_head("cmpl", created), UsageOptions.of(body), [prompt], body.echo)
