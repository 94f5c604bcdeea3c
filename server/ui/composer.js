// The input field, and below it who answers, with which settings.

import { html, useEffect, useLayoutEffect, useRef, useState } from "./vendor/htm-3.1.1/standalone.module.js";
import { Icon, IconButton, hasKeys } from "./bits.js";
import { draftOf, keepDraft } from "./drafts.js";
import { Estimate, Gauge, isNearlyFull, roomNow } from "./gauge.js";
import { modelNow } from "./models.js";
import { Attached, PictureButton, keepPictures, pasted, picturesOf, takesMedia, useDrops } from "./pictures.js";
import { state, update, useStore } from "./store.js";
import { send, stop } from "./talk.js";
import { Ways } from "./ways.js";
import { t } from "./words.js";

function Foot() {
  const { models } = useStore();
  const model = models.length ? modelNow() : null;
  const show = (kind) => () => update({ dialog: { kind } });
  return html`<div class="composer-foot">
    <button type="button" class="model-name" disabled=${!model} title=${t("What this model is")}
      onClick=${show("model")}>${model?.id ?? " "}</button>
    <${IconButton} icon="tune" label=${t("Settings")} onClick=${show("settings")} />
    <p id="composer-hint" class="hint composer-hint">${t("Enter sends, Shift+Enter begins a new line, Esc stops.")}</p>
    <${Gauge} />
  </div>`;
}

export function Composer() {
  const { current, turns, health, opening, unread, write, drafts } = useStore();
  const [text, setText] = useState(() => draftOf(current));
  const area = useRef(null);
  const pictures = picturesOf(current);
  useDrops(current);
  const turn = turns.get(current);
  const runs = turn && turn.status !== "failed";
  // Nothing can be sent while a turn runs, the server is down, or the conversation is not shown.
  const ready = !turn && health === "ok" && !unread && !(opening && current !== null);
  useLayoutEffect(() => setText(draftOf(current)), [current, Boolean(turn), drafts]);
  useEffect(() => {
    if (hasKeys()) area.current.focus({ preventScroll: true });
  }, [write]);
  useLayoutEffect(() => {
    area.current.style.height = "auto";
    area.current.style.height = `${Math.min(area.current.scrollHeight, 240)}px`;
  }, [text]);
  const submit = (event) => {
    event?.preventDefault();
    if (!(text.trim() || pictures.length) || !ready) return;
    keepDraft(current, "");
    keepPictures(current, []);
    setText("");
    send(text.trim(), pictures);
  };
  const onInput = (event) => {
    setText(event.target.value);
    keepDraft(current, event.target.value);
  };
  const onKeyDown = (event) => {
    const wanted = hasKeys() ? !event.shiftKey : event.ctrlKey || event.metaKey;
    const composes = event.isComposing || event.keyCode === 229; // how Safari reports composition
    if (event.key === "Enter" && wanted && !composes) submit(event);
    if (event.key === "ArrowUp" && text === "" && !turn) {
      event.preventDefault();
      [...document.querySelectorAll("[data-role=edit]")].at(-1)?.click();
    }
  };
  return html`<form class="composer" onSubmit=${submit}>
    ${isNearlyFull(roomNow()) && !turn && html`<${Ways} />`}
    <${Estimate} text=${text} />
    <${Attached} id=${current} pictures=${pictures} />
    <div class="composer-box">
      ${takesMedia() && html`<${PictureButton} id=${current} />`}
      <textarea
        id="composer"
        dir="auto"
        ref=${area}
        rows="1"
        aria-label=${t("Message")}
        aria-describedby="composer-hint"
        placeholder=${state.messages.length ? t("Reply") : t("Say something")}
        value=${text}
        onInput=${onInput}
        onKeyDown=${onKeyDown}
        onPaste=${(event) => pasted(current, event)}
      ></textarea>
      ${
        runs
          ? html`<button type="button" class="send" aria-label=${t("Stop")} title=${t("Stop (Esc)")}
            onClick=${() => stop()}><${Icon} name="stop" /></button>`
          : html`<button type="submit" class="send" aria-label=${t("Send")} title=${t("Send (Enter)")} disabled=${!(text.trim() || pictures.length) || !ready}>
            <${Icon} name="send" />
          </button>`
      }
    </div>
    <${Foot} />
  </form>`;
}
