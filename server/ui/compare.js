// Two branches side by side, with what differs marked; the second one can be a new reply with other settings.

import { html, useEffect, useMemo, useState } from "./vendor/htm-3.1.1/standalone.module.js";
import { getJson } from "./api.js";
import { Dialog, plural } from "./bits.js";
import { differencesOf } from "./difference.js";
import { modelNamed, modelNow } from "./models.js";
import { open, report, sessionPath as path } from "./sessions.js";
import { presets, settingsOf } from "./settings.js";
import { state, update, useGrowth, useStore } from "./store.js";
import { answerBeside } from "./talk.js";
import { t } from "./words.js";

const close = () => update({ dialog: null });

// The messages of a session, its running reply included; null until they are read.
function useMessages(id) {
  const { turns, sessions } = useStore();
  useGrowth();
  const [read, setRead] = useState({ id: null, messages: null });
  const turn = turns.get(id);
  const count = sessions.get(id)?.messages ?? 0;
  useEffect(() => {
    if (id === null || turn) return undefined;
    let isWanted = true;
    const show = ({ data }) => isWanted && setRead({ id, messages: data });
    getJson(path(id, "/messages")).then(show, (error) => isWanted && report(error));
    return () => {
      isWanted = false;
    };
  }, [id, Boolean(turn), count]);
  if (turn) return [...(turn.fork?.shown ?? []), ...turn.messages, { role: "assistant", content: turn.reply }];
  return read.id === id ? read.messages : null;
}

const isSame = (one, other) => one.role === other.role && one.content === other.content;

// How many messages both begin with.
function commonOf(left, right) {
  let common = 0;
  while (common < Math.min(left.length, right.length) && isSame(left[common], right[common])) common += 1;
  return common;
}

const ROLES = { user: t("You"), assistant: t("Reply") };

const Text = ({ role, parts }) =>
  html`<div class=${`compared ${role}`}><span class="hidden">${ROLES[role] ?? t("Instructions")}: </span
    >${parts.map(({ text, same }) => (same ? text : html`<mark>${text}</mark>`))}</div>`;

const ALONE = (message) => [{ text: message.content, same: false }];

function Rows({ left, right }) {
  const common = commonOf(left, right);
  const rows = useMemo(() => {
    const pairs = Array.from({ length: Math.max(left.length, right.length) - common }, (_, at) => [left[common + at], right[common + at]]);
    return pairs.map(([one, other]) => {
      if (!one || !other) return [one && { role: one.role, parts: ALONE(one) }, other && { role: other.role, parts: ALONE(other) }];
      const [a, b] = differencesOf(one.content, other.content);
      return [
        { role: one.role, parts: a },
        { role: other.role, parts: b },
      ];
    });
  }, [left, right]);
  const asked = left.slice(0, common).findLast(({ role }) => role === "user");
  return html`
    ${common > 0 && html`<p class="hint compare-common">${plural(common, "{n} message is the same.", "{n} messages are the same.")}</p>`}
    ${asked && html`<div class="compared user both">${asked.content}</div>`}
    ${rows.length === 0 && html`<p class="hint compare-common">${t("Both are the same.")}</p>`}
    ${rows.map(
      ([one, other], at) => html`<div class="compare-row" key=${at}>
      ${one ? html`<${Text} ...${one} />` : html`<div></div>`}
      ${other ? html`<${Text} ...${other} />` : html`<div></div>`}
    </div>`,
    )}`;
}

// `left`, `right`: sessions. `index`: of the open session's reply that is to be answered again with other settings.
export function Compare({ left, right: known = null, index = null }) {
  const [right, setRight] = useState(known);
  const [one, other] = [useMessages(left), useMessages(right)];
  const go = (id) => {
    close();
    open(id);
  };
  const share = (id) => () => update({ dialog: { kind: "share", id } });
  const runs = state.turns.has(right);
  const title = right === null ? t("Answer again with other settings") : t("Two branches");
  const shown = one && other;
  return html`<${Dialog} title=${title} onClose=${close} class="compare">
    ${right === null && html`<${Wishes} begin=${(wish) => setRight(answerBeside(index, wish))} />`}
    ${right !== null && html`<div class="compare-row compare-head">
      <div>
        <button type="button" class="button" onClick=${() => go(left)}>${t("Go on with this one")}</button>
        <button type="button" class="button" onClick=${share(left)}>${t("Share this one")}</button>
      </div>
      <div>
        <button type="button" class="button" disabled=${runs} onClick=${() => go(right)}>${t("Go on with that one")}</button>
        <button type="button" class="button" disabled=${runs} onClick=${share(right)}>${t("Share that one")}</button>
      </div>
    </div>`}
    ${shown && html`<div class="compare-body" tabindex="0" role="region" aria-label=${title}><${Rows} left=${one} right=${other} /></div>`}
    ${right !== null && html`<div class="dialog-foot"><button type="button" class="button" onClick=${close}>${t("Close")}</button></div>`}
  <//>`;
}

// What the other reply shall be written with.
function Wishes({ begin }) {
  const { models, current, sessions } = useStore();
  const [wish, setWish] = useState(() => ({ ...settingsOf(sessions.get(current)) }));
  const all = presets();
  const generation = (modelNamed(wish.model) ?? modelNow())?.warmturn?.generation;
  const set = (name) => (event) => setWish({ ...wish, [name]: event.target.value });
  const submit = (event) => {
    event.preventDefault();
    begin(wish);
  };
  return html`<form onSubmit=${submit}>
    <p>${t("The same message is answered once more on a branch, and both replies are shown side by side.")}</p>
    <div class="field-row">
      ${models.length > 1 && html`<label class="field"><span>${t("Model")}</span><select value=${wish.model} onChange=${set("model")}>
        <option value="">${models[0].id}</option>
        ${models.slice(1).map(({ id }) => html`<option value=${id}>${id}</option>`)}
      </select></label>`}
      ${all.size > 0 && html`<label class="field"><span>${t("Preset")}</span><select
        onChange=${(event) => event.target.value && setWish({ ...wish, ...all.get(event.target.value) })}>
        <option value="">${t("none")}</option>
        ${[...all.keys()].map((name) => html`<option value=${name}>${name}</option>`)}
      </select></label>`}
      <label class="field"><span>${t("Temperature")}</span><input type="number" step="any" min="0" max="2" placeholder=${generation?.temperature ?? 1}
        value=${wish.temperature} onInput=${set("temperature")} /></label>
      <label class="field"><span>${t("Seed")}</span><input type="number" step="1" placeholder=${t("random")} value=${wish.seed} onInput=${set("seed")} /></label>
    </div>
    <div class="dialog-foot">
      <button type="button" class="button" onClick=${close}>${t("Close")}</button>
      <button type="submit" class="button primary">${t("Answer again")}</button>
    </div>
  </form>`;
}
