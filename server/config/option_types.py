"""The types of options: how a flag's or a variable's text becomes a value."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, ByteSize, Field
from pydantic_settings import NoDecode

from server.config.prompt_rules import parse_prompt_rules

TENANT = re.compile(r"[A-Za-z0-9._-]{1,64}")
KEY = re.compile(r"[!-+\--~]{1,512}")  # visible ASCII without the comma
HOST = re.compile(r"[A-Za-z0-9._-]{1,253}|\*")
ORIGIN = re.compile(r"https?://([A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?|\*")
STORAGE = re.compile(r"[A-Za-z][A-Za-z0-9+.:-]*://\S+")  # fsspec chains protocols with ::
TIME = re.compile(r"([0-9]+(?:\.[0-9]+)?)([smh]?)")
UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


def check_json(path: Path) -> Path:
    """A file with JSON. Raises ValueError."""
    try:
        json.loads(path.expanduser().read_text())
    except (OSError, ValueError, RecursionError):
        raise ValueError("a JSON file is needed") from None
    return path


def find_generation_config(chosen: str) -> str:
    """``model``, ``openai`` or the absolute path of a file, as the engine runs elsewhere. Raises ValueError."""
    if chosen in ("model", "openai"):
        return chosen
    path = Path(chosen).expanduser()
    if not path.exists():
        raise ValueError("model, openai or a JSON file is needed")
    return str(path.resolve())


def check_storage(url: str) -> str:
    """An fsspec URL. Raises ValueError."""
    if not STORAGE.fullmatch(url):
        raise ValueError("an fsspec URL is needed: PROTOCOL://...")
    return url


def parse_api_keys(given: object) -> object:
    """NAME=KEY pairs, from a comma list or a list of them, as {tenant: key}. The message of an error names no key.
    Raises ValueError.
    """
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
    """Names of hosts, from a comma list or a list of them, in small letters. Raises ValueError."""
    entries = given.split(",") if isinstance(given, str) else given
    if not isinstance(entries, list) or not all(isinstance(name, str) and HOST.fullmatch(name) for name in entries):
        raise ValueError("expected the name of a host, without a port")
    return [name.lower().rstrip(".") for name in entries]


def parse_origins(given: object) -> object:
    """Origins of web pages, from a comma list or a list of them, in small letters, as browsers send them.
    Raises ValueError.
    """
    entries = given.split(",") if isinstance(given, str) else given
    if not isinstance(entries, list) or not all(isinstance(name, str) and ORIGIN.fullmatch(name) for name in entries):
        raise ValueError("expected an origin, as https://app.example or http://localhost:3000, without a path; or *")
    return [name.lower() for name in entries]


def parse_names(given: object) -> object:
    """Names of a model, from a comma list or a list of them. Raises ValueError."""
    entries = given.split(",") if isinstance(given, str) else given
    if not isinstance(entries, list) or not all(isinstance(name, str) and 0 < len(name) <= 512 for name in entries):
        raise ValueError("expected a name of 1 to 512 characters, without a comma")
    return entries


def parse_adapters(given: object) -> object:
    """NAME=PATH pairs, from a comma list or a list of them, as {name: absolute path}. Raises ValueError."""
    entries = given.split(",") if isinstance(given, str) else given
    if isinstance(entries, Mapping):
        entries = [f"{name}={path}" for name, path in entries.items()]
    if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
        raise ValueError("expected NAME=PATH")
    found: dict[str, str] = {}
    for entry in entries:
        name, equals, path = entry.partition("=")
        if not 0 < len(name) <= 512 or not equals or not path:
            raise ValueError("expected NAME=PATH: a name for requests, and the folder of the adapter")
        if name in found:
            raise ValueError(f"the name {name} occurs twice")
        folder = Path(path).expanduser()
        if not folder.is_dir():
            raise ValueError(f"there is no such folder for {name}")
        found[name] = str(folder.resolve())  # the engine runs elsewhere
    return found


def existing_folder(path: Path) -> Path:
    """The folder as an absolute path. Raises ValueError."""
    if not path.expanduser().is_dir():
        raise ValueError("there is no such folder")
    return path.expanduser().resolve()


def parse_seconds(given: object) -> object:
    """A time in seconds, or with a unit as 90s, 10m or 2h."""
    found = TIME.fullmatch(given.strip()) if isinstance(given, str) else None
    return given if found is None else float(found[1]) * UNITS[found[2]]


Count = Annotated[int, Field(ge=1)]
Memory = Annotated[ByteSize, Field(ge=0)]
Hosts = Annotated[list[str], NoDecode, BeforeValidator(parse_hosts)]
Names = Annotated[list[str], NoDecode, BeforeValidator(parse_names)]
Origins = Annotated[list[str], NoDecode, BeforeValidator(parse_origins)]
Seconds = Annotated[float, BeforeValidator(parse_seconds), Field(ge=0, allow_inf_nan=False)]
PromptRules = Annotated[tuple[str, ...], NoDecode, BeforeValidator(parse_prompt_rules)]
Folder = Annotated[Path, AfterValidator(existing_folder)]
Adapters = Annotated[dict[str, str], NoDecode, BeforeValidator(parse_adapters)]
ApiKeys = Annotated[dict[str, str], NoDecode, BeforeValidator(parse_api_keys)]
JsonFile = Annotated[Path, AfterValidator(check_json)]
GenerationSource = Annotated[str, AfterValidator(find_generation_config)]
StorageUrl = Annotated[str, AfterValidator(check_storage)]
