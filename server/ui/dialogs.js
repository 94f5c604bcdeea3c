// The page's dialogs.

import { html, useState } from "./vendor/htm-3.1.1/standalone.module.js";
import { apiKey, isKey } from "./api.js";
import { Dialog, plural } from "./bits.js";
import { exportSession, fork, rename, rewind } from "./sessions.js";
import { remember, state, update, useStore } from "./store.js";

const close = () => update({ dialog: null });

export function Dialogs() {
  const { dialog } = useStore();
  if (!dialog) return null;
  const Kind = {
    key: KeyDialog,
    rename: RenameDialog,
    export: ExportDialog,
    rewind: RewindDialog,
    settings: SettingsDialog,
  }[dialog.kind];
  return html`<${Kind} key=${dialog.kind} ...${dialog} />`;
}

// Asks for the API key, once for all requests that wait for it.
export const askForKey = (wasWrong) =>
  new Promise((resolve) => {
    update({
      dialog: {
        kind: "key",
        wasWrong,
        answer: (key) => {
          if (wasWrong) beginAnew(key);
          else {
            close();
            resolve(key);
          }
        },
      },
    });
  });

function KeyDialog({ wasWrong, answer }) {
  const [key, setKey] = useState("");
  const [odd, setOdd] = useState(false);
  const submit = (event) => {
    event.preventDefault();
    setOdd(!isKey(key.trim()));
    if (isKey(key.trim())) answer(key.trim());
  };
  return html`<${Dialog} title="API key" class="key-dialog">
    <form onSubmit=${submit}>
      <p>${wasWrong ? "That key is not valid here. " : "This server answers only with a key. "}It stays in this tab, until you close it.</p>
      <label class="field"><span>Key</span><input type="password" name="api-key" autocomplete="off" autofocus value=${key}
        onInput=${(event) => setKey(event.target.value)} /></label>
      ${odd && html`<p class="field-trouble" role="alert">A key has no spaces, and no letters beyond a to z.</p>`}
      <div class="dialog-foot"><button type="submit" class="button primary" disabled=${!key.trim()}>Continue</button></div>
    </form>
  <//>`;
}

function RenameDialog({ members, title }) {
  const [text, setText] = useState(title);
  const submit = (event) => {
    event.preventDefault();
    close();
    if (text.trim()) rename(members, text.trim());
  };
  return html`<${Dialog} title="Rename" onClose=${close}>
    <form onSubmit=${submit}>
      <label class="field"><span>Title</span><input autofocus maxlength="200" value=${text}
        onInput=${(event) => setText(event.target.value)} /></label>
      <div class="dialog-foot">
        <button type="button" class="button" onClick=${close}>Cancel</button>
        <button type="submit" class="button primary" disabled=${!text.trim()}>Rename</button>
      </div>
    </form>
  <//>`;
}

function ExportDialog({ id }) {
  const go = (kv) => {
    close();
    exportSession(id, kv);
  };
  return html`<${Dialog} title="Export this branch" onClose=${close}>
    <p>A ZIP file with its messages and exact tokens, in the clear. With its cache, the next server need not compute them again.</p>
    <div class="dialog-foot">
      <button type="button" class="button" onClick=${close}>Cancel</button>
      <button type="button" class="button" onClick=${() => go(false)}>Without the cache</button>
      <button type="button" class="button primary" onClick=${() => go(true)}>With its cache</button>
    </div>
  <//>`;
}

function RewindDialog({ id, turn, lost }) {
  const go = (work) => {
    close();
    work(id, turn);
  };
  return html`<${Dialog} title=${`Rewind to turn ${turn}?`} onClose=${close}>
    <p>
      The ${lost === 1 ? "turn" : plural(lost, "turn")} behind it will leave this branch, and cannot be brought back.
      A fork leaves everything where it is.
    </p>
    <div class="dialog-foot">
      <button type="button" class="button" onClick=${close}>Cancel</button>
      <button type="button" class="button" onClick=${() => go(rewind)}>Rewind</button>
      <button type="button" class="button primary" onClick=${() => go(fork)}>Fork instead</button>
    </div>
  <//>`;
}

// Reload the page: nothing that was read or written with the old key stays in the tab, as the new key may belong to
// another user.
function beginAnew(key = null) {
  update({ turns: new Map(), toast: null });
  apiKey.forget();
  if (key) apiKey.set(key);
  location.replace(location.pathname);
}

function forgetKey() {
  state.toast?.close(); // carries out deletions that wait, with the old key
  beginAnew();
}

// The default of a setting, in words.
function heldBy({ source, temperature, top_p: topP, top_k: topK, min_p: minP, repetition_penalty: penalty, stop }) {
  const told = [
    temperature === 0 ? "always the likeliest token" : `temperature ${temperature}`,
    temperature > 0 && topP < 1 && `top-p ${topP}`,
    temperature > 0 && topK > 0 && `top-k ${topK}`,
    temperature > 0 && minP > 0 && `min-p ${minP}`,
    penalty !== 1 && `repetition penalty ${penalty}`,
    stop.length > 0 && `ends at ${stop.map((text) => JSON.stringify(text)).join(", ")}`,
  ];
  const whose = { model: "The model's own defaults", file: "This server's defaults", openai: "Defaults" }[source];
  return `${whose}: ${told.filter(Boolean).join(", ")}.`;
}

function SettingsDialog() {
  const { settings, model } = useStore();
  const generation = model?.warmturn?.generation;
  const [wish, setWish] = useState(settings);
  const field = (name) => ({ value: wish[name], onInput: (event) => setWish({ ...wish, [name]: event.target.value }) });
  const submit = (event) => {
    event.preventDefault();
    remember("settings", wish, apiKey.get() ? "sessionStorage" : "localStorage");
    update({ settings: wish, dialog: null });
  };
  return html`<${Dialog} title="Settings" onClose=${close}>
    <form onSubmit=${submit}>
      <div class="field-row">
        <label class="field"><span>Temperature</span><input type="number" min="0" max="2" step="0.1"
          placeholder=${generation?.temperature ?? 1} ...${field("temperature")} /></label>
        <label class="field"><span>Most tokens of a reply</span><input type="number" min="1" step="1"
          placeholder="no limit" ...${field("maxTokens")} /></label>
      </div>
      ${generation && html`<p class="hint">${heldBy(generation)}</p>`}
      <label class="field"><span>Instructions for new conversations</span><textarea rows="4" ...${field("system")}></textarea></label>
      <div class="dialog-foot">
        ${apiKey.get() && html`<button type="button" class="button apart" onClick=${forgetKey}>Forget this key</button>`}
        <button type="button" class="button" onClick=${close}>Cancel</button>
        <button type="submit" class="button primary">Save</button>
      </div>
    </form>
  <//>`;
}

export const hasDialog = () => state.dialog !== null;
