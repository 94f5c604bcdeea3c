// Renders a model's Markdown as safe HTML: HTML in it is shown as text, images become links, and the result
// passes DOMPurify with a list of allowed elements. The browser accepts no other HTML (trusted types).

import DOMPurify from "./vendor/dompurify-3.4.18/purify.es.mjs";
import { Marked } from "./vendor/marked-18.2.1/marked.esm.js";
import { html, useLayoutEffect, useMemo, useRef } from "./vendor/htm-3.1.1/standalone.module.js";
import { copyText, memo } from "./bits.js";

const ALLOWED = {
  ALLOWED_TAGS: [
    ..."a b blockquote br button code del div em h1 h2 h3 h4 h5 h6 hr i input li ol p pre s span strong sub sup".split(
      " ",
    ),
    ..."table tbody td th thead tr ul".split(" "),
  ],
  ALLOWED_ATTR: [
    "href",
    "class",
    "start",
    "align",
    "type",
    "checked",
    "disabled",
    "tabindex",
    "title",
    "target",
    "rel",
  ],
  ALLOWED_URI_REGEXP: /^(?:https?:|mailto:)/i,
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  RETURN_TRUSTED_TYPE: true,
};

const escaped = (text) => text.replace(/[&<>"']/g, (mark) => `&#${mark.charCodeAt(0)};`);

const marked = new Marked({
  gfm: true,
  breaks: true,
  renderer: {
    html: ({ text, block }) => (block ? `<p>${escaped(text)}</p>` : escaped(text)),
    image: ({ href, text }) => `<a href="${escaped(href)}">${escaped(text || href)}</a>`,
    code: ({ text, lang }) =>
      `<div class="code"><div class="code-head"><span>${escaped((lang ?? "").split(/\s/)[0] || "text")}</span>` +
      `<button type="button" class="code-copy">Copy</button></div>` +
      `<pre tabindex="0"><code>${escaped(text)}</code></pre></div>`,
  },
});

DOMPurify.addHook("afterSanitizeAttributes", (node) => {
  if (node.nodeName === "A") {
    node.setAttribute("target", "_blank");
    node.setAttribute("rel", "noopener noreferrer nofollow");
  }
});

async function copyCode(event) {
  const button = event.target.closest(".code-copy");
  if (!button) return;
  await copyText(button.closest(".code").querySelector("code").textContent);
  button.textContent = "Copied";
  setTimeout(() => (button.textContent = "Copy"), 1500);
}

// One block. It is sanitised again only when its source has changed: in a stream, that is the last block.
const Block = memo(({ source, links }) => {
  const place = useRef(null);
  const trusted = useMemo(() => {
    const tokens = marked.lexer(source);
    Object.assign(tokens.links, JSON.parse(links));
    return DOMPurify.sanitize(marked.parser(tokens), ALLOWED);
  }, [source, links]);
  useLayoutEffect(() => {
    place.current.innerHTML = trusted;
  }, [trusted]);
  return html`<div ref=${place}></div>`;
});

export const Markdown = memo(({ text }) => {
  const tokens = useMemo(() => marked.lexer(text), [text]);
  const links = JSON.stringify(tokens.links); // of the whole text; as a string, so that equal links compare equal
  const blocks = tokens.filter((token) => token.type !== "space");
  return html`<div class="markdown" onClick=${copyCode}>
    ${blocks.map((token, index) => html`<${Block} key=${index} source=${token.raw} links=${links} />`)}
  </div>`;
});
