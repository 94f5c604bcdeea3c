"""Responses for tests: asks for one, looks at the prompt it made, and makes the model call tools."""

from __future__ import annotations

from typing import Any

from fake_engine import END
from http_context import Site, demo_tokens
from openai_document import faults


async def respond(site: Site, input: Any = "Hello", **body: Any) -> Any:
    """A response; it is what the document says it is."""
    answer = await site.http.post("/v1/responses", json={"input": input, **body})
    assert answer.status_code == 200, answer.text
    assert not faults("Response", answer.json())
    return answer.json()


def adapted(response: Any) -> list[tuple[str, str, int]]:
    """What the receipt says was taken otherwise."""
    return [(one["rule"], one.get("param", ""), one["count"]) for one in response["cache"].get("adapted", [])]


def says(site: Site, *calls: tuple[str, str]) -> None:
    """Make the model answer with calls, in the demo model's form."""
    form = demo_tokens().dialect.form
    assert form is not None
    written = [f"{form.opening}{name}{form.middle}{arguments}{form.closing}" for name, arguments in calls]
    text = form.start + form.separator.join(written) + form.end
    site.engine.ids = [*demo_tokens().encode(text, special=False), END]
