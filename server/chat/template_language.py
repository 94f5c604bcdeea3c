"""The Jinja of chat templates: what they may use, as transformers defines it. Templates are programs of others, so they
run in a sandbox and see plain data.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.utils
from jinja2.sandbox import ImmutableSandboxedEnvironment

REASONING = ("reasoning_content", "thinking", "reasoning")  # names of a message's reasoning; the first is the usual one


def render_chat(
    source: str,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    generation_prompt: bool,
    variables: Mapping[str, Any],
) -> str:
    """A chat template's text for messages, which must be one or more. Raises whatever the template raises."""
    if not messages:
        raise ValueError("there is no message")
    said = [{key: value for key, value in message.items() if value is not None} for message in messages]
    return compile_template(source).render(
        messages=[with_reasoning(message) for message in plain(said)],
        tools=plain(tools),
        documents=None,
        add_generation_prompt=generation_prompt,
        **plain(variables),
    )


def with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """A message with its reasoning under the two names that templates read, if it has any."""
    reasoning = next((message[name] for name in REASONING if message.get(name) is not None), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def plain(value: Any) -> Any:
    """JSON's types only, as objects of others have methods that a sandbox does not know to be dangerous."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):  # of an enum, for one
            return getattr(kind, f"__{kind.__name__}__")(value)
    if isinstance(value, Mapping):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(plain, value)) if type(value) in (list, tuple) else [plain(item) for item in value]
    return f"<{type(value).__name__}>"


class _Generation(jinja2.ext.Extension):
    """``{% generation %}``, which marks replies for those who train on them: its text, as it is."""

    tags = {"generation"}  # noqa: RUF012  # jinja's way

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.CallBlock:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        block = jinja2.nodes.CallBlock(self.call_method("_text"), [], [], body)
        block.set_lineno(line)
        return block

    def _text(self, caller: Callable[[], str]) -> str:
        return caller()


class _Dict:
    """``dict`` of templates: no attributes but ``fromkeys``."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args, **kwargs)


class _Namespace(jinja2.utils.Namespace):
    """``namespace`` of templates: no attributes that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args  # so that a template can have an attribute of this name
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        jinja2.utils.Namespace.__setitem__(self, name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError("chat templates cannot store attributes that begin with an underscore")


def _raise(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Without jinja's escapes of HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@lru_cache
def compile_template(source: str) -> jinja2.Template:
    """A template's program. Raises jinja2.TemplateError."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    environment.globals["dict"] = _Dict()
    environment.globals["namespace"] = _Namespace
    return environment.from_string(source)
