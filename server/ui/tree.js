// The open session as a tree of turns: what each cost, where its KV is now, and what can be done there.

import { html, useEffect, useMemo, useRef, useState } from "./vendor/htm-3.1.1/standalone.module.js";
import { Icon, bytes, count, milliseconds, plural } from "./bits.js";
import { CostBar, PARTS, missOf, summaryOf } from "./cost.js";
import { TIERS, costOf, latestOf, rowsOf, totalOf } from "./family.js";
import { fork, loadTree, open, remove } from "./sessions.js";
import { update, useStore } from "./store.js";

const LANE = 18; // pixels
const ROW = 62;
const LOOK = 5000; // milliseconds between two looks at where the KV is: it moves by itself
const LOOK_SHARE = 50; // and so many times what one takes
const TIER_NAMES = { device: "device", host: "host memory", disk: "disk", remote: "remote store" };

export function Tree() {
  const { tree, current, selected } = useStore();
  const [unfolded, setUnfolded] = useState(new Set());
  useEffect(() => {
    let timer = 0;
    const wait = (took) => {
      timer = setTimeout(look, Math.max(LOOK, LOOK_SHARE * took));
    };
    const look = async () => {
      const begun = performance.now();
      if (document.visibilityState === "visible" && current) await loadTree(current).catch(() => {});
      if (timer) wait(performance.now() - begun);
    };
    wait(0);
    return () => {
      clearTimeout(timer);
      timer = 0;
    };
  }, [current]);
  const family = tree?.family;
  const rows = useMemo(() => (family ? rowsOf(family, current, unfolded) : []), [family, current, unfolded]);
  if (!family || family.nodes.size === 0) {
    return html`<p class="hint panel-hint">
      Each turn of the conversation appears here: what it reused, what it computed, and where its cache is.
    </p>`;
  }
  const lanes = Math.max(...rows.map((row) => row.lane)) + 1;
  const scale = Math.max(...[...family.nodes.values()].map((node) => totalOf(costOf(node.turn))));
  const chosen = family.nodes.get(selected) ?? family.paths.get(current)?.at(-1);
  const unfold = (node) => setUnfolded(new Set([...unfolded, node.id]));
  return html`<div class="tree">
    <${Legend} />
    <ol class="turns" aria-label="Turns">
      ${rows.map((row) =>
        row.node.turn
          ? html`<${Row} key=${row.node.id} row=${row} lanes=${lanes} scale=${scale} chosen=${row.node === chosen} unfold=${unfold} />`
          : html`<li key="root" class="turn-row root"><${Lines} row=${row} lanes=${lanes} height=${30} /><span class="hint">The beginning</span></li>`,
      )}
    </ol>
    ${chosen && html`<${Detail} node=${chosen} family=${family} />`}
  </div>`;
}

const Legend = () =>
  html`<ul class="legend" aria-label="Colours">
    <li><i class="part device"></i>reused</li>
    <li><i class="part disk"></i>loaded</li>
    <li><i class="part recomputed"></i>again</li>
    <li><i class="part fresh"></i>new</li>
    <li><i class="part reply"></i>reply</li>
    <li><span class="where"><i class="held device"></i><i class="held host"></i><i class="held disk"></i></span>cached on device, host, disk</li>
  </ul>`;

function Lines({ row, lanes, height = ROW }) {
  const x = (lane) => lane * LANE + 10;
  const y = height / 2;
  const { node, lane, from, through, last } = row;
  const here = `line ${row.current ? "current" : ""}`;
  return html`<svg class="lines" width=${lanes * LANE + 4} height=${height} aria-hidden="true">
    ${through.map((passed) => html`<path class=${`line ${passed.current ? "current" : ""}`} d=${`M${x(passed.lane)} -1V${height + 1}`} />`)}
    ${node.turn && from === lane && html`<path class=${here} d=${`M${x(lane)} -1V${y}`} />`}
    ${node.turn && from !== lane && html`<path class=${here} d=${`M${x(from)} -1C${x(from)} ${y} ${x(lane) - 8} ${y} ${x(lane)} ${y}`} />`}
    ${!last && html`<path class=${here} d=${`M${x(lane)} ${y}V${height + 1}`} />`}
    <circle class=${`dot ${row.current ? "current" : ""}`} cx=${x(lane)} cy=${y} r=${node.turn ? 5 : 3.5} />
  </svg>`;
}

function Row({ row, lanes, scale, chosen, unfold }) {
  const { node, hidden } = row;
  const { turn } = node;
  const box = useRef(null);
  useEffect(() => {
    if (chosen) box.current.scrollIntoView({ block: "nearest" });
  }, [chosen]);
  return html`<li ref=${box} class=${`turn-row ${row.current ? "current" : ""} ${chosen ? "chosen" : ""}`}>
    <${Lines} row=${row} lanes=${lanes} />
    <button type="button" class="turn" aria-pressed=${chosen} onClick=${() => update({ selected: node.id })}>
      <span class="turn-title"><b>${turn.number}</b>${turn.preview || "No message"}</span>
      <${CostBar} turn=${turn} scale=${scale} />
      <span class="turn-about"><span>${summaryOf(turn)}</span><${Where} kv=${node.kv} /></span>
    </button>
    ${hidden > 0 && html`<button type="button" class="unfold"
      onClick=${() => unfold(node)}>+${count(hidden)}<span class="hidden"> more turns on this branch</span></button>`}
  </li>`;
}

// Which tiers hold the cache up to here.
function Where({ kv }) {
  const held = TIERS.filter((tier) => kv.has(tier));
  const told = held.length
    ? `In the cache of ${held.map((tier) => TIER_NAMES[tier]).join(" and ")}`
    : "In no cache now";
  return html`<span class="where" role="img" aria-label=${told} title=${told}>
    ${["device", "host", "disk"].map((tier) => html`<i class=${kv.has(tier) ? `held ${tier}` : ""}></i>`)}
  </span>`;
}

function Detail({ node, family }) {
  const { current } = useStore();
  const { turn } = node;
  const cost = costOf(turn);
  const id = node.sessions.includes(current) ? current : latestOf(family, node);
  const session = family.sessions.get(id);
  const path = family.paths.get(id);
  const isLast = path.at(-1) === node;
  const miss = missOf(turn);
  const alone = family.sessions.size > 1 && node.sessions.length === 1;
  return html`<section class="detail" aria-label=${`Turn ${turn.number}`}>
    <h3>Turn ${turn.number}<span>${node.sessions.length > 1 ? `shared by ${plural(node.sessions.length, "branch", "branches")}` : id}</span></h3>
    <dl class="figures">
      ${PARTS.filter(([part]) => cost[part] > 0).map(
        ([part, words]) =>
          html`<div><dt><i class=${`part ${part}`}></i>${turn.cache || part !== "device" ? words : "Reused"}</dt>
            <dd>${count(cost[part])}</dd></div>`,
      )}
      ${turn.cache?.load_ms > 0 && html`<div><dt>Loading</dt><dd>${milliseconds(turn.cache.load_ms)}</dd></div>`}
      ${turn.cache?.prefill_ms && html`<div><dt>To the first token</dt>
        <dd>${milliseconds(turn.cache.prefill_ms)}</dd></div>`}
    </dl>
    ${miss && html`<p class="miss">${miss}</p>`}
    <${Tiers} session=${session} turn=${turn} />
    <div class="actions">
      ${id !== current && html`<button type="button" class="button" onClick=${() => open(id)}>Open</button>`}
      <button type="button" class="button"
        onClick=${() => fork(id, turn.number)}><${Icon} name="fork" />Fork here</button>
      ${
        !isLast &&
        html`<button type="button" class="button"
          onClick=${() => update({ dialog: { kind: "rewind", id, turn: turn.number, lost: path.length - turn.number } })}>
        <${Icon} name="back" />Rewind
      </button>`
      }
      <button type="button" class="button"
        onClick=${() => update({ dialog: { kind: "export", id } })}><${Icon} name="export" />Export</button>
      ${alone && html`<button type="button" class="button danger"
        onClick=${() => remove([id], "Branch deleted.")}><${Icon} name="trash" />Delete branch</button>`}
    </div>
  </section>`;
}

// Where the branch's KV is now, tier by tier.
function Tiers({ session }) {
  if (!session.kv) return html`<p class="hint">The engine is not there to tell where the cache is.</p>`;
  const held = TIERS.filter((tier) => session.kv[tier]);
  if (!held.length)
    return html`<p class="hint">No tier holds cache of this branch under its own name yet: its next turn shares or computes it.</p>`;
  return html`<table class="tiers">
    <caption>This branch's cache now</caption>
    <tbody>
      ${held.map((tier) => {
        const { tokens, bytes: size } = session.kv[tier];
        return html`<tr>
          <th scope="row"><i class=${`part ${tier}`}></i>${TIER_NAMES[tier]}</th>
          <td>${count(tokens)} of ${plural(session.tokens, "token")}</td>
          <td>${bytes(size)}</td>
        </tr>`;
      })}
    </tbody>
  </table>`;
}
