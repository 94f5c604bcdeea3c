// Renders Markdown as safe HTML: HTML in it is shown as text, images become links, and the result passes DOMPurify with
// a list of allowed elements.

import { Marked } from "./vendor/marked-18.2.1/marked.esm.js";
import { html, useLayoutEffect, useMemo, useRef } from "./vendor/htm-3.1.1/standalone.module.js";
import { memo } from "./bits.js";
import { blocksOf, heightOf } from "./blocks.js";
import { CodeBlock, colourWithin, copyCode } from "./code.js";
import { drawMath, mathExtensions } from "./math.js";
import { escaped, sanitised } from "./sanitised.js";
import { t } from "./words.js";

const languageOf = (lang) => (lang ?? "").split(/\s/)[0];

const marked = new Marked({
  gfm: true,
  breaks: true,
  extensions: mathExtensions(escaped),
  renderer: {
    html: ({ text, block }) => (block ? `<p>${escaped(text)}</p>` : escaped(text)),
    image: ({ href, text }) => `<a href="${escaped(href)}">${escaped(text || href)}</a>`,
    code: ({ text, lang }) =>
      `<div class="code"><div class="code-head"><span>${escaped(languageOf(lang) || t("text"))}</span>` +
      `<button type="button" class="code-copy">${t("Copy")}</button></div>` +
      `<pre tabindex="0"><code>${escaped(text)}</code></pre></div>`,
  },
});

const lex = (text) => marked.lexer(text);

// One block. It is sanitised again only when its source has changed.
const Html = memo(({ source, links }) => {
  const place = useRef(null);
  const trusted = useMemo(() => {
    const tokens = lex(source);
    Object.assign(tokens.links, JSON.parse(links));
    return sanitised(marked.parser(tokens));
  }, [source, links]);
  useLayoutEffect(() => {
    place.current.innerHTML = trusted;
    drawMath(place.current);
    colourWithin(place.current);
  }, [trusted]);
  return html`<div ref=${place}></div>`;
});

const Block = ({ token, links }) =>
  token.type === "code"
    ? html`<div><${CodeBlock} text=${token.text} language=${languageOf(token.lang)} /></div>`
    : html`<${Html} source=${token.raw} links=${links} />`;

const Group = memo(({ blocks, links }) => {
  const high = useMemo(() => ({ containIntrinsicBlockSize: `auto ${heightOf(blocks)}px` }), [blocks]);
  return html`<div class="group" style=${high}>
    ${blocks.map((token, index) => html`<${Block} key=${index} token=${token} links=${links} />`)}
  </div>`;
});

export const Markdown = memo(({ text }) => {
  const read = useRef(null);
  read.current = useMemo(() => blocksOf(text, lex, read.current), [text]);
  const { groups, last, tail, links } = read.current;
  const all = [...groups, [...last, ...tail]].filter((blocks) => blocks.length);
  return html`<div class="markdown" dir="auto" onClick=${copyCode}>
    ${all.map((blocks, index) => html`<${Group} key=${index} blocks=${blocks} links=${links} />`)}
  </div>`;
});
