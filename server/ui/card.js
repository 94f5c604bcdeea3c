// A model as it is served: what it is, how it runs, and how fast it is now.

import { html, useEffect, useState } from "./vendor/htm-3.1.1/standalone.module.js";
import { Dialog, bytes, count, milliseconds } from "./bits.js";
import { lastOf, useMetrics } from "./metrics.js";
import { doingOf, loadModels, modelNamed, modelNow } from "./models.js";
import { changeOnly, report } from "./sessions.js";
import { keepDefaults, settingsNow, withSettings } from "./settings.js";
import { state, update, useStore } from "./store.js";
import { t } from "./words.js";

const LOOK = 2000; // milliseconds between two requests for the models while the card is open

const close = () => update({ dialog: null });

export function Card() {
  const { models, current, sessions } = useStore();
  const [chosen, setChosen] = useState(() => modelNow()?.id);
  useEffect(() => {
    const timer = setInterval(() => loadModels().catch(() => {}), LOOK);
    loadModels().catch(report);
    return () => clearInterval(timer);
  }, []);
  const model = modelNamed(chosen) ?? models[0];
  const isUsed = model === modelNow();
  const use = () => {
    const session = sessions.get(current);
    const settings = { ...settingsNow(), model: model.id };
    if (session) changeOnly([session], ({ metadata }) => ({ metadata: withSettings(metadata, settings) ?? metadata }));
    else keepDefaults(settings);
    close();
  };
  return html`<${Dialog} title=${model.id} onClose=${close} class="card">
    ${
      models.length > 1 &&
      html`<label class="field"><span>${t("Model")}</span>
      <select autofocus value=${model.id} onChange=${(event) => setChosen(event.target.value)}>
        ${models.map((one) => html`<option value=${one.id}>${[one.id, doingOf(one)].filter(Boolean).join(", ")}</option>`)}
      </select></label>`
    }
    ${model.warmturn ? html`<${Facts} facts=${model.warmturn} />` : html`<p class="hint">${waitingOf(model)}</p>`}
    <div class="dialog-foot">
      <button type="button" class=${isUsed ? "button primary" : "button"} onClick=${close}>${t("Close")}</button>
      ${!isUsed && html`<button type="button" class="button primary" onClick=${use}>
        ${state.sessions.has(current) ? t("Go on with this model") : t("Use this model")}</button>`}
    </div>
  <//>`;
}

const waitingOf = ({ status }) => {
  if (status.stage) return t("It is being loaded: {stage}.", { stage: status.stage });
  return status.failed ? t("It could not be loaded. The server's log says why.") : t("It is loaded when it is first asked.");
};

function millions(number) {
  if (number >= 1e9) return t("{number} billion parameters", { number: (number / 1e9).toFixed(1) });
  return t("{number} million parameters", { number: (number / 1e6).toFixed(number < 1e7 ? 1 : 0) });
}

function Facts({ facts }) {
  useMetrics();
  const rate = lastOf("rate");
  const first = lastOf("first");
  const layers = Object.entries(facts.layer_kinds).map(([kind, number]) => `${count(number)} ${kind}`);
  const rows = [
    [t("Architecture"), `${facts.architecture}, ${millions(facts.parameters)}`],
    [t("Layers"), layers.join(", ")],
    [t("Weights"), `${bytes(facts.weight_bytes)}, ${roundedIn(facts)}`],
    [t("Context"), t("{number} tokens", { number: count(facts.max_context) })],
    [t("Cache"), t("{bytes} a token", { bytes: bytes(facts.kv_bytes_per_token) })],
    [t("How it runs"), [facts.mode, facts.device, facts.tensor_parallel > 1 && t("{number} ranks", { number: facts.tensor_parallel })].filter(Boolean).join(", ")],
    facts.media.length > 0 && [t("Also takes"), facts.media.map((kind) => MEDIA()[kind] ?? kind).join(", ")],
    [t("Speed now"), rate ? t("{number} tokens a second", { number: count(rate.value) }) : t("nothing is being written")],
    first && [t("First token"), milliseconds(first.value)],
    [t("Licence"), facts.licence || t("its card names none")],
  ].filter(Boolean);
  return html`<dl class="facts">${rows.map(([name, value]) => html`<div><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>
    <p class="hint">${facts.probe}</p>`;
}

const MEDIA = () => ({ image: t("pictures"), audio: t("sounds"), video: t("videos") });

const roundedIn = ({ dtype, weight_rounding: rounding }) =>
  rounding ? t("rounded to {kind}, computed in {dtype}", { kind: rounding.weights ?? rounding.kind ?? "", dtype }) : dtype;
