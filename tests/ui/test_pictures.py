"""Pictures on the page, before a server whose scripted model sees: chosen, dropped, pasted; sent, shown, edited."""

from __future__ import annotations

import base64
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from browser_desk import Desk, desk_at
from media_kit import png, wav

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytest.importorskip("PIL")

TESTS = Path(__file__).parent.parent
FILES = """(given) => {
  const transfer = new DataTransfer();
  for (const [name, kind, data] of given) {
    const bytes = Uint8Array.from(atob(data), (letter) => letter.charCodeAt(0));
    transfer.items.add(new File([bytes], name, { type: kind }));
  }
  return transfer;
}"""
LOADED = "images => images.every(image => image.complete && image.naturalWidth > 0)"


@dataclass
class SeeingServer:
    url: str


@pytest.fixture(scope="module")
def seeing(chromium: Browser) -> Iterator[SeeingServer]:
    command = [sys.executable, str(TESTS / "seeing_server.py")]
    environment = {"PYTHONPATH": f"{TESTS.parent}:{TESTS}", "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"}
    with subprocess.Popen(
        command, env=environment, cwd=TESTS.parent, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        yield SeeingServer(f"http://127.0.0.1:{int(process.stdout.readline())}")
        process.stdin.close()


@pytest.fixture
def desk(chromium: Browser, seeing: Any) -> Iterator[Desk]:
    yield from desk_at(chromium, seeing)


@pytest.fixture
def phone(chromium: Browser, seeing: Any) -> Iterator[Desk]:
    yield from desk_at(chromium, seeing, viewport={"width": 375, "height": 667}, is_mobile=True, has_touch=True)


def choose(desk: Desk, *pictures: bytes) -> None:
    """With the button."""
    with desk.tab.expect_file_chooser() as chosen:
        desk.tab.get_by_role("button", name="Add pictures").click()
    files: Any = [{"name": "p.png", "mimeType": "image/png", "buffer": data} for data in pictures]
    chosen.value.set_files(files)


def transferred(desk: Desk, *files: tuple[str, str, bytes]) -> Any:
    """Files as the browser has them while they are dragged."""
    given = [[name, kind, base64.b64encode(data).decode()] for name, kind, data in files]
    return desk.tab.evaluate_handle(FILES, given)


def attached(desk: Desk, count: int) -> None:
    desk.tab.locator(".attached li").nth(count - 1).wait_for()
    assert desk.tab.locator(".attached li").count() == count


def shows(desk: Desk, place: str, count: int) -> None:
    """So many pictures are loaded there."""
    images = desk.tab.locator(f"{place} img.picture")
    images.nth(count - 1).wait_for()
    desk.tab.wait_for_function(
        f"() => [...document.querySelectorAll('{place} img.picture')].length === {count}"
        f" && ({LOADED})([...document.querySelectorAll('{place} img.picture')])"
    )


def test_a_picture_is_chosen_sent_and_shown_after_a_reload(desk: Desk) -> None:
    desk.open()
    choose(desk, png(40, 30), png(30, 40, shade=120))
    attached(desk, 2)
    desk.tab.get_by_role("button", name="Remove picture 2").click()
    attached(desk, 1)
    assert desk.say("What is this?") == "Hello there, friend."
    assert desk.tab.locator(".attached").count() == 0
    shows(desk, ".message.user", 1)
    (first, *_) = desk.rest(f"sessions/{desk.session}/messages")["data"]
    assert (first["content"], first["media"][0]["width"]) == ("What is this?", 40)
    desk.tab.reload()
    shows(desk, ".message.user", 1)
    assert desk.asked == ["What is this?"]


def paste(desk: Desk, file: tuple[str, str, bytes]) -> None:
    """Into the field, from the clipboard."""
    desk.tab.evaluate(
        """(held) => document.querySelector('#composer').dispatchEvent(
          new ClipboardEvent('paste', { clipboardData: held, bubbles: true, cancelable: true }))""",
        transferred(desk, file),
    )


def test_pictures_are_dropped_and_pasted(desk: Desk) -> None:
    desk.open()
    held = transferred(desk, ("a.png", "image/png", png(20, 20)), ("n.txt", "text/plain", b"x"))
    desk.tab.dispatch_event(".scroll", "drop", {"dataTransfer": held})
    attached(desk, 1)
    paste(desk, ("b.png", "image/png", png(20, 20, shade=90)))
    attached(desk, 2)
    desk.tab.get_by_role("button", name="Send", exact=True).click()  # without a word
    desk.reply(0)
    shows(desk, ".message.user", 2)
    bad = transferred(desk, ("c.svg", "image/svg+xml", b"<svg/>"))
    desk.tab.dispatch_event(".scroll", "drop", {"dataTransfer": bad})
    desk.told("Pictures are PNG, JPEG, WebP or GIF")


def test_sounds_are_dropped_pasted_sent_and_played(desk: Desk) -> None:
    pytest.importorskip("soundfile")
    desk.open()
    held = transferred(desk, ("a.wav", "audio/wav", wav(0.5)), ("b.png", "image/png", png(20, 20)))
    desk.tab.dispatch_event(".scroll", "drop", {"dataTransfer": held})
    attached(desk, 2)
    desk.tab.get_by_role("button", name="Remove sound 1").click()
    attached(desk, 1)
    with desk.tab.expect_file_chooser() as chosen:
        desk.tab.get_by_role("button", name="Add pictures or sounds").click()
    sound: Any = {"name": "s.wav", "mimeType": "audio/wav", "buffer": wav(0.4)}
    chosen.value.set_files([sound])
    attached(desk, 2)
    paste(desk, ("p.wav", "audio/wav", wav(0.3)))
    attached(desk, 3)
    desk.tab.get_by_role("button", name="Remove sound 3").click()
    attached(desk, 2)
    desk.say("What is this?")
    for reload in (False, True):
        if reload:
            desk.tab.reload()
        desk.tab.locator(".message.user audio.sound").wait_for()
        desk.tab.wait_for_function("() => document.querySelector('.message.user audio').duration > 0.39")
        shows(desk, ".message.user", 1)
    (first, *_) = desk.rest(f"sessions/{desk.session}/messages")["data"]
    assert [one["kind"] for one in first["media"]] == ["image", "audio"]
    desk.tab.locator(".receipt").first.click()
    desk.tab.locator(".detail audio.sound").wait_for()
    bad = transferred(desk, ("c.mid", "audio/midi", b"MThd"))
    desk.tab.dispatch_event(".scroll", "drop", {"dataTransfer": bad})
    desk.told("Sounds are WAV, FLAC, Ogg or MP3")


def test_an_edited_message_keeps_its_picture_on_its_branch(desk: Desk) -> None:
    desk.open()
    choose(desk, png(25, 25))
    attached(desk, 1)
    desk.say("First")
    desk.tab.locator(".message.user").hover()
    desk.tab.get_by_role("button", name="Edit, as a branch").click()
    shows(desk, ".edit-box", 1)
    desk.tab.get_by_label("Edit your message").fill("Second")
    desk.tab.locator(".edit-box").get_by_role("button", name="Send").click()
    desk.tab.locator(".bubble", has_text="Second").wait_for()
    desk.reply(0)
    shows(desk, ".message.user", 1)
    (first, *_) = desk.rest(f"sessions/{desk.session}/messages")["data"]
    assert (first["content"], len(first["media"])) == ("Second", 1)
    desk.tab.locator(".receipt").first.click()
    shows(desk, ".detail", 1)
    assert desk.tab.locator(".detail .said").first.inner_text() == "[image]Second"


def test_a_picture_that_the_server_refuses_goes_back_to_the_input_field(desk: Desk) -> None:
    desk.expected.append("400")
    desk.open()
    choose(desk, png(10, 10)[:40])
    attached(desk, 1)
    desk.tab.locator("#composer").fill("Broken")
    desk.tab.keyboard.press("Control+Enter")
    desk.tab.locator(".trouble").wait_for()
    assert "is damaged" in desk.tab.locator(".trouble").inner_text()
    desk.tab.get_by_role("button", name="Edit the message").click()
    attached(desk, 1)
    assert desk.tab.locator("#composer").input_value() == "Broken"


def test_a_phone_takes_pictures_and_does_not_scroll_sideways(phone: Desk) -> None:
    phone.open()
    choose(phone, png(1200, 300), *(png(50, 50, shade=shade) for shade in range(6)))
    attached(phone, 7)
    assert phone.overflow() <= 0
    phone.say("Wide")
    shows(phone, ".message.user", 7)
    assert phone.overflow() <= 0
