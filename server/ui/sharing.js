// Links to a branch, for people without a key: made, copied and revoked.

import { html, useEffect, useState } from "./vendor/htm-3.1.1/standalone.module.js";
import { Failure, getJson } from "./api.js";
import { Dialog, copyText } from "./bits.js";
import { said, sessionPath as path } from "./sessions.js";
import { update } from "./store.js";
import { language, t } from "./words.js";

const DAY = 86_400; // seconds
const SPANS = { [DAY]: t("one day"), [7 * DAY]: t("7 days"), [30 * DAY]: t("30 days"), [365 * DAY]: t("one year") };

const close = () => update({ dialog: null });
const dayOf = (seconds) =>
  new Date(seconds * 1000).toLocaleString(language, { day: "numeric", month: "short", hour: "numeric", minute: "2-digit" });

const OFF = () => t("Links are off on this server. Whoever runs it can turn them on (--sharing on).");
const reasonOf = (error) => (error instanceof Failure && error.status === 404 && error.code !== "session_not_found" ? OFF() : said(error));

const addressOf = (secret) => new URL(`shared.html#${secret}`, document.baseURI).href;

// `turn`: the last one that is shown; null: of the branch.
export function Sharing({ id, turn = null }) {
  const [links, setLinks] = useState([]);
  const [span, setSpan] = useState(String(7 * DAY));
  const [made, setMade] = useState(null); // the address of the new link
  const [trouble, setTrouble] = useState("");
  const attempt = async (work) => {
    setTrouble("");
    try {
      await work();
    } catch (error) {
      setTrouble(reasonOf(error));
    }
  };
  const read = async () => setLinks((await getJson(path(id, "/shares"))).data);
  useEffect(() => {
    attempt(read);
  }, []);
  const make = () =>
    attempt(async () => {
      const json = { expires_in_seconds: Number(span), ...(turn ? { turn } : {}) };
      const { secret } = await getJson(path(id, "/shares"), { method: "POST", json });
      setMade(addressOf(secret));
      await copyText(addressOf(secret));
      await read();
    });
  const revoke = (link) =>
    attempt(async () => {
      await getJson(path(id, `/shares/${link}`), { method: "DELETE" });
      setMade(null);
      await read();
    });
  return html`<${Dialog} title=${t("Share this branch")} onClose=${close}>
    <p>${turn ? t("Whoever has the link can read the conversation up to turn {number}, the instructions too, without a key. Later turns are not shown.", { number: turn }) : t("Whoever has the link can read the conversation as it is now, the instructions too, without a key. Later turns are not shown.")}</p>
    <div class="field-row">
      <label class="field"><span>${t("The link ends after")}</span><select value=${span} onChange=${(event) => setSpan(event.target.value)}>
        ${Object.entries(SPANS).map(([seconds, words]) => html`<option value=${seconds}>${words}</option>`)}
      </select></label>
      <button type="button" class="button primary" onClick=${make}>${t("Make a link")}</button>
    </div>
    ${made && html`<div class="field"><span role="status">${t("Copied. It is shown only now.")}</span>
      <input readonly dir="ltr" class="share-link" aria-label=${t("A link")} value=${made} onFocus=${(event) => event.target.select()} /></div>`}
    ${trouble && html`<p class="field-trouble" role="alert">${trouble}</p>`}
    ${links.length > 0 && html`<ul class="share-links" aria-label=${t("Links to this conversation")}>
      ${links.map((link) => html`<li key=${link.id}>
        <span>${t("Up to turn {number}, until {day}", { number: link.turn, day: dayOf(link.expires_at) })}</span>
        <button type="button" class="button" onClick=${() => revoke(link.id)}>${t("Revoke")}</button>
      </li>`)}
    </ul>`}
    <div class="dialog-foot"><button type="button" class="button" onClick=${close}>${t("Close")}</button></div>
  <//>`;
}
