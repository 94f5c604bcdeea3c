// Formulas: `$x$`, `$$x$$`, `\(x\)` and `\[x\]` in Markdown, drawn by KaTeX, which is loaded with its fonts when the
// first formula is shown. Until then, and if a formula cannot be drawn, its source is shown.

const FOLDER = new URL("vendor/katex-0.19.1/", import.meta.url);
const MOST = 4000; // characters of a formula
const DISPLAY = /^(?:\$\$([\s\S]+?)\$\$|\\\[([\s\S]+?)\\\])/;
const INLINE = /^(?:\$(?![\s$])((?:\\[\s\S]|[^\\$\n])*?(?:\\[\s\S]|[^\\$\s]))\$(?![\d$])|\\\(([^\n]+?)\\\))/;
const MARKS = /^(?:\$\$?|\\[([])|(?:\$\$?|\\[)\]])$/g;
const OPTIONS = {
  throwOnError: true,
  strict: "ignore",
  trust: false,
  maxSize: 20,
  maxExpand: 500,
  macros: { "\\pmb": "\\boldsymbol{#1}", "\\fcolorbox": "\\colorbox{#2}{#3}" }, // KaTeX writes style attributes for these
};

let katex = null;

function load() {
  const link = document.createElement("link");
  link.rel = "stylesheet";
  link.href = new URL("katex.min.css", FOLDER).href;
  document.head.append(link);
  return import("./vendor/katex-0.19.1/katex.min.js").then(() => {
    stylesAsProperties(globalThis.katex.__domTree.SvgNode.prototype);
    return globalThis.katex;
  });
}

// The content security policy forbids style attributes; properties of `style` are allowed.
function stylesAsProperties(svg) {
  const plain = svg.toNode;
  svg.toNode = function () {
    const { style, ...attributes } = this.attributes;
    const node = plain.call(Object.assign(Object.create(svg), this, { attributes }));
    if (style) node.style.cssText = style;
    return node;
  };
}

// Draw the formulas in an element.
export async function drawMath(place) {
  const formulas = place.querySelectorAll(".math");
  if (!formulas.length) return;
  katex ??= load();
  try {
    const { render } = await katex;
    for (const formula of formulas) draw(render, formula);
  } catch {
    katex = null; // no connection: the next formula tries again
  }
}

function draw(render, formula) {
  const source = formula.textContent.replace(MARKS, "");
  const drawn = document.createElement("span");
  try {
    render(source, drawn, { ...OPTIONS, displayMode: formula.classList.contains("display") });
  } catch {
    formula.classList.add("odd"); // the model has made a mistake, or it is no formula
    return;
  }
  formula.replaceChildren(drawn);
  formula.classList.add("drawn");
}

const token = (type, match, display) => {
  const text = match && (match[1] ?? match[2]).trim();
  if (!text || text.length > MOST) return undefined;
  return { type, raw: match[0], text, display };
};

// Extensions of marked; `escaped` makes text HTML.
export function mathExtensions(escaped) {
  const renderer = ({ raw, display }) => `<span class="math${display ? " display" : ""}">${escaped(raw.trim())}</span>`;
  const start = (pattern) => (source) => {
    const at = source.search(pattern);
    return at < 0 ? undefined : at;
  };
  return [
    {
      name: "mathBlock",
      level: "block",
      start: start(/(?:^|\n) {0,3}(?:\$\$|\\\[)/),
      tokenizer(source) {
        const match = source.match(/^\n? {0,3}(?:\$\$([\s\S]+?)\$\$|\\\[([\s\S]+?)\\\])[ \t]*(?:\n|$)/);
        return token("mathBlock", match, true);
      },
      renderer: (one) => `<p>${renderer(one)}</p>`,
    },
    {
      name: "mathInline",
      level: "inline",
      start: start(/\$|\\[([]/),
      tokenizer(source) {
        return token("mathInline", source.match(DISPLAY), true) ?? token("mathInline", source.match(INLINE), false);
      },
      renderer,
    },
  ];
}
