"""One history and several models: a message is answered by another model beside the first reply, and goes on there."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import torch
from browser_desk import Desk, desk_at, violations
from safetensors.torch import load_file, save_file
from server_process import ServerProcess
from tiny_models import save_model

from tools.random_model import DEMO

if TYPE_CHECKING:
    from playwright.sync_api import Browser

NAME = "My name is Walter."


def save_twin(folder: Path) -> Path:
    """The bundled model with other weights: the same tokenizer, other words."""
    shutil.copytree(DEMO, folder)
    weights = load_file(folder / "model.safetensors")
    torch.manual_seed(1)
    mixed = {name: weight + weight.std() * torch.randn(weight.shape) for name, weight in weights.items()}
    kept = {name: mixed[name].to(weight.dtype) for name, weight in weights.items()}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture
def desk(chromium: Browser, tmp_path: Path) -> Iterator[Desk]:
    """A server with the bundled model, its twin, and one of another tokenizer."""
    flags = ["--also", str(save_twin(tmp_path / "twin")), "--also", str(save_model("llama", tmp_path))]
    (tmp_path / "data").mkdir()
    with ServerProcess(None, tmp_path / "data", *flags) as server:
        for model in ("twin", "llama"):
            httpx.post(f"{server.url}/v1/models/{model}/load", timeout=600).raise_for_status()
        yield from desk_at(chromium, server)


def answer_with(desk: Desk, model: str) -> list[str]:
    """Answer the last message again with another model; the texts that stand side by side."""
    desk.tab.get_by_role("button", name="Compare with another reply").last.click()
    desk.tab.get_by_label("Model").select_option(model)
    desk.tab.get_by_role("button", name="Answer again", exact=True).click()
    desk.tab.locator(".compare button:not([disabled])", has_text="Go on with that one").wait_for()
    row = desk.tab.locator(".compare-body .compare-row").last
    row.locator(".compared").first.wait_for()
    return [text.removeprefix("Reply:").strip() for text in row.locator(".compared").all_inner_texts()]


def told(desk: Desk) -> dict[str, Any]:
    """The receipt of the open session's last turn."""
    receipt: dict[str, Any] = desk.rest(f"sessions/{desk.session}/turns")["data"][-1]["cache"]
    return receipt


def go_on(desk: Desk) -> None:
    """Open the branch at the right."""
    before = desk.tab.url
    desk.tab.get_by_role("button", name="Go on with that one").click()
    desk.tab.wait_for_url(lambda url: url != before)
    desk.receipts.last.wait_for()


@pytest.mark.slow  # three engines
def test_conversations_are_filtered_by_any_model_that_wrote_in_them(desk: Desk) -> None:
    desk.open()
    desk.say(NAME)
    answer_with(desk, "twin")
    desk.tab.keyboard.press("Escape")
    desk.tab.get_by_role("button", name="New conversation").click()
    desk.say("Tell a story.")
    desk.tab.get_by_role("button", name="Filters").click()
    for model, count in (("twin", 1), ("llama", 0), (desk.rest("models")["data"][0]["id"], 2)):
        desk.tab.get_by_label("Model", exact=True).select_option(model)
        desk.tab.wait_for_function("count => document.querySelectorAll('.row').length === count", arg=count)
        assert desk.tab.locator(".row").count() == count


@pytest.mark.slow  # three engines
def test_one_history_has_several_models_side_by_side_and_goes_on_with_each(desk: Desk) -> None:
    desk.open()
    desk.say(NAME)
    said = desk.say("What is my name?")
    first, length = desk.session, told(desk)["prompt_tokens"]
    ours, others = answer_with(desk, "twin")
    assert ours == said
    assert others != said
    assert violations(desk) == []
    go_on(desk)
    assert told(desk)["prompt_tokens"] == length  # the ids are kept, and computed by the other model
    assert told(desk)["recomputed"] > 0
    assert desk.replies == ["Nice to meet you, Walter!", others]
    desk.say("And now?")
    desk.tab.locator(".model-name").get_by_text("twin").wait_for()
    assert told(desk)["reused"]["device"] > length
    assert len(answer_with(desk, "llama")) == 2
    go_on(desk)
    assert told(desk)["miss"]["reason"] == "fingerprint"  # the messages were rendered anew
    assert told(desk)["prompt_tokens"] > 2 * length
    assert [bubble.strip() for bubble in desk.asked] == [NAME, "What is my name?", "And now?"]
    assert len(desk.rest(f"sessions/{first}/messages")["data"]) == 4
