// One turn of the tree: its cost, the cost of its branch, the tiers with the branch's KV, and its actions.

import { html } from "./vendor/htm-3.1.1/standalone.module.js";
import { Icon, bytes, count, milliseconds, plural } from "./bits.js";
import { CostBar, missOf, partsOf } from "./cost.js";
import { latestOf, loadedOf, reusedOf } from "./family.js";
import { fork, open, remove } from "./sessions.js";
import { update, useStore } from "./store.js";
import { inOrder, nameOf } from "./tiers.js";

// `leave` returns the focus to the tree.
export function Detail({ box, node, family, isOpen, setOpen, leave }) {
  const { current } = useStore();
  const { turn } = node;
  const id = node.sessions.includes(current) ? current : latestOf(family, node);
  const path = family.paths.get(id);
  const onKeyDown = (event) => {
    if (event.key !== "Escape") return;
    event.stopPropagation();
    leave();
  };
  return html`<section ref=${box} class="detail" tabindex="-1" aria-label=${`Turn ${turn.number}`} onKeyDown=${onKeyDown}>
    <h3>
      <button type="button" aria-expanded=${isOpen} onClick=${() => setOpen(!isOpen)}>
        <${Icon} name=${isOpen ? "down" : "right"} />Turn ${turn.number}<span>${placeOf(node, id, current)}</span>
      </button>
    </h3>
    ${
      isOpen &&
      html`<div class="detail-body" tabindex="-1">
      <p class="said">${turn.preview || "No message"}</p>
      ${turn.reply_preview && html`<p class="said reply-said">${turn.reply_preview}</p>`}
      <${Figures} node=${node} />
      <${BranchTotal} id=${id} node=${node} family=${family} />
      <${Tiers} session=${family.sessions.get(id)} />
    </div>
    <div class="actions">
      ${id !== current && html`<button type="button" class="button" onClick=${() => open(id)}>Open</button>`}
      <button type="button" class="button"
        onClick=${() => fork(id, turn.number)}><${Icon} name="fork" />Fork here</button>
      ${
        path.at(-1) !== node &&
        html`<button type="button" class="button"
          onClick=${() => update({ dialog: { kind: "rewind", id, turn: turn.number, lost: path.length - turn.number } })}>
        <${Icon} name="back" />Rewind
      </button>`
      }
      <button type="button" class="button"
        onClick=${() => update({ dialog: { kind: "export", id } })}><${Icon} name="export" />Export</button>
    </div>`
    }
  </section>`;
}

function placeOf(node, id, current) {
  if (node.sessions.length > 1) return `shared by ${plural(node.sessions.length, "branch", "branches")}`;
  return id === current ? "on this branch" : "on another branch";
}

function Figures({ node }) {
  const { turn, cost } = node;
  const miss = missOf(turn);
  return html`<dl class="figures">
      ${partsOf(cost).map(
        ({ part, words, tokens }) =>
          html`<div><dt><i class=${`part ${part}`}></i>${turn.cache || part !== "device" ? words : "Reused"}</dt>
            <dd>${count(tokens)}</dd></div>`,
      )}
      ${turn.cache?.load_ms > 0 && html`<div><dt>Loading</dt><dd>${milliseconds(turn.cache.load_ms)}</dd></div>`}
      ${turn.cache?.prefill_ms && html`<div><dt>To the first token</dt>
        <dd>${milliseconds(turn.cache.prefill_ms)}</dd></div>`}
    </dl>
    ${miss && html`<p class="miss">${miss}</p>`}`;
}

// The cost of all turns of the branch. It can be deleted if no other branch has this turn.
function BranchTotal({ id, node, family }) {
  const { current } = useStore();
  const path = family.paths.get(id);
  const { spent } = path.at(-1);
  const shared = path.filter(({ sessions }) => sessions.length > 1).length;
  const alone = family.sessions.size > 1 && node.sessions.length === 1;
  const name = id === current ? "This branch" : "That branch";
  const cells = [
    ["Reused", reusedOf(spent)],
    ["Of it loaded", loadedOf(spent)],
    ["Computed again", spent.recomputed],
    ["New", spent.fresh],
  ];
  return html`<section class="branch" aria-label=${`${name} in all`}>
    <h4>
      ${name}<span>${plural(path.length, "turn")}${shared > 0 && shared < path.length ? `, ${count(shared)} shared` : ""}</span>
      ${alone && html`<button type="button" class="delete-branch"
        onClick=${() => remove([id], "Branch deleted.")}><${Icon} name="trash" />Delete branch</button>`}
    </h4>
    <${CostBar} cost=${spent} />
    <dl class="totals">${cells.map(([words, tokens]) => html`<div><dt>${words}</dt><dd>${count(tokens)}</dd></div>`)}</dl>
  </section>`;
}

// The tiers that hold the branch's KV now.
function Tiers({ session }) {
  if (!session.kv) return html`<p class="hint">The engine is not there to tell where the cache is.</p>`;
  const held = inOrder(new Set(Object.keys(session.kv)));
  if (!held.length)
    return html`<p class="hint">No tier holds cache of this branch under its own name yet: its next turn shares or computes it.</p>`;
  return html`<table class="tiers">
    <caption>Its cache now</caption>
    <tbody>
      ${held.map((tier) => {
        const { tokens, bytes: size } = session.kv[tier];
        return html`<tr>
          <th scope="row"><i class=${`part ${tier}`}></i>${nameOf(tier)}</th>
          <td>${count(tokens)} of ${plural(session.tokens, "token")}</td>
          <td>${bytes(size)}</td>
        </tr>`;
      })}
    </tbody>
  </table>`;
}
