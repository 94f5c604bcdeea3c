"""Checks JSON schemas before they are compiled: size limits, and keywords that cannot be enforced.

Everything here walks without recursion, visits a value once, and raises ``ValueError`` with the end of a sentence that
begins with the parameter's name. Messages hold nothing of the schema but keywords of JSON Schema.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from decimal import Decimal
from typing import Any
from urllib.parse import unquote

from server.constraints.patterns import check_pattern, looks_around

MAX_DEPTH = 64
MAX_NODES = 10_000
MAX_ENUM = 1000  # values, over the whole schema
MAX_CHARS = 200_000  # of all its strings and names
MAX_STRING = 10_000  # characters of one: what has to be said is looked ahead at as a whole
MAX_COUNT = 100_000  # minLength, maxItems and the like
MAX_OPTIONAL = 256  # properties of one object that may be left out: each step looks at all of them
MAX_CONJOINED = 8  # different patterns where some have to hold together: their product is exponential
MAX_MULTIPLE = 10_000  # the automaton of a multiple has a state per remainder

COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
ONE = ("additionalProperties", "additionalItems", "items")  # a schema, or something else
MANY = ("allOf", "anyOf", "oneOf", "prefixItems", "items")  # a list of schemas
NAMED = ("properties", "patternProperties", "$defs", "definitions")  # schemas by name
IN_PLACE = ("allOf", "anyOf", "oneOf")
UNSUPPORTED = (
    "uniqueItems not if then else contains minContains maxContains propertyNames "
    "dependencies dependentRequired dependentSchemas "
    "unevaluatedItems unevaluatedProperties $dynamicRef $dynamicAnchor $recursiveRef $recursiveAnchor x-guidance"
).split()
FORMATS = frozenset("date-time time date duration email hostname ipv4 ipv6 uuid uri".split())

Schema = dict[str, Any]


def check_schema(schema: object) -> None:
    """Refuse what cannot be enforced exactly or within bounds. ``schema`` is parsed JSON."""
    check_size(schema)
    assert isinstance(schema, dict)
    total = _Total()
    edges: dict[int, list[Schema]] = {}
    found = [schema]
    while found:
        node = found.pop()
        if id(node) in edges:
            continue
        total.add(node, root=node is schema)
        named = target(node["$ref"], schema) if "$ref" in node else None
        inside = [part for key in IN_PLACE for part in _schemas(node.get(key))]
        edges[id(node)] = [*inside, *([named] if isinstance(named, dict) else [])]
        found += [*edges[id(node)], *parts(node)]
    total.check()
    _check_cycles(edges)


def close_schema(schema: Schema) -> Schema:
    """The same schema with ``additionalProperties`` false where it is not set, so that a model does not invent
    properties: what is valid under it is valid under ``schema`` too. Nothing is closed where schemas are combined, as
    one may have to allow another one's properties.
    """
    made: Schema = json.loads(json.dumps(schema))
    nodes = [made]
    for node in nodes:
        nodes += parts(node)
        if _combines(node) or ("properties" in node and any(key in node for key in (*IN_PLACE, "$ref"))):
            return schema
    for node in nodes:
        named, needed = node.get("properties"), node.get("required")
        if not isinstance(named, dict) or "additionalProperties" in node or "patternProperties" in node:
            continue
        others = [name for name in needed if name not in [*named]] if isinstance(needed, list) else []
        if not others and "minProperties" not in node:
            node["additionalProperties"] = False
    return made


def _combines(node: Schema) -> bool:
    """Whether ``allOf`` has more than patterns."""
    return any({*part} != {"pattern"} for part in _schemas(node.get("allOf")))


class _Total:
    """What is bounded over a whole schema."""

    def __init__(self) -> None:
        self.values = 0
        self.patterns: set[str] = set()
        self.multiples: list[Decimal] = []
        self.conjoined = False

    def add(self, node: Schema, *, root: bool) -> None:
        """Check one schema on its own, and count what it has. Raises ValueError for what cannot be enforced."""
        _check_keywords(node, root)
        for key in ("enum", "examples"):
            self.values += len(node[key]) if isinstance(node.get(key), list) else 0
        patterns = [node.get("pattern"), *(node.get("patternProperties") or {})]
        for pattern in patterns:
            if isinstance(pattern, str):
                check_pattern(pattern)
                if looks_around(pattern):
                    raise ValueError(
                        "uses look-around or word boundaries in a pattern, which this server cannot enforce: "
                        "it knows look-aheads at the beginning, behind ^"
                    )
                self.patterns.add(pattern)
        if isinstance(node.get("format"), str):
            self.patterns.add("format " + node["format"])
        multiple = node.get("multipleOf")
        if isinstance(multiple, int | float) and multiple > 0:
            self.multiples.append(Decimal(str(multiple)))
        combined = [key for key in (*IN_PLACE, "$ref") if key in node]
        asserting = {"pattern", "format", "properties", "items"} & node.keys()
        self.conjoined |= "allOf" in node or len(combined) + bool(asserting) > 1

    def check(self) -> None:
        """Raise ValueError if there is too much."""
        if self.values > MAX_ENUM:
            raise ValueError(f"can have at most {MAX_ENUM} values in all its enums")
        if self.conjoined and len(self.patterns) > MAX_CONJOINED:
            raise ValueError(
                f"can have at most {MAX_CONJOINED} different patterns and formats where it combines schemas"
            )
        if not _few_remainders(self.multiples):
            raise ValueError(f"can have multipleOf only where at most {MAX_MULTIPLE} remainders follow from it")


def _few_remainders(multiples: list[Decimal]) -> bool:
    """Whether the automata of all multiples are small, one by one and where they have to hold together."""
    scales = [max(0, -int(number.as_tuple().exponent)) for number in multiples]
    if any(number > MAX_MULTIPLE for number in multiples) or max(scales, default=0) > 10:
        return False
    if sum(int(number.scaleb(scale)) for number, scale in zip(multiples, scales, strict=True)) > MAX_MULTIPLE:
        return False
    most = max(scales, default=0)
    least = math.lcm(*(int(number.scaleb(most)) for number in multiples))
    return least // math.gcd(least, 10**most) <= MAX_MULTIPLE


def check_size(schema: object) -> None:
    """Refuse what is too large to be looked at. Raises ValueError."""
    if not isinstance(schema, dict):
        raise ValueError("must be a JSON schema, an object")
    nodes = chars = longest = 0
    left: list[tuple[int, object]] = [(1, schema)]
    while left:
        depth, value = left.pop()
        nodes += 1
        if isinstance(value, dict | list) and nodes + len(left) + len(value) > MAX_NODES:
            raise ValueError(f"can have at most {MAX_NODES} values")
        if isinstance(value, dict):
            chars += sum(map(len, value))
            longest = max(longest, *map(len, value), 0)
            left += [(depth + 1, inner) for inner in value.values()]
        elif isinstance(value, list):
            left += [(depth + 1, inner) for inner in value]
        elif isinstance(value, str):
            chars += len(value)
            longest = max(longest, len(value))
        if depth > MAX_DEPTH:
            raise ValueError(f"can be at most {MAX_DEPTH} levels deep")
        if chars > MAX_CHARS:
            raise ValueError(f"can have at most {MAX_CHARS} characters in all")
        if longest > MAX_STRING:
            raise ValueError(f"can have at most {MAX_STRING} characters in one string or name")


def _check_keywords(node: Schema, root: bool) -> None:
    """What llguidance would not enforce, or only with luck."""
    for key in UNSUPPORTED:
        if key in node:
            raise ValueError(f"uses {key}, which this server cannot enforce")
    if node.get("nullable", False) is not False:
        raise ValueError("uses nullable, which is not part of JSON Schema: use a list of types, or anyOf")
    if not root and "$id" in node:
        raise ValueError("uses $id below its top level, which this server does not support")
    for key in COUNTS:
        count = node.get(key, 0)
        if isinstance(count, int | float) and count > MAX_COUNT:
            raise ValueError(f"can have at most {MAX_COUNT} as {key}")
    least = node.get("minProperties", 0)
    if isinstance(least, int | float) and least > 1:
        raise ValueError("uses minProperties above 1, which this server cannot enforce: use required")
    if isinstance(node.get("format"), str) and node["format"] not in FORMATS:
        raise ValueError("uses a format that this server cannot enforce: it knows " + ", ".join(sorted(FORMATS)))
    properties, required = node.get("properties"), node.get("required")
    names = {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()
    if isinstance(properties, dict) and len(properties.keys() - names) > MAX_OPTIONAL:
        raise ValueError(f"can have at most {MAX_OPTIONAL} properties in one object that are not required")


def _check_cycles(edges: dict[int, list[Schema]]) -> None:
    """A schema that applies itself to the same value says nothing: depth first, with a stack of our own."""
    open_, done = 1, 2
    state: dict[int, int] = {}
    for start in edges:
        stack = [(start, iter(edges[start]))] if start not in state else []
        state.setdefault(start, open_)
        while stack:
            node, rest = stack[-1]
            following = next(rest, None)
            if following is None:
                state[node] = done
                stack.pop()
            elif state.get(id(following)) == open_:
                raise ValueError("has a $ref that refers to itself without consuming text")
            elif id(following) not in state:
                state[id(following)] = open_
                stack.append((id(following), iter(edges[id(following)])))


def _schemas(value: object) -> Iterator[Schema]:
    if isinstance(value, list):
        yield from (part for part in value if isinstance(part, dict))


def parts(node: Schema) -> Iterator[Schema]:
    """The schemas within a schema: of its items, of its properties and of its definitions."""
    for key in ONE:
        if isinstance(node.get(key), dict):
            yield node[key]
    for key in MANY:
        yield from _schemas(node.get(key))
    for key in NAMED:
        if isinstance(node.get(key), dict):
            yield from _schemas([*node[key].values()])


def target(ref: object, root: Schema) -> object:
    """What a ``$ref`` points at: a JSON pointer into the same schema. Raises ValueError."""
    if not isinstance(ref, str) or not (ref == "#" or ref.startswith("#/")):
        raise ValueError("can have $ref only as a JSON pointer into itself, as #/$defs/name")
    value: object = root
    for part in unquote(ref).split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(value, dict) and name in value:
            value = value[name]
        elif isinstance(value, list) and name.isascii() and name.isdigit() and int(name[:6]) < len(value):
            value = value[int(name[:6])]
        else:
            raise ValueError("has a $ref that points to nothing")
    if not isinstance(value, dict | bool):
        raise ValueError("has a $ref that does not point to a schema")
    return value
