"""The types of options: how a flag's or a variable's text becomes a value."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Annotated

from pydantic import BeforeValidator, ByteSize, Field
from pydantic_settings import NoDecode

from server.config.prompt_rules import parse_prompt_rules

TENANT = re.compile(r"[A-Za-z0-9._-]{1,64}")
KEY = re.compile(r"[!-+\--~]{1,512}")  # visible ASCII without the comma
HOST = re.compile(r"[A-Za-z0-9._-]{1,253}|\*")
ORIGIN = re.compile(r"https?://([A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?|\*")


def parse_api_keys(given: object) -> object:
    """NAME=KEY pairs, from a comma list or a list of them, as {tenant: key}. The message of an error names no key."""
    if isinstance(given, Mapping):
        pairs: Iterable[tuple[str, str]] = given.items()
    else:
        entries = given.split(",") if isinstance(given, str) else given
        if not isinstance(entries, list):
            raise ValueError("expected NAME=KEY")
        pairs = [entry.partition("=")[::2] for entry in entries]
    keys: dict[str, str] = {}
    for name, key in pairs:
        if not TENANT.fullmatch(name) or not KEY.fullmatch(key):
            raise ValueError("expected NAME=KEY: NAME of 1-64 letters, digits, . _ -; KEY of visible ASCII, no comma")
        if name in keys or key in keys.values():
            raise ValueError(f"the name {name} or its key occurs twice")
        keys[name] = key
    return keys


def parse_hosts(given: object) -> object:
    """Names of hosts, from a comma list or a list of them, in small letters."""
    entries = given.split(",") if isinstance(given, str) else given
    if not isinstance(entries, list) or not all(isinstance(name, str) and HOST.fullmatch(name) for name in entries):
        raise ValueError("expected the name of a host, without a port")
    return [name.lower().rstrip(".") for name in entries]


def parse_origins(given: object) -> object:
    """Origins of web pages, from a comma list or a list of them, in small letters, as browsers send them."""
    entries = given.split(",") if isinstance(given, str) else given
    if not isinstance(entries, list) or not all(isinstance(name, str) and ORIGIN.fullmatch(name) for name in entries):
        raise ValueError("expected an origin, as https://app.example or http://localhost:3000, without a path; or *")
    return [name.lower() for name in entries]


def parse_names(given: object) -> object:
    """Names of a model, from a comma list or a list of them."""
    entries = given.split(",") if isinstance(given, str) else given
    if not isinstance(entries, list) or not all(isinstance(name, str) and 0 < len(name) <= 512 for name in entries):
        raise ValueError("expected a name of 1 to 512 characters, without a comma")
    return entries


Count = Annotated[int, Field(ge=1)]
Memory = Annotated[ByteSize, Field(ge=0)]
Hosts = Annotated[list[str], NoDecode, BeforeValidator(parse_hosts)]
Names = Annotated[list[str], NoDecode, BeforeValidator(parse_names)]
Origins = Annotated[list[str], NoDecode, BeforeValidator(parse_origins)]
PromptRules = Annotated[tuple[str, ...], NoDecode, BeforeValidator(parse_prompt_rules)]
ApiKeys = Annotated[dict[str, str], NoDecode, BeforeValidator(parse_api_keys)]
