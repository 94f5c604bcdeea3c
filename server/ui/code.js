// A block of code: its language, a button that copies it, and its lines, in pieces so that long code can grow.

import { html, useEffect, useLayoutEffect, useMemo, useRef, useState } from "./vendor/htm-3.1.1/standalone.module.js";
import { copyText, memo } from "./bits.js";
import { highlighted } from "./highlight.js";
import { sanitised } from "./sanitised.js";
import { t } from "./words.js";

const PIECE = 100; // lines
const PAUSE = 120; // milliseconds without new text after which long code is coloured
const SHORT = 4000; // characters: shorter code is coloured while it grows

const Piece = memo(({ text }) => html`<span class="lines">${text}</span>`);

function piecesOf(text) {
  const lines = text.split("\n");
  const pieces = [];
  for (let at = 0; at < lines.length; at += PIECE) pieces.push(lines.slice(at, at + PIECE).join("\n"));
  return pieces;
}

// Colour a code element. Returns whether it was done; `isWanted` is asked when the grammar is there.
async function colour(place, text, language, isWanted = () => true) {
  const made = await highlighted(text, language);
  if (made === null || !isWanted()) return false;
  place.innerHTML = sanitised(made);
  return true;
}

export const CodeBlock = memo(({ text, language }) => {
  const box = useRef(null);
  const coloured = useRef(null);
  const [shown, setShown] = useState(null); // the text that is coloured
  const pieces = useMemo(() => piecesOf(text), [text]);
  useEffect(() => {
    let wanted = true;
    const go = async () => {
      if (await colour(coloured.current, text, language, () => wanted && coloured.current)) setShown(text);
    };
    const timer = setTimeout(go, text.length < SHORT ? 0 : PAUSE);
    return () => {
      wanted = false;
      clearTimeout(timer);
    };
  }, [text, language]);
  useLayoutEffect(() => {
    box.current.written = text; // what is copied
  }, [text]);
  // Text that is behind what was coloured is plain until it is coloured too.
  const isColoured = shown !== null && text.startsWith(shown) && text.length - shown.length < SHORT;
  return html`<div class="code" ref=${box}>
    <div class="code-head" dir="ltr"><span>${language || t("text")}</span>
      <button type="button" class="code-copy">${t("Copy")}</button></div>
    <pre tabindex="0" dir="ltr"><code hidden=${isColoured}>${pieces.map((piece, index) => html`<${Piece} key=${index} text=${piece} />`)}</code><code
      ref=${coloured} hidden=${!isColoured}></code><code>${isColoured ? text.slice(shown.length) : ""}</code></pre>
  </div>`;
});

// Colour code that stands in other blocks, as in lists.
export function colourWithin(place) {
  for (const code of place.querySelectorAll(".code code")) {
    const language = code.closest(".code").querySelector(".code-head span").textContent;
    colour(code, code.textContent, language);
  }
}

export async function copyCode(event) {
  const button = event.target.closest(".code-copy");
  if (!button) return;
  const block = button.closest(".code");
  await copyText(block.written ?? block.querySelector("code").textContent);
  button.textContent = t("Copied");
  setTimeout(() => (button.textContent = t("Copy")), 1500);
}
