// How much of the model's context a conversation uses, and what its draft would add.

import { html, useEffect, useState } from "./vendor/htm-3.1.1/standalone.module.js";
import { getJson } from "./api.js";
import { count } from "./bits.js";
import { modelNow } from "./models.js";
import { state, useStore } from "./store.js";
import { t } from "./words.js";

const LONG = 1000; // characters of a draft whose tokens are counted
const PAUSE = 300; // milliseconds without typing before that
const NEAR = 0.85; // of the context, from where it is told

// { used, whole, left } in tokens: of the open conversation; null before its model is known.
export function roomNow() {
  const whole = modelNow()?.warmturn?.max_context;
  if (!whole) return null;
  const used = state.sessions.get(state.current)?.tokens ?? 0;
  return { used, whole, left: whole - used };
}

export const isNearlyFull = (room) => room !== null && room.used > NEAR * room.whole;

export function Gauge() {
  useStore();
  const room = roomNow();
  if (!room?.used) return null;
  const told = t("{used} of {whole} tokens of context", { used: count(room.used), whole: count(room.whole) });
  const part = Math.min(100, (100 * room.used) / room.whole);
  return html`<span class=${`gauge-context ${isNearlyFull(room) ? "near" : ""}`} title=${told}>
    <meter class="hidden" min="0" max=${room.whole} value=${room.used} aria-label=${t("Context used")}>${told}</meter>
    <span class="gauge-bar" aria-hidden="true"><i style=${{ width: `${Math.max(2, part)}%` }}></i></span>
    <span aria-hidden="true">${t("{part} %", { part: count(part) })}</span>
  </span>`;
}

// How many tokens a long draft has; null for a short one, and until it is known.
function useTokens(text) {
  const [tokens, setTokens] = useState(null);
  const isLong = text.length > LONG;
  useEffect(() => {
    setTokens(null);
    if (!isLong) return undefined;
    const leaving = new AbortController();
    const ask = async () => {
      const json = { model: modelNow()?.id, prompt: text };
      try {
        setTokens((await getJson("tokenize", { method: "POST", json, signal: leaving.signal })).count);
      } catch {
        // it is only told
      }
    };
    const timer = setTimeout(ask, PAUSE);
    return () => {
      clearTimeout(timer);
      leaving.abort();
    };
  }, [text, isLong]);
  return tokens;
}

// What a long draft will take, before it is sent.
export function Estimate({ text }) {
  const tokens = useTokens(text);
  const room = roomNow();
  if (tokens === null || !room) return null;
  const fits = tokens < room.left;
  const about = { number: count(tokens), left: count(Math.max(0, room.left)), part: count((100 * tokens) / room.whole) };
  return html`<p class=${`estimate ${fits ? "" : "trouble-estimate"}`} role="status">
    ${fits ? t("About {number} tokens, {part} % of the context.", about) : t("About {number} tokens, and there is room for {left}.", about)}
  </p>`;
}
