// The page's dialogs.

import { html, useState } from "./vendor/htm-3.1.1/standalone.module.js";
import { apiKey, isKey } from "./api.js";
import { Dialog } from "./bits.js";
import { Card } from "./card.js";
import { Compare } from "./compare.js";
import { saveText } from "./keep.js";
import { exportSession, fork, labelsOf, rename, rewind, setLabels } from "./sessions.js";
import { Sharing } from "./sharing.js";
import { Shortcuts } from "./shortcuts.js";
import { state, update, useStore } from "./store.js";
import { Tokens } from "./tokens.js";
import { Tuning } from "./tuning.js";
import { plural, t } from "./words.js";

const close = () => update({ dialog: null });

export function Dialogs() {
  const { dialog } = useStore();
  if (!dialog) return null;
  const Kind = {
    key: KeyDialog,
    rename: RenameDialog,
    labels: LabelsDialog,
    export: ExportDialog,
    rewind: RewindDialog,
    settings: Tuning,
    model: Card,
    shortcuts: Shortcuts,
    share: Sharing,
    compare: Compare,
    tokens: Tokens,
  }[dialog.kind];
  return html`<${Kind} key=${dialog.kind} forget=${forgetKey} ...${dialog} />`;
}

// Asks for the API key, once for all requests that wait for it.
export const askForKey = (wasWrong) =>
  new Promise((resolve) => {
    update({
      dialog: {
        kind: "key",
        wasWrong,
        answer: (key, lasting) => {
          if (wasWrong) beginAnew(key, lasting);
          else {
            close();
            resolve({ key, lasting });
          }
        },
      },
    });
  });

function KeyDialog({ wasWrong, answer }) {
  const [key, setKey] = useState("");
  const [odd, setOdd] = useState(false);
  const [lasting, setLasting] = useState(false);
  const submit = (event) => {
    event.preventDefault();
    setOdd(!isKey(key.trim()));
    if (isKey(key.trim())) answer(key.trim(), lasting);
  };
  return html`<${Dialog} title=${t("API key")} class="key-dialog">
    <form onSubmit=${submit}>
      <p>${wasWrong ? t("That key is not valid here.") : t("This server answers only with a key.")} ${t("It stays in this tab until you close it, unless you have this browser remember it.")}</p>
      <label class="field"><span>${t("Key")}</span><input type="password" name="api-key" autocomplete="off" autofocus value=${key}
        onInput=${(event) => setKey(event.target.value)} /></label>
      <label class="check"><input type="checkbox" checked=${lasting}
        onChange=${(event) => setLasting(event.target.checked)} /><span>${t("Remember it in this browser")}</span></label>
      ${odd && html`<p class="field-trouble" role="alert">${t("A key has no spaces, and no letters beyond a to z.")}</p>`}
      <div class="dialog-foot"><button type="submit" class="button primary" disabled=${!key.trim()}>${t("Continue")}</button></div>
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
  return html`<${Dialog} title=${t("Rename")} onClose=${close}>
    <form onSubmit=${submit}>
      <label class="field"><span>${t("Title")}</span><input autofocus maxlength="200" value=${text}
        onInput=${(event) => setText(event.target.value)} /></label>
      <div class="dialog-foot">
        <button type="button" class="button" onClick=${close}>${t("Cancel")}</button>
        <button type="submit" class="button primary" disabled=${!text.trim()}>${t("Rename")}</button>
      </div>
    </form>
  <//>`;
}

const MOST_LABELS = 8;

function LabelsDialog({ members }) {
  const [text, setText] = useState(() => labelsOf(members[0]).join(", "));
  const names = [...new Set(text.split(",").map((name) => name.trim()).filter(Boolean))];
  const isFine = names.length <= MOST_LABELS && names.every((name) => name.length <= 40);
  const submit = (event) => {
    event.preventDefault();
    close();
    setLabels(members, names);
  };
  return html`<${Dialog} title=${t("Labels")} onClose=${close}>
    <form onSubmit=${submit}>
      <label class="field"><span>${t("Labels, with commas between them")}</span><input autofocus maxlength="300" value=${text}
        onInput=${(event) => setText(event.target.value)} /></label>
      ${!isFine && html`<p class="field-trouble" role="alert">${t("At most 8 labels, of 40 characters each.")}</p>`}
      <div class="dialog-foot">
        <button type="button" class="button" onClick=${close}>${t("Cancel")}</button>
        <button type="submit" class="button primary" disabled=${!isFine}>${t("Save")}</button>
      </div>
    </form>
  <//>`;
}

function ExportDialog({ id }) {
  const go = (kv) => {
    close();
    exportSession(id, kv);
  };
  const save = (kind) => () => {
    close();
    saveText(id, kind);
  };
  const print = () => {
    close();
    setTimeout(() => window.print());
  };
  return html`<${Dialog} title=${t("Export this branch")} onClose=${close}>
    <p>${t("Its messages, for other programs or on paper.")}</p>
    <div class="dialog-foot start">
      <button type="button" class="button" onClick=${save("md")}>Markdown</button>
      <button type="button" class="button" onClick=${save("json")}>JSON</button>
      ${id === state.current && html`<button type="button" class="button" onClick=${print}>${t("Print")}</button>`}
    </div>
    <p>${t("For another server: a ZIP file with its messages and exact tokens, in the clear. With its cache, the next server need not compute them again.")}</p>
    <div class="dialog-foot">
      <button type="button" class="button" onClick=${close}>${t("Cancel")}</button>
      <button type="button" class="button" onClick=${() => go(false)}>${t("Without the cache")}</button>
      <button type="button" class="button primary" onClick=${() => go(true)}>${t("With its cache")}</button>
    </div>
  <//>`;
}

function RewindDialog({ id, turn, lost }) {
  const go = (work) => {
    close();
    work(id, turn);
  };
  return html`<${Dialog} title=${t("Rewind to turn {number}?", { number: turn })} onClose=${close}>
    <p>
      ${plural(lost, "The turn behind it will leave this branch, and cannot be brought back.", "The {n} turns behind it will leave this branch, and cannot be brought back.")}
      ${" "}${t("A fork leaves everything where it is.")}
    </p>
    <div class="dialog-foot">
      <button type="button" class="button" onClick=${close}>${t("Cancel")}</button>
      <button type="button" class="button" onClick=${() => go(rewind)}>${t("Rewind")}</button>
      <button type="button" class="button primary" onClick=${() => go(fork)}>${t("Fork instead")}</button>
    </div>
  <//>`;
}

// Reload the page: nothing that was read or written with the old key stays in the tab, as the new key may belong to
// another user.
function beginAnew(key = null, lasting = false) {
  update({ turns: new Map(), toast: null });
  apiKey.forget();
  if (key) apiKey.set(key, lasting);
  location.replace(location.pathname);
}

function forgetKey() {
  state.toast?.close(); // carries out deletions that wait, with the old key
  beginAnew();
}

export const hasDialog = () => state.dialog !== null;
