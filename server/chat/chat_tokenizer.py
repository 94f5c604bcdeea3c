"""``ChatTokenizer``: the tokenizer and its chat template. Text to token ids and back, off the event loop."""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from contextvars import copy_context
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple, ParamSpec, Self, TypeVar

import jinja2
import jinja2.meta
import jinja2.nodes

from scheduler.tokenizer_parts import TokenizerParts
from server.chat.dialect import Dialect
from server.chat.dialect_probe import FILL_INS, ProbedTemplate, measure
from server.chat.front_probe import measure_leading_tools, measure_places, measure_reasoning_switch, measure_typed_tools
from server.chat.late_tools import tools_in_front, tools_where_they_came
from server.chat.plain_tokenizer import PlainTokenizer
from server.chat.rendering import PLAIN, Rendering
from server.chat.template_content import with_own_parts
from server.config.prompt_rules import MESSAGES_JOINED, PROMPT_RULES, REASONING_KEPT, SYSTEM_IN_PLACE, TOOLS_IN_PLACE
from server.constraints.grammars import is_named
from server.log.logged_message import LoggedMessage, Scalar
from server.torchless import read_tokenizer
from server.workers import Workers

P = ParamSpec("P")
T = TypeVar("T")

PATIENCE = 30.0  # seconds for one request's templates and tokens
GIVEN = frozenset({"messages", "tools", "documents", "raise_exception", "strftime_now", "range", "namespace"})
OPTIONS = frozenset(  # of transformers' apply_chat_template: these are no variables of templates
    "add_generation_prompt chat_template continue_final_message conversation documents kwargs max_length padding "
    "return_assistant_tokens_mask return_dict return_tensors sanitize_control_tokens tokenize tokenizer_kwargs tools "
    "truncation".split()
)
SPARE = 16  # threads that may hang before requests wait for each other


class TokensWithin(NamedTuple):
    """Token ids of a text or a pair of texts, and of which of both each is; ``whole``: how many there would be without
    a limit.
    """

    ids: list[int]
    types: list[int]
    whole: int


class TemplateRefused(Exception):
    """The chat template refuses these messages. ``message`` is for the client."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class ChatTokenizer:
    """A tokenizer of transformers or a ``PlainTokenizer``, made thread-safe. The methods block; ``run`` calls them (or
    other functions) on a small thread pool, so that a long prompt does not block the event loop.
    """

    def __init__(
        self,
        tokenizer: Any,
        workers: int = 4,
        response_template: object = None,
        rules: Collection[str] = PROMPT_RULES,
    ) -> None:
        """``response_template`` says how the model's replies are parsed, instead of the measured dialect; ``rules`` are
        those by which prompts are rendered otherwise than written.
        """
        self.rules = frozenset(rules)
        self._tokenizer = tokenizer
        self._declared = response_template
        self._backend = tokenizer.backend_tokenizer if getattr(tokenizer, "is_fast", False) else None
        if self._backend is not None:
            # What a tokenizer.json may carry would cut or fill prompts without a word.
            self._backend.no_truncation()
            self._backend.no_padding()
        self._lock = threading.Lock()  # tokenizers in pure Python keep state between calls
        self._workers = Workers(workers, SPARE, PATIENCE)
        self._template = template_source(tokenizer)
        self.special_ids = frozenset(int(i) for i in tokenizer.all_special_ids)
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self.named_tokens = {str(token): int(i) for i, token in added.items() if is_named(str(token), token.special)}
        self._digest = digest(tokenizer, self._backend, self._template)

    @classmethod
    def load(cls, model: str, response_template: object = None, rules: Collection[str] = PROMPT_RULES) -> Self:
        """The tokenizer of a hub id or folder. Slow (imports transformers); raises what transformers raises."""
        return cls(read_tokenizer(model), response_template=response_template, rules=rules)

    @classmethod
    def of_parts(
        cls, parts: TokenizerParts, response_template: object = None, rules: Collection[str] = PROMPT_RULES
    ) -> Self:
        """The tokenizer that the engine has read. Raises ValueError if the parts are none."""
        return cls(PlainTokenizer(parts), response_template=response_template, rules=rules)

    @property
    def has_template(self) -> bool:
        return self._template is not None

    @property
    def info(self) -> dict[str, str | None]:
        """The special tokens and the chat template, for clients with a tokenizer of their own."""
        names = ("bos_token", "eos_token", "pad_token", "unk_token")
        said = {name: getattr(self._tokenizer, name, None) for name in names}
        return {name: None if token is None else str(token) for name, token in said.items()} | {
            "chat_template": self._template
        }

    def fingerprint(self, vocab_size: int) -> str:
        """A digest of tokenizer, chat template and vocabulary size, 32 hexadecimal digits. Models with the same one can
        continue each other's sessions; KV has a fingerprint of its own.
        """
        return hashlib.blake2b(f"{self._digest} {vocab_size}".encode(), digest_size=16).hexdigest()

    def encode(self, text: str, *, special: bool) -> list[int]:
        """Token ids of ``text``; with ``special`` also those that the tokenizer adds around a text (BOS)."""
        if self._backend is not None:
            ids: list[int] = self._backend.encode(text, add_special_tokens=special).ids
            return ids
        with self._lock:
            return list(self._tokenizer.encode(text, add_special_tokens=special))

    def encode_within(self, text: str, limit: int, pair: str | None = None) -> TokensWithin:
        """Token ids of a text, or of a pair of texts, with those that the tokenizer adds around them, at most ``limit``
        of them: the longer one of a pair is cut first.
        """
        if self._backend is None:
            with self._lock:
                return encode_slowly(self._tokenizer, text, limit, pair)
        first = self._backend.encode(text, add_special_tokens=False)
        second = None if pair is None else self._backend.encode(pair, add_special_tokens=False)
        around = self._backend.num_special_tokens_to_add(pair is not None)
        counts = len(first.ids), 0 if second is None else len(second.ids)
        kept = cut_longer(*counts, max(0, limit - around))
        first.truncate(kept[0])
        if second is not None:
            second.truncate(kept[1])
        made = self._backend.post_process(first, second, True)
        return TokensWithin(made.ids, made.type_ids, sum(counts) + around)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, special tokens included. Ids outside the vocabulary are skipped."""
        if self._backend is not None:
            text: str = self._backend.decode(list(ids), skip_special_tokens=False)
            return text
        with self._lock:
            return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """The vocabulary's entries for ids, which are not always valid text; "" for ids outside it."""
        with self._lock:
            return [str(piece or "") for piece in self._tokenizer.convert_ids_to_tokens(list(ids))]

    def render(
        self, messages: Sequence[LoggedMessage], *, generation_prompt: bool, rendering: Rendering = PLAIN
    ) -> str:
        """The chat template applied to logged messages. Raises TemplateRefused."""
        if TOOLS_IN_PLACE not in self.rules:
            rendering, messages = tools_in_front(rendering, messages)
        elif self.dialect.tools_lead:
            rendering, messages = tools_where_they_came(rendering, messages)
        dressed = self.dialect.to_template_messages(messages, rendering)
        tools = rendering.tools if self.dialect.native else ()
        return self.apply(dressed, tools, generation_prompt, {**self.dialect.reasoning_switch, **rendering.template})

    def apply(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        generation_prompt: bool,
        variables: Mapping[str, Scalar] | None = None,
    ) -> str:
        """The chat template applied to messages in the template's own form. Raises TemplateRefused."""
        if self._template is None:
            raise TemplateRefused("This model has no chat template: use /v1/completions instead.")
        developer = "developer" if "developer" in self._template else "system"
        named = [{**m, "role": developer} if m["role"] == "developer" else {**m} for m in messages]
        named = with_own_parts(named, self._template)
        options = {**(variables or {}), "tools": [dict(tool) for tool in tools] or None}
        try:
            text = self._tokenizer.apply_chat_template(
                named, tokenize=False, add_generation_prompt=generation_prompt, **options
            )
        except Exception as error:  # templates are programs of others: whatever they raise, the messages did it
            raise TemplateRefused(refusal(error)) from error
        return str(text)

    @cached_property
    def dialect(self) -> Dialect:
        """The model's dialect, measured at first use. Raises ValueError if a response template that was passed in is
        invalid; an invalid one of the tokenizer is ignored.
        """
        source = self._template or ""
        added = getattr(self._tokenizer, "added_tokens_decoder", {})
        words = frozenset(str(token) for token in added.values())
        special = frozenset(str(token) for token in added.values() if token.special)
        end = str(self._tokenizer.eos_token or "")
        template = ProbedTemplate(self.apply, TemplateRefused, source, words, special, end)
        own = getattr(self._tokenizer, "response_template", None)
        if self._declared is None and own is not None:
            with suppress(ValueError):
                return self._apply_rules(template, measure(template, own))
        return self._apply_rules(template, measure(template, self._declared))

    def _apply_rules(self, template: ProbedTemplate, found: Dialect) -> Dialect:
        """A dialect with what the rules need of the template."""
        if self._template is None:
            return found
        places, kept = measure_places(template, found), {}
        if REASONING_KEPT in self.rules:
            kept = measure_reasoning_switch(template, found, self.variables)
        return replace(
            found,
            places=replace(places, moves=SYSTEM_IN_PLACE in self.rules, joins=MESSAGES_JOINED in self.rules),
            reasoning_switch=kept,
            typed_tools=measure_typed_tools(template),
            tools_lead=not found.native or measure_leading_tools(template),
        )

    @cached_property
    def fill_in(self) -> tuple[str, str, str] | None:
        """The fill-in-the-middle tokens for prefix, suffix and middle; None if the tokenizer has none."""
        vocabulary = self._tokenizer.get_vocab()
        return next((marks for marks in FILL_INS if all(mark in vocabulary for mark in marks)), None)

    @cached_property
    def variables(self) -> frozenset[str]:
        """The chat template's variables that a client may set."""
        if self._template is None:
            return frozenset()
        named = {name for name in variables_of(self._template) if not name.endswith("_token")}
        return frozenset(named - OPTIONS - GIVEN)

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a blocking function on a thread, in the caller's context. Raises WorkTimedOut or NoWorkerFree
        (``server.workers``).
        """
        context = copy_context()
        return await self._workers.run(lambda: context.run(function, *args, **kwargs))

    def close(self) -> None:
        """Let the threads end."""
        self._workers.close()


def encode_slowly(tokenizer: Any, text: str, limit: int, pair: str | None) -> TokensWithin:
    """See ``ChatTokenizer.encode_within``, by a tokenizer of transformers in Python."""
    given = ([text],) if pair is None else ([text], [pair])  # as a list, an empty text of a pair is one too
    whole = tokenizer(*given, return_token_type_ids=True)
    count = len(whole["input_ids"][0])
    if count > limit:
        whole = tokenizer(*given, truncation="longest_first", max_length=limit, return_token_type_ids=True)
    return TokensWithin(whole["input_ids"][0], whole["token_type_ids"][0], count)


def cut_longer(first: int, second: int, limit: int) -> tuple[int, int]:
    """To how many tokens two texts of these lengths are cut so that both have ``limit`` together: the longer one until
    both are equally long, as the tokenizers library does it.
    """
    if first + second <= limit:
        return first, second
    shorter = min(first, second)
    longer = shorter if shorter > limit else max(shorter, limit - shorter)
    if shorter + longer > limit:
        shorter, longer = limit // 2, limit // 2 + limit % 2
    return (longer, shorter) if first > second else (shorter, longer)


def digest(tokenizer: Any, backend: Any, template: str | None) -> str:
    """A hash of the tokenizer and its template."""
    if backend is not None:
        made = backend.to_str()
    else:
        made = repr((type(tokenizer).__name__, sorted(tokenizer.get_vocab().items()), tokenizer.special_tokens_map))
    return hashlib.blake2b(repr((made, template)).encode(), digest_size=16).hexdigest()


def template_source(tokenizer: Any) -> str | None:
    """The Jinja source that ``apply_chat_template`` uses by default, followed by that for tools, if it is another one;
    None if there is none.
    """
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, dict):
        default, tools = template.get("default"), template.get("tool_use", "")
        template = f"{default}\n{tools}" if default and tools else default
    return template if isinstance(template, str) and template else None


def variables_of(source: str) -> frozenset[str]:
    """The variables that a chat template reads without setting them (or sets only as a default); empty if the source
    cannot be parsed.
    """
    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"], autoescape=True)
    try:
        tree = environment.parse(re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", source))
    except jinja2.TemplateError:
        return frozenset()
    names = jinja2.meta.find_undeclared_variables(tree)
    own = {node.name for node in tree.find_all(jinja2.nodes.Name) if node.ctx == "store"}
    return frozenset(
        name for name in names if name not in own or re.search(rf"(?<![.\w]){name}\s+is\s+(not\s+)?defined", source)
    )


def refusal(error: Exception) -> str:
    """One sentence about a template's exception. Only text of raise_exception is quoted."""
    said = str(error).strip() if type(error).__name__ == "TemplateError" else ""
    if said and len(said) <= 200 and said.isprintable():
        return f"The model's chat template does not take these messages: {said}"
    return "The model's chat template does not take these messages."
