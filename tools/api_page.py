"""Writes docs/api.md: every endpoint with its parameters, from the code and from OpenAI's schema.

make pages
"""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args, get_origin

from fastapi.routing import APIRoute
from pydantic import BaseModel

from server.api import routers
from server.schemas.strict import Strict

ROOT = Path(__file__).resolve().parent.parent
WIDTH = 100
PINNED = ROOT / "tests" / "openai_schema" / "openai.json"
REQUESTS = {  # endpoint -> what OpenAI's document calls its request
    "POST /v1/chat/completions": "CreateChatCompletionRequest",
    "POST /v1/completions": "CreateCompletionRequest",
    "POST /v1/responses": "CreateResponse",
    "POST /v1/conversations": "CreateConversationBody",
    "POST /v1/conversations/{conversation_id}": "UpdateConversationBody",
    "POST /v1/conversations/{conversation_id}/items": "CreateConversationItemsBody",
}
INTRODUCTION = """# The API

This page is generated from the code by `make pages`; a test checks that it is up to date.

Every parameter is honoured, or the request is refused with a 400 whose `error.param` names it.
Nothing is ignored silently. With `--unknown-fields ignore`, unknown fields of bodies are left out
and listed in the receipt (`cache.ignored`). `null` means absent.

- *Refused, except* lists values that ask for nothing. They are accepted because some clients always
  send them.
- *Changes nothing* marks what is taken with any value of its type and has no effect on the reply;
  [the last section](#what-is-taken-and-changes-nothing) lists it for parts of parameters too.
- *Extension*: not in OpenAI's specification. The specification used here is
  {source}.

Errors have OpenAI's form, `{{"error": {{"message", "type", "param", "code"}}}}`, below
`/v1/messages` Anthropic's, and below `/api/` Ollama's. They never repeat what was sent. 429, 503
and 409 `session_busy` have `Retry-After`, in seconds.

| status | when |
|---|---|
| 400 | the request is wrong: `param` names the field |
| 401 | the key is missing or wrong |
| 403 | the server has no keys and the request's host name is not allowed (`--allowed-host`) |
| 404 | the object does not exist, or belongs to another tenant |
| 405, 415 | wrong method, wrong content type |
| 408 | the request was not complete in time, or its stream was not read in time |
| 409 | the session is busy, or exists already |
| 410 | rows of the session's log are damaged |
| 413, 431 | the body is larger than 64 MiB, the head than 64 KiB |
| 429 | too many requests are waiting |
| 499 | the turn was cancelled before its first token |
| 503 | the engine is not ready, or the server is stopping |
| 507 | the server's disk is full |
"""


def endpoints() -> Iterator[APIRoute]:
    routes = (route for router in routers() for route in router.routes)
    found = [route for route in routes if isinstance(route, APIRoute) and route.include_in_schema]
    return iter(sorted(found, key=lambda route: (route.path, sorted(route.methods or ()))))


def model_of(fields: Any) -> type[BaseModel] | None:
    """The model that a body, or a query, is read with."""
    kind = None if fields is None else fields.field_info.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def request_parameters(name: str) -> dict[str, bool]:
    """The parameters of one of the document's requests, and whether each is required."""
    pinned = json.loads(PINNED.read_text(encoding="utf-8"))
    shape = pinned["schemas"][name]
    found: dict[str, bool] = {}
    for option in shape.get("anyOf", [shape]):
        resolved = pinned["$defs"][option["$ref"].rpartition("/")[2]] if "$ref" in option else option
        found |= {name: name in resolved.get("required", ()) for name in resolved["properties"]}
    return found


def span(shape: Mapping[str, Any], shapes: Mapping[str, Any]) -> str:
    """What a parameter may be, in a few words."""
    if "$ref" in shape:
        return span(shapes[shape["$ref"].rpartition("/")[2]], shapes)
    if options := shape.get("anyOf") or shape.get("oneOf"):
        said = dict.fromkeys(span(option, shapes) for option in options if option.get("type") != "null")
        return " or ".join(said)
    if "const" in shape:
        return code(shape["const"])
    if "enum" in shape:
        return " or ".join(code(value) for value in shape["enum"])
    kind = str(shape.get("type", "anything"))
    least, most = (shape.get(f"{end}imum", shape.get(f"exclusive{end.title()}imum")) for end in ("min", "max"))
    if least is not None and most is not None:
        return f"{kind}, {'above ' if 'exclusiveMinimum' in shape else ''}{least} to {most}"
    if kind == "array":
        return f"array of {span(shape.get('items', {}), shapes)}"
    return kind


def code(value: object) -> str:
    return f"`{json.dumps(value)}`"


def rows(model: type[BaseModel], document: Mapping[str, bool] | None) -> Iterator[str]:
    """One line for each parameter: those of the document first, in its order, then ours."""
    shape = model.model_json_schema()
    honoured: Mapping[str, Any] = shape.get("properties", {})
    later = model.LATER if issubclass(model, Strict) else {}
    names = list(dict.fromkeys([*(document or ()), *honoured, *later]))
    for name in names:
        if name in honoured:
            note = "required, " if name in shape.get("required", ()) else ""
            fate = f"{note}{span(honoured[name], shape.get('$defs', {}))}"
            default = honoured[name].get("default")
            fate += f", default {code(default)}" if default not in (None, "", [], {}) else ""
            fate += f", {honoured[name]['description']}" if "description" in honoured[name] else ""
            fate += ", changes nothing" if issubclass(model, Strict) and name in model.IDLE else ""
        elif later.get(name):
            fate = f"refused, except {', '.join(code(value) for value in later[name])}"
        else:
            fate = "refused"
        extension = " (extension)" if document is not None and name not in document else ""
        yield f"| `{name}`{extension} | {fate} |"


def section(route: APIRoute) -> list[str]:
    verb = f"{', '.join(sorted(route.methods or ()))} {route.path}"
    purpose = " ".join((route.endpoint.__doc__ or "").split()).replace("``", "`")
    lines = [f"## {verb}", "", *textwrap.wrap(purpose, WIDTH, break_long_words=False, break_on_hyphens=False), ""]
    body, queries = model_of(route.body_field), route.dependant.query_params
    name = REQUESTS.get(verb)
    document = request_parameters(name) if name else None
    for title, model, known in (("body", body, document), ("URL", model_of(queries[0]) if queries else None, None)):
        if model is not None and (model.model_fields or known):
            lines += [f"| parameter of the {title} | |", "|---|---|", *rows(model, known), ""]
    return lines


def idle_fields(models: Sequence[type[BaseModel]], path: str = "", kind: str = "") -> Iterator[str]:
    """The paths of the fields of models, and of models within these, that are taken and change nothing. ``models`` are
    what a value may be; ``kind`` is what stands behind ``path`` for all of them. Where a field changes nothing for some
    of them only, these are named by their type.
    """
    for model in models:
        for name in getattr(model, "IDLE", ()):
            others = [other for other in models if name in other.model_fields]
            same = all(name in getattr(other, "IDLE", ()) for other in others)
            yield f"{path}{kind if same else f'[{type_of(model)}]'}{'.' if path else ''}{name}"
    for model in models:
        for name, field in model.model_fields.items():
            inner = [*models_in(field.annotation)]
            place = f"{path}{kind}{'.' if path else ''}{field.alias or name}"
            for listed in (False, True):
                found = [one for one, in_list in inner if in_list is listed]
                yield from idle_fields(found, place, "[]" if listed else "")


def type_of(model: type[BaseModel]) -> str:
    return str(get_args(model.model_fields["type"].annotation)[0])


def models_in(annotation: object, listed: bool = False) -> Iterator[tuple[type[BaseModel], bool]]:
    """The models in a type, and whether it has lists of them."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation, listed
    for inner in get_args(annotation):
        yield from models_in(inner, listed or get_origin(annotation) is list)


def idle_section(routes: Iterable[APIRoute]) -> list[str]:
    """What each endpoint takes without any effect."""
    lines = ["## What is taken and changes nothing", "", "| endpoint | fields of the body |", "|---|---|"]
    for route in routes:
        model = model_of(route.body_field)
        fields = sorted({*idle_fields([model])}) if model is not None else []
        if fields:
            told = ", ".join(f"`{field}`" for field in fields)
            lines.append(f"| {', '.join(sorted(route.methods or ()))} {route.path} | {told} |")
    return lines


def page() -> str:
    source = json.loads(PINNED.read_text(encoding="utf-8"))["source"]
    lines = [INTRODUCTION.format(source=source)]
    for route in endpoints():
        lines += section(route)
    lines += idle_section(endpoints())
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    sys.stdout.write(page())
