"""Rewrites JSON schemas to the keywords that a grammar enforces; keywords without effect are left out."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import combinations

from server.constraints.json_schema import (
    COUNTS,
    FORMATS,
    MAX_COUNT,
    UNSUPPORTED,
    Schema,
    check_schema,
    check_size,
    parts,
    target,
)
from server.constraints.patterns import bridge_surrogates, looks_around, split_conjunction

# Formats of numbers (OpenAPI's registry) as bounds.
INTEGERS = {f"int{bits}": (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) for bits in (8, 16, 32, 64)}
INTEGERS |= {f"uint{bits}": (0, 2**bits - 1) for bits in (8, 16, 32, 64)}
# Formats that any string, or any number, has: they tell people what it is.
SAY_NOTHING = frozenset(
    "binary password path file-path directory-path float double decimal multiline textarea markdown html".split()
)
BASE64 = r"(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?"
ENCODED = {
    "byte": f"^{BASE64}$",
    "base64": f"^{BASE64}$",
    "base64url": r"^(?:[A-Za-z0-9_-]{4})*(?:[A-Za-z0-9_-]{2}(?:==)?|[A-Za-z0-9_-]{3}=?)?$",
}
NUMERIC = {"integer", "number"}
LISTS = {"enum", "type", "title", "description"}
COMBINED = {"allOf", "anyOf", "oneOf", "$ref", "prefixItems", "enum", "const"}
MOST_LISTED = 6  # values, whose subsets are listed
MOST_STEPS = 8  # from one reference to the next


def enforceable(schema: object) -> Schema:
    """The same schema with what can be rewritten. Raises ValueError for what is no schema, or too large."""
    check_size(schema)
    made: Schema = json.loads(json.dumps(schema))
    changes: tuple[Callable[[Schema, Schema], None], ...] = (with_null, of_format, of_names, of_items, of_patterns)
    for node in nodes(made):
        for change in changes:
            change(node, made)
    return made


def prepare(schema: object) -> Schema:
    """``enforceable``, then checked: every keyword can be enforced. Raises ValueError that names what cannot be."""
    made = enforceable(schema)
    check_schema(made)
    return made


def lenient(schema: object, *, patterns: bool = True) -> tuple[Schema, list[str]]:
    """The schema without what cannot be enforced, or without any ``patterns``, and the keywords that are left out, each
    as often as it is. It admits all that ``schema`` does, and more. Raises as ``enforceable``."""
    made = enforceable(schema)
    left: list[str] = []
    for node in nodes(made):
        unknown = [*UNSUPPORTED, "nullable", "minProperties", "maxProperties"]
        if node is not made:
            unknown.append("$id")
        if node.get("format") not in FORMATS:
            unknown.append("format")
        if not patterns or (isinstance(node.get("pattern"), str) and looks_around(node["pattern"])):
            unknown.append("pattern")
        unknown += [key for key in COUNTS if isinstance(node.get(key), int | float) and node[key] > MAX_COUNT]
        for key in dict.fromkeys(unknown):
            if key in node:
                del node[key]
                left.append(key)
        if isinstance(node.get("oneOf"), list) and "anyOf" not in node:
            node["anyOf"] = node.pop("oneOf")
            left.append("oneOf")
    return made, left


def nodes(schema: Schema) -> list[Schema]:
    """Every schema within a schema, itself first."""
    found, seen = [schema], {id(schema)}
    for node in found:
        named = target(node["$ref"], schema) if "$ref" in node else None
        for part in (*parts(node), *([named] if isinstance(named, dict) else [])):
            if id(part) not in seen:
                seen.add(id(part))
                found.append(part)
    return found


def with_null(node: Schema, root: Schema) -> None:
    """Rewrite ``nullable``, OpenAPI's keyword, to a type that includes null."""
    if node.get("nullable") is not True or node is root:
        return
    kinds = node.get("type")
    if kinds is not None:
        node["type"] = [*([kinds] if isinstance(kinds, str) else kinds), "null"]
        if isinstance(node.get("enum"), list) and None not in node["enum"]:
            node["enum"] = [*node["enum"], None]
    elif isinstance(node.get("anyOf"), list):
        node["anyOf"] = [*node["anyOf"], {"type": "null"}]
    elif "$ref" in node:
        node["anyOf"] = [{"$ref": node.pop("$ref")}, {"type": "null"}]
    else:
        return
    del node["nullable"]


def of_format(node: Schema, root: Schema) -> None:
    """Formats of numbers as bounds, encodings as patterns; those that say nothing of a text are left out."""
    name = node.get("format")
    if not isinstance(name, str):
        return
    kinds = kinds_of(node)
    if name in INTEGERS and kinds & NUMERIC:
        least, most = INTEGERS[name]
        node["type"] = sorted({"integer" if kind == "number" else kind for kind in kinds})
        for key, bound, nearer in (("minimum", least, max), ("maximum", most, min)):
            given = node.get(key, bound)
            node[key] = nearer(bound, given) if isinstance(given, int | float) else given
    elif name in ENCODED and "pattern" not in node:
        node["pattern"] = ENCODED[name]
    elif name not in SAY_NOTHING and name not in INTEGERS:
        return
    del node["format"]


def of_names(node: Schema, root: Schema) -> None:
    """``propertyNames``: the names that it lists as properties, a pattern as one of ``patternProperties``."""
    names = follow_reference(node.get("propertyNames"), root)
    if names is True or (isinstance(names, dict) and not set(names) - {"type", "title", "description"}):
        del node["propertyNames"]  # any name is a string
        return
    if not isinstance(names, dict) or "patternProperties" in node or "allOf" in node:
        return
    rest = node.get("additionalProperties", True)
    listed = [names["const"]] if "const" in names else names.get("enum")
    said = set(names) - {"type", "title", "description", "enum", "const"}
    if isinstance(listed, list) and not said:
        given = node.get("properties") or {}
        node["properties"] = {name: given.get(name, rest) for name in listed if isinstance(name, str)}
        node["additionalProperties"] = False
    elif "properties" not in node and "enum" not in names and (pattern := pattern_of(names)) is not None:
        node["patternProperties"] = {pattern: rest}
        node["additionalProperties"] = False
    else:
        return
    del node["propertyNames"]


def of_items(node: Schema, root: Schema) -> None:
    """``uniqueItems`` where nothing can come twice, or few values are listed: each subset of them, in their order."""
    unique = node.get("uniqueItems")
    if unique is False or (unique is True and number(node, "maxItems", MAX_COUNT) <= 1):
        del node["uniqueItems"]
    items = follow_reference(node.get("items"), root)
    listed = items.get("enum") if isinstance(items, dict) and not set(items) - LISTS else None
    if unique is not True or not isinstance(listed, list) or len(listed) > MOST_LISTED or set(node) & COMBINED:
        return
    if not all(isinstance(value, str) for value in listed):
        return
    least, most = number(node, "minItems", 0), number(node, "maxItems", len(listed))
    subsets = [
        chosen
        for size in range(len(listed) + 1)
        if least <= size <= most
        for chosen in combinations(dict.fromkeys(listed), size)
    ]
    if subsets and node.get("type") == "array":
        for key in ("uniqueItems", "items", "minItems", "maxItems", "type"):
            node.pop(key, None)
        node["enum"] = [[*chosen] for chosen in subsets]


def of_patterns(node: Schema, root: Schema) -> None:
    """Classes beside the surrogates; look-aheads at the beginning, as patterns that hold together."""
    if isinstance(node.get("pattern"), str):
        node["pattern"] = bridge_surrogates(node["pattern"])
        first, *ahead = split_conjunction(node["pattern"])
        if ahead and isinstance(node.get("allOf", []), list):
            node["pattern"] = first
            node["allOf"] = [*node.get("allOf", []), *({"pattern": each} for each in ahead)]
    if isinstance(node.get("patternProperties"), dict):
        node["patternProperties"] = {
            bridge_surrogates(name): value for name, value in node["patternProperties"].items()
        }


def follow_reference(schema: object, root: Schema) -> object:
    """A schema, or the target of its ``$ref``. Raises ValueError for a reference without a target."""
    for _ in range(MOST_STEPS):
        if not isinstance(schema, dict) or "$ref" not in schema or set(schema) - {"$ref", "title", "description"}:
            return schema
        schema = target(schema["$ref"], root)
    return schema


def pattern_of(names: Schema) -> str | None:
    """What ``pattern`` says, or ``minLength`` and ``maxLength``; None for more than that."""
    said = set(names) - {"type", "title", "description"}
    if said == {"pattern"} and isinstance(names["pattern"], str):
        return bridge_surrogates(names["pattern"])
    least, most = number(names, "minLength", 0), number(names, "maxLength", -1)
    if said <= {"minLength", "maxLength"}:
        return rf"^(?s:.){{{least},{most if most >= 0 else ''}}}$"
    return None


def number(node: Schema, key: str, otherwise: int) -> int:
    value = node.get(key, otherwise)
    return int(value) if isinstance(value, int | float) else otherwise


def kinds_of(node: Schema) -> set[str]:
    kinds = node.get("type")
    return {kinds} if isinstance(kinds, str) else {kind for kind in kinds or [] if isinstance(kind, str)}
