"""Benchmark of the page in Chromium: python -m tools.bench_page [--only load stream long list] [--rate 300] ...

Needs playwright and a chromium of the system. Each part prints a table:

load    the first and the second load over a slow link (300 ms until an answer begins, 1.6 Mbit/s, both by the browser)
stream  a reply of ``--lines`` lines, given to the page at ``--rate`` tokens a second as the server sends it, and then
        on until ``--tokens`` tokens; frames, the main thread's CPU, the heap, and what is left of it afterwards
long    a conversation of ``--turns`` turns: opened, and scrolled to its first message
list    ``--sessions`` sessions: the first list, the list scrolled to its end, a search; ``--database`` for PostgreSQL

Times of frames are wall times, and those of a machine that does other things too; CPU times are of the renderer's main
thread, from Chromium's ``Performance.getMetrics``, in ticks of the thread.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from server.log.logged_message import LoggedMessage
from server.log.session_log import SessionLog
from server.log.timeline import NewTurn
from server.middleware.auth import DEFAULT_TENANT
from tools.running import Server, serving
from tools.tables import table

if TYPE_CHECKING:
    from playwright.sync_api import Browser, CDPSession, Page

FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--js-flags=--expose-gc"]
LATENCY, BYTES_PER_SECOND = 300, 200_000  # of the slow link: milliseconds, and 1.6 Mbit/s
SECONDS = 300_000  # milliseconds until anything is given up
READY = ".model-name:not([disabled])"
SEGMENT = 1000  # lines of a reply whose frames are counted together
LINES = (  # about ten tokens each; N is the line's number
    "Line N of a reply, with *some* words and `code` in it.\n\n",
    "- item N of a list with **bold** words\n",
    "- item N with a [link](https://example.org/N)\n\n",
    "| cell N | other | 12 |\n",
    "    some_code(N, value)  # a comment\n",
)

# Stands in for the server's stream of a reply, in chunks of a token each, at a rate that can be changed. What that
# costs the main thread is part of what is measured.
FEED = """
(() => {
  const feed = (window.feed = { text: "", at: 0, rate: 0, chunks: 0 });
  const real = window.fetch;
  const encoder = new TextEncoder();
  const event = (delta) => encoder.encode(
    `data: ${JSON.stringify({ id: "chatcmpl-1", object: "chat.completion.chunk", created: 1, model: "m",
      choices: [{ index: 0, delta, finish_reason: null }] })}\\n\\n`);
  window.fetch = (url, how) => {
    if (!String(url).includes("/chat/completions")) return real(url, how);
    const body = new ReadableStream({ start(out) {
      out.enqueue(event({ role: "assistant", content: "" }));
      let last = performance.now();
      let owed = 0;
      feed.unread = () => 1 - out.desiredSize;
      setInterval(() => {
        const now = performance.now();
        owed += (feed.rate * (now - last)) / 1000;
        last = now;
        for (; owed >= 1 && feed.at < feed.text.length; owed -= 1) {
          out.enqueue(event({ content: feed.text.slice(feed.at, feed.at + 4) }));
          feed.at += 4;
          feed.chunks += 1;
        }
        if (feed.at >= feed.text.length) owed = 0;
      }, 10);
    } });
    return Promise.resolve(new Response(body, { headers: { "content-type": "text/event-stream" } }));
  };
})();
"""
FRAMES = """
(() => {
  const frames = (window.frames_ = []);
  let last = performance.now();
  const next = (now) => { frames.push(now - last); last = now; requestAnimationFrame(next); };
  requestAnimationFrame(next);
})();
"""
GIVEN = """async () => {
  const feed = window.feed;
  while (feed.at < feed.text.length || feed.unread() > 0) await new Promise((next) => setTimeout(next, 500));
  await new Promise((next) => setTimeout(next, 300)); // until it is drawn
}"""
TAKE_FRAMES = "() => window.frames_.splice(0)"
SCROLL_UP = """async () => {
  const box = document.querySelector(".scroll");
  while (box.scrollTop > 0) {
    box.scrollTop -= 400;
    await new Promise((next) => requestAnimationFrame(next));
  }
}"""
SCROLL_LIST = """async (wanted) => {
  const box = document.querySelector(".conversations");
  const rows = () => box.querySelectorAll(".row").length;
  while (rows() < wanted) {
    const button = [...box.querySelectorAll("button.quiet")].at(-1);
    const before = rows();
    box.scrollTop = box.scrollHeight;
    button?.click();
    for (let turn = 0; rows() === before && turn < 2000; turn += 1) await new Promise((next) => setTimeout(next, 5));
    if (rows() === before) break;
  }
  return rows();
}"""


@dataclass
class Tab:
    """A tab with the page, and what Chromium counts in it."""

    page: Page
    cdp: CDPSession

    def cpu(self) -> float:
        """Milliseconds of CPU that the main thread has used."""
        return 1000 * self._metrics()["TaskDuration"]

    def memory(self) -> tuple[float, int]:
        """Megabytes of the JavaScript heap after a collection, and DOM nodes."""
        for _ in range(2):
            self.cdp.send("HeapProfiler.collectGarbage")
        found = self._metrics()
        return found["JSHeapUsedSize"] / 1e6, int(found["Nodes"])

    def frames(self) -> list[float]:
        """Milliseconds of the frames since this was asked last."""
        taken: list[float] = self.page.evaluate(TAKE_FRAMES)
        return sorted(taken)

    def _metrics(self) -> dict[str, float]:
        told = self.cdp.send("Performance.getMetrics")["metrics"]
        return {one["name"]: one["value"] for one in told}


@contextmanager
def opened(browser: Browser, *scripts: str) -> Iterator[Tab]:
    """A tab of its own, at nothing yet."""
    context = browser.new_context(viewport={"width": 1360, "height": 900})
    context.set_default_timeout(SECONDS)
    for script in scripts:
        context.add_init_script(script)
    page = context.new_page()
    cdp = context.new_cdp_session(page)
    cdp.send("Performance.enable", {"timeDomain": "threadTicks"})
    yield Tab(page, cdp)
    context.close()


def shown(frames: list[float]) -> list[str]:
    """Frames a second, the median, the 95th percentile and the longest, in milliseconds."""
    part = frames[int(0.95 * len(frames))]
    return [
        f"{1000 * len(frames) / sum(frames):.0f}",
        *(f"{t:.0f}" for t in (statistics.median(frames), part, frames[-1])),
    ]


def main() -> None:
    """Run the parts."""
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=[*PARTS])
    parser.add_argument("--rate", type=int, default=300, help="tokens a second of the streamed reply")
    parser.add_argument("--lines", type=int, default=5000)
    parser.add_argument("--tokens", type=int, default=180_000, help="of the whole reply: an hour at 50 a second")
    parser.add_argument("--turns", type=int, default=1000)
    parser.add_argument("--sessions", type=int, default=10_000)
    parser.add_argument("--database", help="URL of an empty database for `list`, in place of SQLite")
    given = parser.parse_args()
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        raise SystemExit("chromium is not installed")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        print(f"Chromium {browser.version}\n")
        for name in given.only:
            with tempfile.TemporaryDirectory() as folder:
                print(f"{name}\n\n{PARTS[name](browser, Path(folder), given)}\n", flush=True)
        browser.close()


# --- loading ---------------------------------------------------------------------------------------------------


def bench_load(browser: Browser, folder: Path, given: argparse.Namespace) -> str:
    """First and second load, slow and fast."""
    with serving("", folder) as server:
        rows = [row for slow in (False, True) for row in loads(browser, server.url, slow)]
    return table(
        "link | load | requests | of them files | kB received | ms until one can write | main thread, CPU ms", rows
    )


def loads(browser: Browser, url: str, slow: bool) -> Iterator[list[object]]:
    """The page opened by somebody who has never seen it, and opened again."""
    with opened(browser) as tab:
        cdp = tab.cdp
        cdp.send("Network.enable")
        if slow:
            about = {"latency": LATENCY, "downloadThroughput": BYTES_PER_SECOND, "uploadThroughput": BYTES_PER_SECOND}
            cdp.send("Network.emulateNetworkConditions", {"offline": False, **about})
        asked: list[str] = []
        received: list[float] = []
        tab.page.on("request", lambda request: asked.append(request.url))
        cdp.on("Network.loadingFinished", lambda event: received.append(event["encodedDataLength"]))
        for name in ("first", "second"):
            tab.page.goto("about:blank")
            asked.clear()
            received.clear()
            cpu, begun = tab.cpu(), time.perf_counter()
            tab.page.goto(f"{url}/ui/", wait_until="commit")
            tab.page.locator(READY).wait_for()
            wall = 1000 * (time.perf_counter() - begun)
            tab.page.wait_for_load_state("networkidle")
            files = [one for one in asked if "/ui/" in one]
            kilobytes = sum(received) / 1000
            yield [
                "slow" if slow else "fast",
                name,
                len(asked),
                len(files),
                f"{kilobytes:.0f}",
                f"{wall:.0f}",
                f"{tab.cpu() - cpu:.0f}",
            ]


# --- a reply that streams ----------------------------------------------------------------------------------------


def bench_stream(browser: Browser, folder: Path, given: argparse.Namespace) -> str:
    """A reply that grows, in segments of lines."""
    rows: list[list[object]] = []
    with serving("", folder) as server, opened(browser, FEED, FRAMES) as tab:
        tab.page.goto(f"{server.url}/ui/")
        tab.page.locator(READY).wait_for()
        before = tab.memory()
        tab.page.locator("#composer").fill("Write.")
        tab.page.locator("#composer").press("Enter")
        tab.page.locator("[aria-busy=true]").wait_for()
        for first in range(0, given.lines, SEGMENT):
            text = "".join(line_of(at) for at in range(first, first + SEGMENT))
            rows.append([f"lines {first} to {first + SEGMENT}", given.rate, *streamed(tab, text, given.rate)])
        tokens = tab.page.evaluate("window.feed.chunks")
        if given.tokens > tokens:
            text = "".join(map(line_of, range(given.lines, given.lines + (given.tokens - tokens) // 7)))[
                : 4 * (given.tokens - tokens)
            ]
            fast = 10 * given.rate
            rows.append([f"on to {given.tokens:,} tokens", fast, *streamed(tab, text, fast)])
        tab.page.locator(".new-chat").click()
        tab.page.locator(".welcome").wait_for()
        after = tab.memory()
    rows.insert(0, ["before it", "", "", "", "", "", "", f"{before[0]:.1f}", before[1]])
    rows.append(["left for a new conversation", "", "", "", "", "", "", f"{after[0]:.1f}", after[1]])
    head = "what | tokens/s | frames/s | median ms | 95 % ms | longest ms | main thread, CPU ms a token"
    return table(f"{head} | heap, MB | DOM nodes", rows)


def line_of(at: int) -> str:
    return LINES[at // 20 % len(LINES)].replace("N", str(at))


def streamed(tab: Tab, text: str, rate: int) -> list[object]:
    """What it costs to draw more of the reply: frames, CPU a token, heap, nodes."""
    tab.frames()
    cpu, chunks = tab.cpu(), tab.page.evaluate("window.feed.chunks")
    feed(tab, text, rate)
    frames = tab.frames()
    tokens = tab.page.evaluate("window.feed.chunks") - chunks
    spent = tab.cpu() - cpu
    heap, nodes = tab.memory()
    return [*shown(frames), f"{spent / tokens:.2f}", f"{heap:.1f}", nodes]


def feed(tab: Tab, text: str, rate: int) -> None:
    """Give the page more of the reply, and wait until it has drawn it."""
    tab.page.evaluate("([text, rate]) => { feed.text += text; feed.rate = rate; }", [text, rate])
    tab.page.evaluate(GIVEN)


# --- what the log has ----------------------------------------------------------------------------------------------


def fill(where: Path | str, work: Callable[[SessionLog], Any]) -> None:
    """Write into the log of a server that does not run yet."""

    async def run() -> None:
        log = SessionLog(where)
        await work(log)
        await log.close()

    with ThreadPoolExecutor(1) as apart:  # of playwright, whose event loop runs in this thread
        apart.submit(lambda: asyncio.run(run())).result()


async def long_session(log: SessionLog, turns: int) -> None:
    """A conversation as a client that talked for a thousand turns has left it."""
    tokens: list[int] = []
    said: list[LoggedMessage] = []
    for number in range(turns):
        reply = "\n".join(line_of(7 * number + at) for at in range(4))
        prompt = len(tokens) + 10
        tokens = [*tokens, *[5] * 50]
        said = [*said, LoggedMessage("user", f"Question {number}?"), LoggedMessage("assistant", reply)]
        await log.commit(DEFAULT_TENANT, "long", NewTurn(tokens, said, "f1", "stop", prompt, prompt - 10))


async def many_sessions(log: SessionLog, count: int) -> None:
    """Sessions of two messages, each with words of its own."""
    for number in range(count):
        words = f"Question {number} about the {WORDS[number % len(WORDS)]} and the {WORDS[number // 7 % len(WORDS)]}"
        said = [LoggedMessage("user", words), LoggedMessage("assistant", f"An answer, number {number}. " * 8)]
        await log.commit(DEFAULT_TENANT, f"s{number}", NewTurn([5] * 60, said, "f1", "stop", 20, 0))


WORDS = "garden river window letter mountain paper bridge summer kitchen engine forest harbour".split()


def bench_long(browser: Browser, folder: Path, given: argparse.Namespace) -> str:
    """Opened from the list, and scrolled to the top."""
    fill(folder / "log.sqlite", lambda log: long_session(log, given.turns))
    rows: list[list[object]] = []
    with serving("", folder) as server, opened(browser, FRAMES) as tab:
        tab.page.goto(f"{server.url}/ui/")
        tab.page.locator(".row-main").wait_for()
        for name in ("opened from the list", "opened again"):
            tab.page.locator(".new-chat").click()
            tab.page.locator(".welcome").wait_for()
            tab.frames()
            cpu, of_server, begun = tab.cpu(), server.cpu(), time.perf_counter()
            tab.page.locator(".row-main").click()
            tab.page.locator(f"[data-message='{2 * given.turns - 1}']").wait_for()
            seen = 1000 * (time.perf_counter() - begun)
            tab.page.locator(".turn").first.wait_for()  # of the tree too only what is seen is drawn
            whole = 1000 * (time.perf_counter() - begun)
            times = [
                f"{seen:.0f}",
                f"{whole:.0f}",
                f"{tab.cpu() - cpu:.0f}",
                f"{1000 * (server.cpu() - of_server):.0f}",
            ]
            rows.append([name, *times, *shown(tab.frames()), *map(round, tab.memory())])
        tab.frames()
        cpu, begun = tab.cpu(), time.perf_counter()
        tab.page.evaluate(SCROLL_UP)
        wall = f"{1000 * (time.perf_counter() - begun):.0f}"
        rows.append(
            [
                "scrolled to its beginning",
                "",
                wall,
                f"{tab.cpu() - cpu:.0f}",
                "",
                *shown(tab.frames()),
                *map(round, tab.memory()),
            ]
        )
    head = "what | ms to the last message | ms to all | main thread, CPU ms | server, CPU ms"
    return table(f"{head} | frames/s | median ms | 95 % ms | longest ms | heap, MB | DOM nodes", rows)


def bench_list(browser: Browser, folder: Path, given: argparse.Namespace) -> str:
    fill(given.database or folder / "log.sqlite", lambda log: many_sessions(log, given.sessions))
    flags = ["--database", given.database] if given.database else []
    rows: list[list[object]] = []

    def add(name: str, tab: Tab, server: Server, work: Callable[[], object]) -> None:
        tab.frames()
        cpu, of_server, begun = tab.cpu(), server.cpu(), time.perf_counter()
        work()
        wall = 1000 * (time.perf_counter() - begun)
        times = [f"{wall:.0f}", f"{tab.cpu() - cpu:.0f}", f"{1000 * (server.cpu() - of_server):.0f}"]
        rows.append([name, *times, *shown(tab.frames()), *map(round, tab.memory())])

    with serving("", folder, *flags) as server, opened(browser, FEED, FRAMES) as tab:
        page = tab.page
        page.goto(f"{server.url}/ui/")
        page.locator(READY).wait_for()
        page.goto("about:blank")

        def first() -> None:
            page.goto(f"{server.url}/ui/")
            page.locator(".row").first.wait_for()

        add("page and first list", tab, server, first)
        add("search: two words", tab, server, lambda: search(page, "question garden 84"))
        page.get_by_role("searchbox").fill("")
        page.locator(".day").first.wait_for()
        add(
            f"all {given.sessions:,} read by scrolling", tab, server, lambda: page.evaluate(SCROLL_LIST, given.sessions)
        )
        page.locator("#composer").fill("Write.")
        page.locator("#composer").press("Enter")
        page.locator("[aria-busy=true]").wait_for()
        text = "".join(map(line_of, range(100)))
        add("then 100 lines of a reply stream", tab, server, lambda: feed(tab, text, given.rate))
    head = "what | ms | main thread, CPU ms | server, CPU ms"
    return table(f"{head} | frames/s | median ms | 95 % ms | longest ms | heap, MB | DOM nodes", rows)


def search(page: Page, words: str) -> None:
    page.get_by_role("searchbox").fill(words)
    page.get_by_role("list", name="Results").locator(".row").first.wait_for()


PARTS = {"load": bench_load, "stream": bench_stream, "long": bench_long, "list": bench_list}

if __name__ == "__main__":
    main()
