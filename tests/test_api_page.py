"""docs/api.md is what the tool writes, and says the truth of parameters that are easily told."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from http_context import HELLO, Site, served

from tools import api_page

PAGE = Path(__file__).resolve().parent.parent / "docs" / "api.md"
CHAT = "POST /v1/chat/completions"


page = cache(api_page.page)


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run make pages"


@pytest.mark.parametrize("verb", api_page.REQUESTS)
def test_every_endpoint_of_the_document_has_its_section_and_every_parameter_its_line(verb: str) -> None:
    section = page().split(f"## {verb}\n")[1].split("\n## ")[0]
    assert set(api_page.request_parameters(api_page.REQUESTS[verb])) <= set(
        re.findall(r"^\| `(\w+)`", section, re.MULTILINE)
    )


@served()
async def test_what_is_called_refused_is_refused_and_harmless_values_are_taken(site: Site) -> None:
    section = page().split(f"## {CHAT}\n")[1].split("\n## ")[0]
    fates = dict(re.findall(r"^\| `(\w+)`(?: \(extension\))? \| (.*) \|$", section, re.MULTILINE))
    refused = [name for name, fate in fates.items() if fate.startswith("refused")]
    assert refused
    for name in refused:
        body: dict[str, Any] = {"messages": HELLO, name: {"not": "harmless"}}
        response = await site.http.post("/v1/chat/completions", json=body)
        assert (response.status_code, response.json()["error"]["param"]) == (400, name)
    for name, values in ((n, v) for n, f in fates.items() for v in re.findall(r"^refused, except (.*)$", f)):
        harmless = values.split("`, `")[0].strip("`")
        raw = f'{{"messages": [{{"role": "user", "content": "hi"}}], "{name}": {harmless}}}'
        response = await site.http.post(
            "/v1/chat/completions", content=raw, headers={"content-type": "application/json"}
        )
        assert response.status_code == 200, (name, response.text)
