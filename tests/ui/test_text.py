"""Text as it is shown: formulas, colours in code, tables, task lists, and replies that grow long."""

from __future__ import annotations

import pytest
from browser_desk import Desk

TEXT = r"""Euler wrote $e^{i\pi} + 1 = 0$, and a coffee is $3 or $4.

$$\int_0^1 \vec{x}\,\overrightarrow{AB}\,dx = \sqrt{\frac{1}{2}}$$

This is none: $\frac{$.

- [x] done
- [ ] open

| left | middle | right |
|:-----|:------:|------:|
| a    | b      | 12    |

```python
def double(x):  # a comment
    return 2 * x
```

- in a list:
  ```js
  const x = "text";
  ```
"""
GROWN = """async ([line, times]) => {
  const { html, render } = await import("./vendor/htm-3.1.1/standalone.module.js");
  const { Markdown } = await import("./markdown.js");
  const place = document.createElement("div");
  document.querySelector(".scroll").append(place);
  let text = "";
  const took = [];
  for (let at = 0; at < times; at += 1) {
    text += line.replaceAll("N", at);
    if (at % 10) continue;
    const begun = performance.now();
    render(html`<${Markdown} text=${text} />`, place);
    place.getBoundingClientRect();
    took.push(performance.now() - begun);
    if (at % 500 === 0) await new Promise((next) => requestAnimationFrame(next));
  }
  render(html`<${Markdown} text=${text} />`, place);
  const grown = place.textContent;
  render(null, place);
  render(html`<${Markdown} text=${text} />`, place);
  const whole = place.textContent;
  place.remove();
  took.sort((one, other) => one - other);
  return { same: grown === whole, length: grown.length, half: took[took.length >> 1], most: took.at(-1) };
}"""
KEPT = """async (times) => {
  const { html, render } = await import("./vendor/htm-3.1.1/standalone.module.js");
  const { Markdown } = await import("./markdown.js");
  const place = (window.place = document.createElement("div"));
  let text = "";
  for (let at = 0; at < times; at += 1) {
    text += at % 40 < 30 ? `Line ${at} of a reply, with words in it.\n\n` : `- item ${at} of a list\n`;
    text = text.split("").join(""); // a text of its own, as from a stream
    render(html`<${Markdown} text=${text} />`, place);
  }
}"""
LINES_OF = """all => all.map((node) => {
  const range = document.createRange();
  range.selectNodeContents(node);
  return range.getClientRects().length;
})"""
LINES = {
    "paragraphs": "Line N with *some* words, and `code` in it.\n\n",
    "list": "- item N with **bold** words\n",
    "lines": "Line N of a long poem\n",
}


def test_formulas_code_tables_and_tasks_are_drawn_for_both_sides(desk: Desk) -> None:
    messages = [{"role": "user", "content": TEXT}, {"role": "assistant", "content": TEXT}]
    assert desk.server.post("/v1/sessions", {"id": "text", "messages": messages}).status_code == 201
    desk.open("#/text")
    for place in (".bubble .markdown", ".message.assistant .markdown"):
        shown = desk.tab.locator(place)
        shown.locator(".math.drawn.display .katex-html").wait_for()
        assert shown.locator(".math.drawn").count() == 2
        assert "a coffee is $3 or $4." in shown.inner_text()
        assert "$\\frac{$" in shown.inner_text()
        fonts = shown.locator(".katex").first.evaluate("node => getComputedStyle(node).fontFamily")
        assert "KaTeX_Main" in fonts
        assert shown.locator(".katex-mathml").count() == 2
        boxes = shown.locator("input")
        assert boxes.evaluate_all("all => all.map(box => [box.type, box.checked, box.disabled])") == [
            ["checkbox", True, True],
            ["checkbox", False, True],
        ]
        aligned = "all => all.map(cell => getComputedStyle(cell).textAlign.replace('-webkit-', ''))"
        assert shown.locator("td").evaluate_all(aligned) == ["left", "center", "right"]
        shown.locator(".hljs-keyword", has_text="def").wait_for()
        shown.locator(".hljs-keyword", has_text="const").wait_for()
        assert shown.locator("[style*=color], script, img").count() == 0


def test_a_table_that_is_too_wide_scrolls_and_keeps_its_words_whole(phone: Desk) -> None:
    row = ["short", "a column of many words, in which there is much to read", "1,200,000", "another one"]
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in (row, ["-"] * 4, row))
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": table}]
    assert phone.server.post("/v1/sessions", {"id": "table", "messages": messages}).status_code == 201
    phone.open("#/table")
    for words in ("short", "1,200,000"):
        cells = phone.tab.locator(".message.assistant").get_by_text(words, exact=True)
        cells.first.wait_for()
        assert cells.evaluate_all(LINES_OF) == [1, 1]
    assert phone.overflow() == 0


def test_code_and_messages_are_copied_as_they_were_written(desk: Desk) -> None:
    desk.tab.context.grant_permissions(["clipboard-read", "clipboard-write"])
    messages = [{"role": "user", "content": TEXT}, {"role": "assistant", "content": TEXT}]
    assert desk.server.post("/v1/sessions", {"id": "copied", "messages": messages}).status_code == 201
    desk.open("#/copied")
    reply = desk.tab.locator(".message.assistant")
    reply.locator(".hljs-keyword").first.wait_for()
    reply.get_by_role("button", name="Copy", exact=True).first.click()
    reply.get_by_text("Copied", exact=True).wait_for()
    read = "navigator.clipboard.readText()"
    assert desk.tab.evaluate(read) == "def double(x):  # a comment\n    return 2 * x"
    reply.locator(".tools").get_by_role("button", name="Copy").click()
    reply.locator(".tools").get_by_role("button", name="Copied").wait_for()
    assert desk.tab.evaluate(read) == TEXT


def test_nothing_of_it_is_loaded_before_it_is_needed(desk: Desk) -> None:
    asked: list[str] = []
    desk.tab.on("request", lambda request: asked.append(request.url))
    desk.open()
    desk.say("My name is Walter.")
    sizes = "performance.getEntriesByType('resource').reduce((sum, one) => sum + one.encodedBodySize, 0)"
    assert not [url for url in asked if "katex" in url or "highlight-" in url]
    assert desk.tab.evaluate(sizes) < 250_000


@pytest.mark.slow
def test_a_reply_that_grows_to_thousands_of_lines_is_drawn_in_steps(desk: Desk) -> None:
    """What a step costs must not grow with what stands above it, and the end must be as if it had come at once."""
    desk.open()
    for kind, line in LINES.items():
        drawn = desk.tab.evaluate(GROWN, [line, 2000])
        assert drawn["same"], kind
        assert drawn["length"] > 30_000
    short, long = (desk.tab.evaluate(GROWN, [LINES["paragraphs"], times])["half"] for times in (400, 3000))
    assert long < 6 * short + 5, (short, long)


def test_a_reply_that_grows_keeps_no_text_of_before(desk: Desk) -> None:
    desk.open()
    cdp = desk.tab.context.new_cdp_session(desk.tab)
    cdp.send("Performance.enable")

    def heap() -> float:
        cdp.send("HeapProfiler.collectGarbage")
        told = cdp.send("Performance.getMetrics")["metrics"]
        return next(float(one["value"]) for one in told if one["name"] == "JSHeapUsedSize") / 1e6

    desk.tab.evaluate(KEPT, 40)  # all code is loaded
    before = heap()
    desk.tab.evaluate(KEPT, 600)  # 20 kB; all texts together have 6 MB
    assert heap() - before < 4
