"""Inputs as an engine takes them: texts with their prompt, token ids, pairs of texts. All of it blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from scheduler.model_facts import ModelFacts, PoolingFacts
from scheduler.pooling_messages import PoolInput
from scheduler.protocol import pack_ids
from server.api.embeddings.objects import CutInput
from server.api.embeddings.schemas import EmbeddingRequest, Pooling, RerankRequest, ScoreRequest
from server.chat.chat_tokenizer import ChatTokenizer, TokensWithin
from server.chat.prompts import check_ids, context_exceeded
from server.errors import bad_request


@dataclass
class Inputs:
    """What a request has, as the engine takes it. ``param``: the field that errors name."""

    param: str
    made: list[PoolInput] = field(default_factory=list)
    cut: list[CutInput] = field(default_factory=list)
    tokens: int = 0

    def add(self, body: Pooling, encoded: TokensWithin, most: int, index: int | None, skip: int = 0) -> None:
        """Add one of at most ``most`` tokens, from the place ``index`` of the request. Raises a 400 for one without a
        token, and for one that was cut though the request forbids it.
        """
        if not encoded.ids:
            raise bad_request(f"{self.param} has an entry without a token.", self.param, "invalid_value")
        if encoded.whole > len(encoded.ids):
            if not body.truncate:
                raise context_exceeded(f"{self.param} is longer than the {most} tokens of this model.", self.param)
            self.cut.append(CutInput(index, encoded.whole, len(encoded.ids)))
        types = bytes(encoded.types) if any(encoded.types) else b""
        self.made.append(PoolInput(pack_ids(encoded.ids), types, skip))
        self.tokens += len(encoded.ids)


def embedding_inputs(body: EmbeddingRequest, tokens: ChatTokenizer, facts: ModelFacts) -> Inputs:
    """The inputs of a request for embeddings. Raises a 400."""
    assert facts.pooling is not None
    made, limit = Inputs("input"), body.limit(facts.max_context)
    prompt = prompt_of(body, facts.pooling)
    skip = prompt_length(prompt, tokens) if prompt else 0
    given: Sequence[str | list[int]] = body.input
    for index, one in enumerate(given):
        if isinstance(one, str):
            made.add(body, tokens.encode_within(prompt + one, limit), limit, index, skip)
        else:
            check_ids(one, facts.vocab_size, "input")
            made.add(body, TokensWithin(one[:limit], [], len(one)), limit, index)
    return made


def prompt_of(body: EmbeddingRequest, pooling: PoolingFacts) -> str:
    """The text before each input. Raises a 400 for a name that the checkpoint does not have."""
    name = pooling.default_prompt if body.named_prompt is None else body.named_prompt
    if name is None:
        return ""
    if name not in pooling.prompts:
        param = "prompt_name" if body.prompt_name is not None else "input_type"
        known = ", ".join(pooling.prompts) or "none"
        raise bad_request(f"{param} is none of this model's prompts, which are: {known}.", param, "invalid_value")
    return pooling.prompts[name]


def prompt_length(prompt: str, tokens: ChatTokenizer) -> int:
    """The tokens of a prompt, with those that are put before a text, and without the one behind it."""
    ids = tokens.encode(prompt, special=True)
    return len(ids) - (bool(ids) and ids[-1] in tokens.special_ids)


def pair_inputs(body: RerankRequest | ScoreRequest, tokens: ChatTokenizer, facts: ModelFacts) -> Inputs:
    """The pairs of a request for a model that reads both texts together. Raises a 400."""
    made, limit = Inputs("documents"), body.limit(facts.max_context)
    for index, (query, document) in enumerate(cut_documents(body, tokens)):
        made.add(body, tokens.encode_within(query, limit, document), limit, index)
    return made


def single_inputs(body: RerankRequest | ScoreRequest, tokens: ChatTokenizer, facts: ModelFacts) -> tuple[Inputs, int]:
    """The texts of a request for a model that embeds each of them, and how many of them are queries, which come first:
    one for all, or one for each document. Prompts named query and document are put before them. Raises a 400.
    """
    assert facts.pooling is not None
    made, limit = Inputs("documents"), body.limit(facts.max_context)
    pairs = cut_documents(body, tokens)
    queries = [pairs[0][0]] if len({query for query, _ in pairs}) == 1 else [query for query, _ in pairs]
    one_for_all = len(queries) < len(pairs)
    for name, texts in (("query", queries), ("document", [document for _, document in pairs])):
        prompt = facts.pooling.prompts.get(name, "")
        skip = prompt_length(prompt, tokens) if prompt else 0
        for index, text in enumerate(texts):
            place = None if name == "query" and one_for_all else index
            made.add(body, tokens.encode_within(prompt + text, limit), limit, place, skip)
    return made, len(queries)


def cut_documents(body: RerankRequest | ScoreRequest, tokens: ChatTokenizer) -> Sequence[tuple[str, str]]:
    """The pairs of a request, their documents no longer than it wants them."""
    most = body.max_tokens_per_doc if isinstance(body, RerankRequest) else None
    if most is None:
        return body.pairs
    return [(query, tokens.decode(tokens.encode(text, special=False)[:most])) for query, text in body.pairs]
