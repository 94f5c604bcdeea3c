// The open conversation as a tree of turns: costs, tiers of the KV, and branches.

import { html, useEffect, useLayoutEffect, useMemo, useRef, useState } from "./vendor/htm-3.1.1/standalone.module.js";
import { ago, count } from "./bits.js";
import { CostBar, branchSummaryOf, summaryOf } from "./cost.js";
import { Detail } from "./detail.js";
import { isTwin, rowsOf, totalOf } from "./family.js";
import { follow } from "./sessions.js";
import { remember, remembered, update, useStore } from "./store.js";
import { ALWAYS, inOrder, letterOf, nameOf, shortOf } from "./tiers.js";
import { listed, plural, t } from "./words.js";

const LANE = 18; // pixels
const MOST_LANES = 8; // that are drawn; further ones share the last
const ROOT = 30; // pixels: rows have fixed places, so that only visible rows of a long conversation are rendered
const ROW = 58;
const LABEL = 16; // additional height where a branch begins
const TOTAL = 20; // and where one ends
const STEP = 400; // rows are rendered in steps of so many pixels, and so far beyond the visible part
const LOOK = 5000; // milliseconds between two requests for the tiers of the KV
const LOOK_SHARE = 50; // and at least so many times as long as a request takes

export function Tree() {
  const { tree, current, selected } = useStore();
  const [unfolded, setUnfolded] = useState(new Set());
  const [isOpen, setOpen] = useState(() => remembered("detail", true));
  const detail = useRef(null);
  const list = useRef(null);
  useLooks(current);
  const family = tree?.family;
  const rows = useMemo(() => (family ? rowsOf(family, current, unfolded) : []), [family, current, unfolded]);
  if (!family || family.nodes.size === 0) {
    return html`<p class="hint panel-hint">${t("Each turn of the conversation appears here: what it reused, what it computed, and where its cache is.")}</p>`;
  }
  const chosen = family.nodes.get(selected) ?? family.paths.get(current)?.at(-1) ?? rows[1].node;
  const unfold = (node, on = true) => {
    const changed = new Set(unfolded);
    changed[on ? "add" : "delete"](node.id);
    setUnfolded(changed);
  };
  const openDetail = (on) => {
    remember("detail", on);
    setOpen(on);
  };
  const enter = () => {
    openDetail(true);
    detail.current.focus();
  };
  const leave = () => list.current.querySelector("[tabindex='0']").focus();
  return html`<div class="tree">
    <${Legend} />
    <${Recognised} session=${family.sessions.get(current)} />
    <${Rows} list=${list} rows=${rows} chosen=${chosen} unfolded=${unfolded} unfold=${unfold} enter=${enter} />
    <${Detail} box=${detail} node=${chosen} family=${family} isOpen=${isOpen} setOpen=${openDetail} leave=${leave} />
  </div>`;
}

// Reads the tree repeatedly while it is shown.
function useLooks(current) {
  useEffect(() => {
    let timer = 0;
    const wait = (took) => {
      timer = setTimeout(look, Math.max(LOOK, LOOK_SHARE * took));
    };
    const look = async () => {
      const begun = performance.now();
      if (document.visibilityState === "visible" && current) await follow();
      if (timer) wait(performance.now() - begun);
    };
    wait(0);
    return () => {
      clearTimeout(timer);
      timer = 0;
    };
  }, [current]);
}

// How the server has recognised the conversation of a client that keeps its own history.
function Recognised({ session }) {
  if (session?.kind !== "line") return null;
  const { hint, agent } = session.metadata;
  const told = [hint ? t("Kept for a client, by its {hint}", { hint }) : t("Kept for a client")];
  if (agent) told.push(t("agent {agent}", { agent }));
  if (session.parent?.turn === 0) told.push(t("begun from another conversation"));
  if (session.side_calls) told.push(plural(session.side_calls, "{n} side call", "{n} side calls"));
  return html`<p class="hint recognised">${told.join(" · ")}</p>`;
}

const Legend = () =>
  html`<ul class="legend" aria-label=${t("Colours")}>
    <li><i class="part device"></i>${t("reused")}</li>
    <li><i class="part disk"></i>${t("loaded")}</li>
    <li><i class="part recomputed"></i>${t("computed again")}</li>
    <li><i class="part fresh"></i>${t("new")}</li>
    <li><i class="part reply"></i>${t("reply")}</li>
    <li class="legend-where">${t("Cached now:")}${ALWAYS.map((tier) => html`<span><span class="where"><i class="held">${letterOf(tier)}</i></span>${shortOf(tier)}</span>`)}</li>
  </ul>`;

// The last turn of the branch that ends at a row or is folded below it.
function endOf({ node, last }) {
  if (!last) return null;
  let end = node;
  while (end.children.length === 1) [end] = end.children;
  return end.children.length || !end.turn ? null : end;
}

const begins = ({ node, lane, from }) => Boolean(node.turn) && from !== lane;
const heightOf = (row) => (row.node.turn ? ROW + (begins(row) ? LABEL : 0) + (endOf(row) ? TOTAL : 0) : ROOT);

// The rows with their places: { row, top, height }.
function placed(rows) {
  let top = 0;
  return rows.map((row) => {
    const place = { row, top, height: heightOf(row) };
    top += place.height;
    return place;
  });
}

// The visible part of the list, in pixels, with a margin.
function useSight(box) {
  const [sight, setSight] = useState({ from: 0, to: 4 * STEP });
  const look = () => {
    const { scrollTop, clientHeight } = box.current;
    const from = Math.floor(scrollTop / STEP - 1) * STEP;
    const to = Math.ceil((scrollTop + clientHeight) / STEP + 1) * STEP;
    setSight((old) => (old.from === from && old.to === to ? old : { from, to }));
  };
  useEffect(() => {
    const watcher = new ResizeObserver(look);
    watcher.observe(box.current);
    return () => watcher.disconnect();
  }, []);
  return [sight, look];
}

function Rows({ list, rows, chosen, unfolded, unfold, enter }) {
  const box = useRef(null);
  const had = list.current?.contains(document.activeElement); // whether the list had the focus: it moves to the selected row
  const [sight, look] = useSight(box);
  const places = useMemo(() => placed(rows), [rows]);
  const scale = useMemo(() => rows.reduce((most, { node }) => Math.max(most, totalOf(node.cost)), 1), [rows]);
  const at = Math.max(
    1,
    rows.findIndex(({ node }) => node === chosen),
  ); // a folded turn has no row
  useLayoutEffect(() => {
    const { top, height } = places[at];
    const { scrollTop, clientHeight } = box.current;
    if (top < scrollTop) box.current.scrollTop = at === 1 ? 0 : top;
    else if (top + height > scrollTop + clientHeight) box.current.scrollTop = top + height - clientHeight;
  }, [rows[at].node.id]);
  useLayoutEffect(() => {
    if (had) list.current.querySelector("[tabindex='0']").focus({ preventScroll: true });
  });
  const go = (to) => update({ selected: rows[to].node.id });
  const onKeyDown = (event) => {
    if (event.target.getAttribute("role") !== "treeitem" || event.ctrlKey || event.metaKey || event.altKey) return;
    const does = keysOf(rows, at, { go, enter, unfold, unfolded })[event.key];
    if (!does) return;
    event.preventDefault();
    does();
  };
  const shown = places.filter(({ top, height }, index) => index === at || (top + height > sight.from && top < sight.to));
  const { top, height } = places.at(-1);
  return html`<div class="turns" ref=${box} onScroll=${look} tabindex="-1">
    <ol ref=${list} role="tree" aria-label=${t("Turns")} style=${{ height: `${top + height}px` }} onKeyDown=${onKeyDown}>
      ${shown.map(
        (place) => html`<${Row} key=${place.row.node.id ?? "root"} ...${place} scale=${scale}
          chosen=${place.row === rows[at]} isOpen=${unfolded.has(place.row.node.id)} unfold=${unfold} />`,
      )}
    </ol>
  </div>`;
}

// Keyboard handling on row `at`, as in tree views.
function keysOf(rows, at, { go, enter, unfold, unfolded }) {
  const { node, lane, hidden } = rows[at];
  const right = () => {
    if (hidden) unfold(node);
    else if (rows[at + 1]?.lane > lane) go(at + 1);
  };
  const left = () => {
    const parent = rows.findLastIndex((row, index) => index < at && row.lane < lane);
    if (unfolded.has(node.id)) unfold(node, false);
    else if (parent > 0) go(parent);
  };
  return {
    ArrowDown: () => go(Math.min(at + 1, rows.length - 1)),
    ArrowUp: () => go(Math.max(at - 1, 1)),
    Home: () => go(1),
    End: () => go(rows.length - 1),
    ArrowRight: right,
    ArrowLeft: left,
    Enter: enter,
    " ": enter,
  };
}

function Lines({ row, height }) {
  const x = (lane) => Math.min(lane, MOST_LANES) * LANE + 10;
  const { node, lane, from, through, last } = row;
  const y = node.turn ? ROW / 2 + (begins(row) ? LABEL : 0) : ROOT / 2;
  const here = `line ${row.current ? "current" : ""}`;
  return html`<svg class="lines" width=${x(lane) + 12} height=${height} aria-hidden="true">
    ${through.map((passed) => html`<path class=${`line ${passed.current ? "current" : ""}`} d=${`M${x(passed.lane)} -1V${height + 1}`} />`)}
    ${node.turn && from === lane && html`<path class=${here} d=${`M${x(lane)} -1V${y}`} />`}
    ${node.turn && from !== lane && html`<path class=${here} d=${`M${x(from)} -1C${x(from)} ${y} ${x(lane) - 8} ${y} ${x(lane)} ${y}`} />`}
    ${!last && html`<path class=${here} d=${`M${x(lane)} ${y}V${height + 1}`} />`}
    <circle class=${`dot ${row.current ? "current" : ""}`} cx=${x(lane)} cy=${y} r=${node.turn ? 5 : 3.5} />
  </svg>`;
}

function Row({ row, top, height, scale, chosen, isOpen, unfold }) {
  const { node, hidden } = row;
  const { turn } = node;
  const end = endOf(row);
  const foldable = hidden > 0 || isOpen;
  return html`<li role="treeitem" class=${`turn-row ${turn ? "" : "root"} ${row.current ? "current" : ""} ${chosen ? "chosen" : ""}`}
    style=${{ top: `${top}px`, height: `${height}px` }} tabindex=${chosen ? 0 : -1} aria-selected=${turn && chosen}
    aria-level=${row.lane + 1} aria-posinset=${row.at} aria-setsize=${row.among} aria-expanded=${foldable ? isOpen : undefined}
    onClick=${() => turn && update({ selected: node.id })}>
    <${Lines} row=${row} height=${height} />
    ${!turn && html`<span class="hint">${t("The beginning")}</span>`}
    ${
      turn &&
      html`<div class="turn">
      ${begins(row) && html`<${Side} node=${node} />`}
      <span class="turn-title"><b><span class="hidden">${t("Turn")} </span>${turn.number}</b><span>${turn.preview || t("No message")}</span>
        ${isTwin(node) && turn.reply_preview && html`<span class="replied">${turn.reply_preview}</span>`}</span>
      <${CostBar} turn=${turn} scale=${scale} />
      <span class="turn-about"><span>${summaryOf(turn)}</span><${Where} kv=${node.kv} /></span>
      ${end && html`<span class="branch-total"><span>${t("Branch")}</span><${CostBar} cost=${end.spent} /><span>${branchSummaryOf(end.spent)}</span></span>`}
    </div>`
    }
    ${hidden > 0 && html`<button type="button" class="unfold" tabindex="-1"
      onClick=${() => unfold(node)}>+${count(hidden)}<span class="hidden"> ${t("more turns on this branch")}</span></button>`}
  </li>`;
}

// How a side branch differs from the straight one.
function Side({ node }) {
  const { turn } = node.parent;
  return html`<span class="side"><span class="hidden">${turn ? t("Branch off turn {number}:", { number: turn.number }) : t("Branch off the beginning:")} </span
    >${isTwin(node) ? t("other reply") : t("other message")}, ${ago(node.turn.created_at)}</span>`;
}

// The tiers that hold the KV up to this turn.
function Where({ kv }) {
  const told = kv.size ? t("In the cache of {tiers}", { tiers: listed(inOrder(kv).map(nameOf)) }) : t("In no cache now");
  const shown = inOrder(new Set([...ALWAYS, ...kv]));
  return html`<span class="where" role="img" aria-label=${told} title=${told}>
    ${shown.map((tier) => (kv.has(tier) ? html`<i class="held">${letterOf(tier)}</i>` : html`<i></i>`))}
  </span>`;
}
