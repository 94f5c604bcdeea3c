// Divides Markdown into blocks, so that of a reply that grows only the end is read and drawn again.

const UNSURE = 2; // blocks at the end that more text may still change
const GROUP = 40; // blocks that are drawn together
const ITEMS = 40; // of a list, and
const LINES = 100; // of a paragraph: longer ones are divided

const [WIDTH, ROW, GAP] = [90, 23, 11]; // of a line in characters; of a line and between blocks in pixels

const NOTHING = { text: "", groups: [], last: [], rest: 0, tail: [], links: "{}" };

// The blocks of a text: `groups` and `last` are final, `tail` is not. `old` are those of its beginning.
// `lex` gives the tokens of a text, as marked does.
export function blocksOf(text, lex, old) {
  const base = old && text.startsWith(old.text) ? old : NOTHING;
  const tokens = lex(text.slice(base.rest));
  const links = linksOf(base, tokens);
  const { groups, rest, last, tail } = divided(base, tokens.flatMap(cut));
  return { text, groups, last, rest, tail, links };
}

// As a string, so that equal links compare equal.
function linksOf(base, tokens) {
  if (!Object.keys(tokens.links).length) return base.links;
  return JSON.stringify({ ...JSON.parse(base.links), ...tokens.links });
}

function divided(base, pieces) {
  const shown = pieces.filter(({ type }) => type !== "space");
  const sure = new Set(shown.slice(0, -UNSURE));
  const end = shown.at(-UNSURE); // the first block that is not final
  let { rest } = base;
  for (const piece of pieces) {
    if (piece === end || !sure.size) break;
    rest += piece.raw.length;
  }
  const groups = [...base.groups];
  let last = [...base.last, ...[...sure].map(ownOf)];
  while (last.length >= GROUP) {
    groups.push(last.slice(0, GROUP));
    last = last.slice(GROUP);
  }
  return { groups, rest, last: last.length === base.last.length ? base.last : last, tail: shown.filter((piece) => !sure.has(piece)).map(ownOf) };
}

// What is drawn of a block, with texts of its own: in browsers a part of a text keeps all of it in memory, and with each
// step there is another text.
const ownOf = ({ type, raw, text, lang }) => (type === "code" ? { type, raw: "", text: copied(text), lang } : { type, raw: copied(raw) });

const copied = (text) => JSON.parse(JSON.stringify(text));

// About how many pixels blocks are high, before they are drawn.
export function heightOf(blocks) {
  const rows = ({ raw, text }) => (raw || text || "").split("\n").reduce((all, line) => all + Math.ceil(line.length / WIDTH), 0);
  return blocks.reduce((all, block) => all + GAP + ROW * rows(block), 0);
}

// A long list or paragraph as several ones.
function cut(token) {
  if (token.type === "list" && token.items.length > ITEMS) return parted(token, token.items.map(({ raw }) => raw), ITEMS);
  if (token.type === "paragraph" && token.raw.length > LINES * 20) {
    const lines = token.raw.split(/(?<=\n)/);
    if (lines.length > LINES) return parted(token, lines, LINES);
  }
  return [token];
}

function parted(token, parts, size) {
  if (parts.join("") !== token.raw.slice(0, parts.join("").length)) return [token];
  const made = [];
  let at = 0;
  for (let index = 0; index < parts.length; index += size) {
    const isLast = index + size >= parts.length;
    const raw = isLast ? token.raw.slice(at) : parts.slice(index, index + size).join("");
    made.push({ type: token.type, raw });
    at += raw.length;
  }
  return made;
}
