"""Requests of real clients, kept as files: without what tells of a machine, a person or a time; long texts are cut.

A file is ``{"method", "path", "headers", "body"}``. Of a session only those requests are kept whose form is new.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agents.agent import ROOT
from agents.proxy import Exchange

KEPT = ROOT / ".agents" / "kept"
FOLDER = Path(__file__).with_name("recordings")
LONGEST = 150  # characters of a text
SHORT = 50  # the same within tools
FEW = 3  # tools of a request whose tools are those of one before
DROPPED = {"host", "content-length", "connection", "accept-encoding", "authorization", "x-api-key"}
FORMS = {"type", "role"}  # fields whose values are part of a request's form
IDS = re.compile(
    r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"
    r"|\b(?:ses|msg|prt|call|toolu|resp|fc|rs|chatcmpl)_[A-Za-z0-9]{12,}|\b[0-9a-f]{16,}\b"
)
DATES = (
    (re.compile(r"\b20\d\d-\d\d-\d\d(?:T[\d:.]+Z?)?"), "2026-01-01"),
    (re.compile(r"\b(?:Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day, \w+ \d+, 20\d\d"), "Thursday, January 1, 2026"),
    (re.compile(r"\b(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun) [A-Z][a-z]{2} \d\d 20\d\d"), "Thu Jan 01 2026"),
    (re.compile(r"\b1[78]\d{11}\b"), "1767225600000"),
    (re.compile(r"\b1[78]\d{8}\b"), "1767225600"),
    (re.compile(r"\bLinux \d[\w.+-]*"), "Linux 6.1.0"),
)


class Scrubber:
    """Replaces folders, ids and dates in texts; the same id by the same one throughout."""

    def __init__(self, folder: Path) -> None:
        self._folders = {str(folder): "/home/user", str(ROOT): "/opt/agents", folder.name: "user"}
        self._folders |= {re.sub(r"[^A-Za-z0-9]", "-", name): new for name, new in list(self._folders.items())[:2]}
        self._ids: dict[str, str] = {}

    def scrub(self, value: Any) -> Any:
        """``value`` with every text in it replaced."""
        if isinstance(value, dict):
            return {self.text(key): self.scrub(part) for key, part in value.items()}
        if isinstance(value, list):
            return [self.scrub(part) for part in value]
        return self.text(value) if isinstance(value, str) else value

    def text(self, text: str) -> str:
        """One text."""
        for old, new in self._folders.items():
            text = text.replace(old, new)
        for pattern, new in DATES:
            text = pattern.sub(new, text)
        return IDS.sub(self._number, text)

    def _number(self, found: re.Match[str]) -> str:
        id = found.group()
        number = str(len(self._ids) + 1)
        if "-" in id:
            new = f"00000000-0000-4000-8000-{number:0>12}"
        else:
            kind, mark, rest = id.rpartition("_")
            new = f"{kind}{mark}{number:0>{len(rest)}}"
        return self._ids.setdefault(id, new)


def keep(title: str, exchanges: list[Exchange], script: Path) -> None:
    """Keep all requests of a session as they are, and the script of its replies, for ``agents.replay``. They are not
    for others: they tell of this machine."""
    sent = [
        {"method": exchange.method, "path": exchange.path, "headers": exchange.headers, "body": exchange.body}
        for exchange in exchanges
    ]
    KEPT.mkdir(exist_ok=True)
    whole = {"script": json.loads(script.read_text()), "requests": sent}
    (KEPT / f"{title}.json").write_text(json.dumps(whole), encoding="utf-8")


def record(client: str, exchanges: list[Exchange], folder: Path) -> None:
    """Write the requests of a session whose form is new, in place of earlier ones of this client."""
    place = FOLDER / client
    place.mkdir(parents=True, exist_ok=True)
    for old in place.glob("session_*.json"):
        old.unlink()
    scrubber, known, seen, number = Scrubber(folder), set[str](), set[str](), 0
    for exchange in exchanges:
        if exchange.method != "POST" or not isinstance(exchange.body, dict):
            continue
        forms = {f"{exchange.path} {form}" for form in _forms(exchange.body)}
        if forms <= known:
            continue
        known |= forms
        number += 1
        headers = {name: value for name, value in exchange.headers.items() if name not in DROPPED}
        kept: dict[str, Any] = {
            "method": exchange.method,
            "path": exchange.path,
            "headers": headers,
            "body": _cut(exchange.body),
        }
        tools = json.dumps(exchange.body.get("tools"))
        if tools in seen and exchange.body.get("tools"):
            kept["body"]["tools"] = kept["body"]["tools"][:FEW]
        seen.add(tools)
        text = json.dumps(scrubber.scrub(kept), indent=1, ensure_ascii=False)
        (place / f"session_{number:02}.json").write_text(text + "\n", encoding="utf-8")


def _cut(value: Any, longest: int = LONGEST) -> Any:
    """Long texts without their middle; what is JSON in a text stays whole."""
    if isinstance(value, dict):
        return {
            key: part if key in ("arguments", "user_id") else _cut(part, SHORT if key == "tools" else longest)
            for key, part in value.items()
        }
    if isinstance(value, list):
        return [_cut(part, longest) for part in value]
    if isinstance(value, str) and len(value) > longest:
        return f"{value[: longest * 2 // 3]} [...] {value[-longest // 3 :]}"
    return value


def _forms(value: Any, path: str = "") -> Iterator[str]:
    """Every field of a request, with its type; what schemas of tools have within is not looked at."""
    if isinstance(value, dict):
        for key, part in value.items():
            if key in ("parameters", "input_schema", "properties"):
                yield f"{path}.{key}"
            else:
                yield from _forms(part, f"{path}.{key}")
                if key in FORMS:
                    yield f"{path}.{key}={part}"
    elif isinstance(value, list):
        for part in value:
            kind = part.get("type") or part.get("role") if isinstance(part, dict) else ""
            yield from _forms(part, f"{path}[{kind}]")
    else:
        yield f"{path}:{type(value).__name__}"
