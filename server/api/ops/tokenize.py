"""Routes that run no turn: tokenize, detokenize, chat template, tokenizer info, and the server's version."""

from __future__ import annotations

from importlib import metadata
from typing import Annotated, Self

import msgspec
from fastapi import APIRouter, Request
from pydantic import AfterValidator, Field, model_validator
from starlette.responses import Response

from scheduler.model_facts import ModelFacts
from server.chat.chat_tokenizer import ChatTokenizer
from server.chat.expansions import media_of
from server.chat.prompts import Prompt, chat_prompt, check_bytes, check_ids, context_exceeded
from server.http.body import JsonRoute
from server.http.json_response import json_response
from server.log.identity import Session
from server.schemas.field_types import TokenIds
from server.schemas.messages import MAX_MESSAGES, MAX_TOOLS, Messages
from server.schemas.requests import ChatRequest, TemplateVariables
from server.schemas.strict import Strict, validate, wrong
from server.schemas.tools import ChatTool, distinct
from server.turns.context import context_of
from server.turns.naming import named_session

router = APIRouter(route_class=JsonRoute)
OF_CHATS = ("tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs")


class TokenizeRequest(Strict):
    """``POST /tokenize``: a text, or the messages of a chat with what its template reads."""

    model: str = Field("", max_length=512)
    prompt: str | None = None
    messages: Annotated[Messages, Field(min_length=1, max_length=MAX_MESSAGES)] | None = None
    tools: (
        Annotated[list[ChatTool], Field(max_length=MAX_TOOLS), Field(fail_fast=True), AfterValidator(distinct)] | None
    ) = None
    add_special_tokens: bool | None = None
    return_token_strs: bool = False
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: TemplateVariables = Field(default_factory=dict)

    @model_validator(mode="after")
    def is_one_of_both(self) -> Self:
        """Each field where it belongs."""
        if (self.prompt is None) == (self.messages is None):
            raise wrong("prompt", "or messages is required, and not both")
        of_chats = [name for name in OF_CHATS if name in self.model_fields_set]
        if self.messages is None and of_chats:
            raise wrong(of_chats[0], "is only allowed with messages")
        if self.messages is not None and self.add_special_tokens:
            raise wrong(
                "add_special_tokens", "is only allowed with prompt: a chat template writes its special tokens itself"
            )
        both = self.continue_final_message and "add_generation_prompt" in self.model_fields_set
        if both and self.add_generation_prompt:
            raise wrong("add_generation_prompt", "cannot be true if the final message is continued")
        return self


class DetokenizeRequest(Strict):
    """``POST /detokenize``."""

    model: str = Field("", max_length=512)
    tokens: TokenIds


class Tokenized(msgspec.Struct, frozen=True):
    """Token ids; ``token_strs`` are their entries in the vocabulary."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Text(msgspec.Struct, frozen=True):
    """The text of token ids."""

    prompt: str


class Rendered(msgspec.Struct, frozen=True):
    """The prompt of a chat, as text and as token ids."""

    prompt: str
    tokens: list[int]


class Version(msgspec.Struct, frozen=True):
    """The server's version."""

    version: str


@router.post("/tokenize")
async def tokenize(body: TokenizeRequest, request: Request) -> Response:
    """Tokenise a text or a chat."""
    context = context_of(request)
    context.check_model(body.model)
    facts = context.facts
    ids = await context.tokens.run(text_ids if body.messages is None else chat_ids, body, context.tokens, facts)
    strings = await context.tokens.run(context.tokens.pieces, ids) if body.return_token_strs else None
    return json_response(Tokenized(len(ids), facts.max_context, ids, strings))


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
    """Convert token ids to text."""
    context = context_of(request)
    context.check_model(body.model)
    facts = context.facts
    if len(body.tokens) > facts.max_context:
        raise context_exceeded(f"tokens is longer than this model's context of {facts.max_context} tokens.", "tokens")
    check_ids(body.tokens, facts.vocab_size, "tokens")
    return json_response(Text(await context.tokens.run(context.tokens.decode, body.tokens)))


@router.post("/apply-template")
async def apply_template(body: ChatRequest, request: Request) -> Response:
    """Render the prompt of a chat without generating; the body is that of ``/v1/chat/completions``."""
    session = await named_session(request, body.session_id)
    prompt = await preview_prompt(body, request, session)
    text = await context_of(request).tokens.run(context_of(request).tokens.decode, prompt.ids)
    return json_response(Rendered(text, prompt.ids))


@router.get("/tokenizer_info")
async def tokenizer_info(request: Request) -> dict[str, str | None]:
    """The special tokens and the chat template."""
    return context_of(request).tokens.info


@router.get("/version")
async def version() -> Response:
    """The server's version."""
    return json_response(Version(metadata.version("warmturn")))


async def preview_prompt(body: ChatRequest, request: Request, session: Session | None) -> Prompt:
    """The prompt that a chat would have now; no session is claimed or changed."""
    context = context_of(request)
    context.check_model(body.model)
    facts = context.facts
    record = await context.log.get(session.tenant, session.name) if session is not None and session.stateful else None
    return await context.tokens.run(chat_prompt, body, context.tokens, facts, record)


def text_ids(body: TokenizeRequest, tokens: ChatTokenizer, facts: ModelFacts) -> list[int]:
    """The token ids of the prompt. Blocking."""
    assert body.prompt is not None
    check_bytes([body.prompt], facts, "prompt")
    return tokens.encode(body.prompt, special=body.add_special_tokens is not False)


def chat_ids(body: TokenizeRequest, tokens: ChatTokenizer, facts: ModelFacts) -> list[int]:
    """The token ids of the messages. Blocking."""
    names = ("messages", "tools", "chat_template_kwargs", "continue_final_message")
    chat = validate(ChatRequest, {name: getattr(body, name) for name in names})
    prompt = chat_prompt(chat, tokens, facts, None)
    if body.add_generation_prompt or chat.goes_on:
        return prompt.ids
    text = tokens.render(prompt.messages, generation_prompt=False, rendering=prompt.rendering)
    return media_of(facts, prompt.messages).encode(tokens, text, prompt.messages)
