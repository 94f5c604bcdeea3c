// The dialog with the settings of a conversation, or of new ones.

import { html, useState } from "./vendor/htm-3.1.1/standalone.module.js";
import { apiKey } from "./api.js";
import { Dialog } from "./bits.js";
import { draftOf, keepDraft } from "./drafts.js";
import { modelNamed, modelNow } from "./models.js";
import { changeOnly } from "./sessions.js";
import { UNSET, instructionsDraft, instructionsNow, isSchema, keepDefaults, keepPreset, presets, settingsNow, withSettings } from "./settings.js";
import { state, toast, update, useStore } from "./store.js";
import { t } from "./words.js";

const EFFORTS = ["none", "minimal", "low", "medium", "high", "xhigh", "max"];

const close = () => update({ dialog: null });

// What the model does where a setting is empty, in words.
function heldBy({ source, temperature, top_p: topP, top_k: topK, min_p: minP, repetition_penalty: penalty, stop }) {
  const told = [
    temperature === 0 ? t("always the likeliest token") : t("temperature {number}", { number: temperature }),
    temperature > 0 && topP < 1 && `top-p ${topP}`,
    temperature > 0 && topK > 0 && `top-k ${topK}`,
    temperature > 0 && minP > 0 && `min-p ${minP}`,
    penalty !== 1 && t("repetition penalty {number}", { number: penalty }),
    stop.length > 0 && t("ends at {texts}", { texts: stop.map((text) => JSON.stringify(text)).join(", ") }),
  ];
  const list = told.filter(Boolean).join(", ");
  if (source === "model") return t("The model's own defaults: {list}.", { list });
  return source === "file" ? t("This server's defaults: {list}.", { list }) : t("Defaults: {list}.", { list });
}

// The settings as they are in the dialog at first.
const begun = (id) => {
  const settings = settingsNow();
  return id === null ? settings : { ...settings, system: draftOf(instructionsDraft(id)) || instructionsNow() };
};

// Keep what was chosen for session `id`, or for new ones. Returns whether it could be kept.
function keep(id, wish) {
  if (id === null) {
    keepDefaults(wish);
    return true;
  }
  const session = state.sessions.get(id);
  if (withSettings(session.metadata, wish) === null) return false;
  const system = wish.system.trim();
  keepDraft(instructionsDraft(id), system === instructionsNow().trim() ? "" : system);
  changeOnly([session], ({ metadata }) => ({ metadata: withSettings(metadata, wish) }));
  return true;
}

export function Tuning({ forget }) {
  const { current, sessions } = useStore();
  const [id] = useState(sessions.has(current) ? current : null);
  const [wish, setWish] = useState(() => begun(id));
  const [trouble, setTrouble] = useState("");
  const generation = (modelNamed(wish.model) ?? modelNow())?.warmturn?.generation;
  const set = (name) => (event) => setWish({ ...wish, [name]: event.target.value });
  const field = (name) => ({ value: wish[name], onInput: set(name) });
  const number = (name, label, more) =>
    html`<label class="field"><span>${label}</span><input type="number" step="any" ...${more} ...${field(name)} /></label>`;
  const submit = (event) => {
    event.preventDefault();
    if (wish.format === "schema" && !isSchema(wish.schema)) return setTrouble(t("The schema is not a JSON object."));
    if (!keep(id, wish)) return setTrouble(t("The schema is too long to be kept with the conversation."));
    return close();
  };
  const title = id === null ? t("Settings for new conversations") : t("Settings of this conversation");
  return html`<${Dialog} title=${title} onClose=${close} class="tuning">
    <form onSubmit=${submit}>
      <${Presets} wish=${wish} choose=${(chosen) => setWish({ ...UNSET, ...chosen })} />
      <label class="field"><span>${t("Instructions")}</span><textarea rows="3" ...${field("system")}></textarea></label>
      ${id !== null && html`<p class="hint">${t("Changed instructions go along with your next message. What was said before stays.")}</p>`}
      ${state.models.length > 1 && html`<${ModelField} wish=${wish} set=${set("model")} />`}
      <div class="field-row">
        ${number("temperature", t("Temperature"), { min: 0, max: 2, placeholder: generation?.temperature ?? 1 })}
        ${number("maxTokens", t("Longest reply, in tokens"), { min: 1, step: 1, placeholder: t("no limit") })}
      </div>
      ${generation && html`<p class="hint">${heldBy(generation)}</p>`}
      <details class="more" open=${["topP", "topK", "minP", "seed", "effort", "tools", "format"].some((name) => wish[name])}>
        <summary>${t("More")}</summary>
        <div class="field-row">
          ${number("topP", "top-p", { min: 0, max: 1, placeholder: generation?.top_p ?? 1 })}
          ${number("topK", "top-k", { min: 0, step: 1, placeholder: generation?.top_k || t("off") })}
          ${number("minP", "min-p", { min: 0, max: 1, placeholder: generation?.min_p || t("off") })}
          ${number("seed", t("Seed"), { step: 1, placeholder: t("random") })}
        </div>
        <div class="field-row">
          <label class="field"><span>${t("Reasoning effort")}</span><select value=${wish.effort} onChange=${set("effort")}>
            <option value="">${t("as the model does")}</option>
            ${EFFORTS.map((effort) => html`<option value=${effort}>${effort}</option>`)}
          </select></label>
          <label class="field"><span>${t("Tools")}</span><select value=${wish.tools} onChange=${set("tools")}>
            <option value="">${t("if there are some")}</option><option value="off">${t("off")}</option>
          </select></label>
          <label class="field"><span>${t("Reply as")}</span><select value=${wish.format} onChange=${set("format")}>
            <option value="">${t("text")}</option><option value="json">JSON</option>
            <option value="schema">${t("JSON by a schema")}</option>
          </select></label>
        </div>
        ${wish.format === "schema" && html`<label class="field"><span>${t("Schema")}</span>
          <textarea rows="5" class="as-code" spellcheck=${false} dir="ltr" ...${field("schema")}></textarea></label>`}
      </details>
      ${trouble && html`<p class="field-trouble" role="alert">${trouble}</p>`}
      <div class="dialog-foot">
        ${apiKey.get() && html`<button type="button" class="button apart" onClick=${forget}>${t("Forget this key")}</button>`}
        <button type="button" class="button" onClick=${close}>${t("Cancel")}</button>
        <button type="submit" class="button primary">${t("Save")}</button>
      </div>
    </form>
  <//>`;
}

const ModelField = ({ wish, set }) =>
  html`<label class="field"><span>${t("Model")}</span><select value=${wish.model} onChange=${set}>
    <option value="">${t("the server's first, {name}", { name: state.models[0].id })}</option>
    ${state.models.map(({ id }) => html`<option value=${id}>${id}</option>`)}
  </select></label>`;

// Settings under a name, kept in this browser.
function Presets({ wish, choose }) {
  const [all, setAll] = useState(presets);
  const [chosen, setChosen] = useState("");
  const [name, setName] = useState(null); // of a preset that is being added
  const pick = (event) => {
    setChosen(event.target.value);
    if (event.target.value) choose(all.get(event.target.value));
  };
  const put = (key, settings) => {
    keepPreset(key, settings);
    setAll(presets());
    setChosen(settings ? key : "");
    setName(null);
    toast(settings ? t("Kept as “{name}”.", { name: key }) : t("The preset is gone."));
  };
  const onKeyDown = (event) => {
    if (event.key !== "Enter") return;
    event.preventDefault(); // it would send the whole form
    if (name.trim()) put(name.trim(), wish);
  };
  return html`<div class="field-row presets">
    ${
      name === null
        ? html`<label class="field"><span>${t("Preset")}</span><select value=${chosen} onChange=${pick}>
          <option value="">${all.size ? t("none") : t("none yet")}</option>
          ${[...all.keys()].map((key) => html`<option value=${key}>${key}</option>`)}
        </select></label>
        ${chosen && html`<button type="button" class="button" onClick=${() => put(chosen, null)}>${t("Remove")}</button>`}
        <button type="button" class="button" onClick=${() => setName(chosen)}>${t("Keep as a preset")}</button>`
        : html`<label class="field"><span>${t("Name of the preset")}</span><input autofocus maxlength="60" value=${name}
          onInput=${(event) => setName(event.target.value)} onKeyDown=${onKeyDown} /></label>
        <button type="button" class="button" disabled=${!name.trim()} onClick=${() => put(name.trim(), wish)}>${t("Keep")}</button>`
    }
  </div>`;
}
