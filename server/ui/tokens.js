// The tokens of a reply, what else could have come in the place of one, and a branch from there.

import { html, useEffect, useState } from "./vendor/htm-3.1.1/standalone.module.js";
import { getJson } from "./api.js";
import { Dialog, decimal } from "./bits.js";
import { modelNow } from "./models.js";
import { report, sessionPath as path } from "./sessions.js";
import { state, update } from "./store.js";
import { branchBehind } from "./talk.js";
import { t } from "./words.js";

const COUNT = 8; // alternatives that are asked for

const close = () => update({ dialog: null });

const percent = (logprob) => {
  const part = 100 * Math.exp(logprob);
  return part < 0.1 ? t("under 0.1 %") : t("{part} %", { part: decimal(part, part < 10 ? 1 : 0) });
};

const seen = (text) => text.replace(/\n/g, "↵\n").replace(/^ | $/g, "␣") || "·";

// `index`: of the reply among the open session's messages.
export function Tokens({ id, turn, index }) {
  const [tokens, setTokens] = useState(null);
  const [at, setAt] = useState(null);
  const [found, setFound] = useState(null);
  useEffect(() => {
    getJson(path(id, `/turns/${turn}/tokens`)).then(({ data }) => setTokens(data), report);
  }, []);
  const ask = async (token) => {
    setAt(token);
    setFound(null);
    try {
      setFound(await getJson(path(id, "/alternatives"), { method: "POST", json: { model: modelNow()?.id, turn, token, count: COUNT } }));
    } catch (error) {
      report(error);
    }
  };
  return html`<${Dialog} title=${t("What it could have said")} onClose=${close} class="tokens">
    <p>${t("Choose a word of the reply to see what else was likely there. A branch goes on from another choice.")}</p>
    <div class="token-text" dir="auto" role="group" aria-label=${t("Reply")}>
      ${(tokens ?? []).map(
        ({ text }, place) => html`<button type="button" key=${place} class=${place === at ? "token chosen" : "token"}
          aria-pressed=${place === at} onClick=${() => ask(place)}>${seen(text)}</button>`,
      )}
    </div>
    ${found && html`<${Choices} found=${found} index=${index} />`}
    <div class="dialog-foot"><button type="button" class="button" onClick=${close}>${t("Close")}</button></div>
  <//>`;
}

function Choices({ found, index }) {
  const ends = modelNow()?.warmturn?.eos_token_ids ?? [];
  const isPlain = !state.messages[index].reasoning_content; // what stands before the reply is not part of its text
  const go = (text) => {
    close();
    branchBehind(index, found.before + text);
  };
  return html`<table class="tiers choices">
    <caption>${t("Likely here")}</caption>
    <tbody>
      ${found.data.map(
        ({ id, text, logprob, chosen }) => html`<tr key=${id}>
        <th scope="row"><code dir="auto">${seen(text)}</code></th>
        <td><span class="gauge-bar" aria-hidden="true"><i style=${{ width: `${100 * Math.exp(logprob)}%` }}></i></span></td>
        <td title=${decimal(logprob, 3)}>${percent(logprob)}</td>
        <td>${chosen ? t("was said") : isPlain && !ends.includes(id) && html`<button type="button" class="button"
          onClick=${() => go(text)}>${t("Branch here")}</button>`}</td>
      </tr>`,
      )}
    </tbody>
  </table>`;
}
