// One turn of the tree: its cost, the cost of its branch, the tiers with the branch's KV, and its actions.

import { html } from "./vendor/htm-3.1.1/standalone.module.js";
import { Icon, bytes, count, milliseconds } from "./bits.js";
import { CostBar, drafterOf, draftsOf, missOf, partsOf, speedOf } from "./cost.js";
import { latestOf, loadedOf, reusedOf } from "./family.js";
import { Pictures } from "./pictures.js";
import { fork, open, remove } from "./sessions.js";
import { update, useStore } from "./store.js";
import { inOrder, nameOf } from "./tiers.js";
import { plural, t } from "./words.js";

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
  return html`<section ref=${box} class="detail" tabindex="-1" aria-label=${t("Turn {number}", { number: turn.number })} onKeyDown=${onKeyDown}>
    <h3>
      <button type="button" aria-expanded=${isOpen} onClick=${() => setOpen(!isOpen)}>
        <${Icon} name=${isOpen ? "down" : "right"} />${t("Turn {number}", { number: turn.number })}<span>${placeOf(node, id, current)}</span>
      </button>
    </h3>
    ${
      isOpen &&
      html`<div class="detail-body" tabindex="0">
      <${Pictures} media=${turn.media} />
      <p class="said">${turn.preview || t("No message")}</p>
      ${turn.reply_preview && html`<p class="said reply-said">${turn.reply_preview}</p>`}
      <${Figures} node=${node} />
      <${BranchTotal} id=${id} node=${node} family=${family} />
      <${Tiers} session=${family.sessions.get(id)} />
    </div>
    <div class="actions">
      ${id !== current && html`<button type="button" class="button" onClick=${() => open(id)}>${t("Open")}</button>`}
      ${id !== current && html`<button type="button" class="button"
        onClick=${() => update({ dialog: { kind: "compare", left: current, right: id } })}><${Icon} name="compare" />${t("Compare")}</button>`}
      <button type="button" class="button"
        onClick=${() => fork(id, turn.number)}><${Icon} name="fork" />${t("Fork here")}</button>
      ${
        path.at(-1) !== node &&
        html`<button type="button" class="button"
          onClick=${() => update({ dialog: { kind: "rewind", id, turn: turn.number, lost: path.length - turn.number } })}>
        <${Icon} name="back" />${t("Rewind")}
      </button>`
      }
      <button type="button" class="button"
        onClick=${() => update({ dialog: { kind: "share", id, turn: turn.number } })}><${Icon} name="link" />${t("Share")}</button>
      <button type="button" class="button"
        onClick=${() => update({ dialog: { kind: "export", id } })}><${Icon} name="export" />${t("Export")}</button>
    </div>`
    }
  </section>`;
}

function placeOf(node, id, current) {
  if (node.sessions.length > 1) return plural(node.sessions.length, "shared by {n} branch", "shared by {n} branches");
  return id === current ? t("on this branch") : t("on another branch");
}

function Figures({ node }) {
  const { turn, cost } = node;
  const miss = missOf(turn);
  return html`<dl class="figures">
      ${partsOf(cost).map(
        ({ part, words, tokens }) =>
          html`<div><dt><i class=${`part ${part}`}></i>${turn.cache || part !== "device" ? words : t("Reused")}</dt>
            <dd>${count(tokens)}</dd></div>`,
      )}
      ${turn.cache?.load_ms > 0 && html`<div><dt>${t("Loading")}</dt><dd>${milliseconds(turn.cache.load_ms)}</dd></div>`}
      ${turn.cache?.prefill_ms && html`<div><dt>${t("To the first token")}</dt>
        <dd>${milliseconds(turn.cache.prefill_ms)}</dd></div>`}
      ${speedOf(turn) && html`<div><dt>${t("Writing the reply")}</dt>
        <dd>${milliseconds(turn.cache.decode_ms)}, ${speedOf(turn)}</dd></div>`}
      ${draftsOf(turn).map(
        ({ source, drafted, accepted }) =>
          html`<div><dt>${drafterOf(source)}</dt>
            <dd>${t("{right} of {all} right", { right: count(accepted), all: count(drafted) })}</dd></div>`,
      )}
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
  const name = id === current ? t("This branch") : t("That branch");
  const cells = [
    [t("Reused"), reusedOf(spent)],
    [t("Of it loaded"), loadedOf(spent)],
    [t("Computed again"), spent.recomputed],
    [t("New"), spent.fresh],
  ];
  return html`<section class="branch" aria-label=${t("{branch} in all", { branch: name })}>
    <h4>
      ${name}<span>${plural(path.length, "{n} turn", "{n} turns")}${shared > 0 && shared < path.length ? t(", {n} shared", { n: count(shared) }) : ""}</span>
      ${alone && html`<button type="button" class="delete-branch"
        onClick=${() => remove([id], t("Branch deleted."))}><${Icon} name="trash" />${t("Delete branch")}</button>`}
    </h4>
    <${CostBar} cost=${spent} />
    <dl class="totals">${cells.map(([words, tokens]) => html`<div><dt>${words}</dt><dd>${count(tokens)}</dd></div>`)}</dl>
  </section>`;
}

// The tiers that hold the branch's KV now.
function Tiers({ session }) {
  if (!session.kv) return html`<p class="hint">${t("The model is not running, so nobody knows where the cache is.")}</p>`;
  const held = inOrder(new Set(Object.keys(session.kv)));
  if (!held.length)
    return html`<p class="hint">${t("Nothing is cached under this branch's own name yet. Its next turn shares what others have, or computes it.")}</p>`;
  return html`<table class="tiers">
    <caption>${t("Its cache now")}</caption>
    <tbody>
      ${held.map((tier) => {
        const { tokens, bytes: size } = session.kv[tier];
        return html`<tr>
          <th scope="row"><i class=${`part ${tier}`}></i>${nameOf(tier)}</th>
          <td>${plural(session.tokens, "{some} of {n} token", "{some} of {n} tokens", { some: count(tokens) })}</td>
          <td>${bytes(size)}</td>
        </tr>`;
      })}
    </tbody>
  </table>`;
}
