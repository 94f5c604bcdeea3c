// The server's figures of the last five minutes, read from /metrics while a component shows them.

import { useEffect, useState } from "./vendor/htm-3.1.1/standalone.module.js";
import { call } from "./api.js";
import { ALWAYS, inOrder } from "./tiers.js";

const LOOK = 2000; // milliseconds between two samples
const GAP = 60; // seconds without a sample after which no rate is computed
export const SPAN = 300; // seconds of history

// Prometheus' text as a function from name and labels to the sum of the matching samples; null if there are none.
function metricsOf(text) {
  const lines = [...text.matchAll(/^warmturn_(\w+)(?:\{(.*)\})? (\S+)$/gm)];
  const sumOf = (name, labels = "") => {
    const found = lines.filter(([, of, with_ = ""]) => of === name && with_.includes(labels));
    return found.length ? found.reduce((sum, line) => sum + Number(line[3]), 0) : null;
  };
  sumOf.tiers = new Set([...text.matchAll(/tier="(\w+)"/g)].map(([, tier]) => tier));
  return sumOf;
}

// The tiers, nearest first, each as { tier, used, whole, isPaged }: pages, or bytes. Null: unknown; a `whole` of 0:
// there is no such tier, or it has no limit.
export const roomsOf = (metric) =>
  inOrder(new Set([...ALWAYS, ...(metric?.tiers ?? [])])).map((tier) => {
    const told = metric ?? (() => null);
    const pages = told("pages", `tier="${tier}"`);
    return pages === null
      ? { tier, used: told(`${tier}_bytes`), whole: told(`${tier}_bytes_capacity`), isPaged: false }
      : { tier, used: pages, whole: told("pages_capacity", `tier="${tier}"`), isPaged: true };
  });

// The history, one value per sample: `at` in Unix seconds, `rate` in tokens a second, `first` in milliseconds, and
// under each tier's name pages or bytes. Null where there is no value.
export const history = { at: [], rate: [], first: [], running: [], waiting: [] };

let before = null;
let latest = null; // the latest figures: a panel that is opened again begins with them

function note(metric) {
  const now = {
    at: Date.now() / 1000,
    made: metric("generated_tokens_total"),
    first: metric("time_to_first_token_seconds_sum"),
    firsts: metric("time_to_first_token_seconds_count"),
  };
  const passed = before ? now.at - before.at : 0;
  const told = passed > 0 && passed < GAP && now.made >= before.made; // the counters of a restarted server begin at 0
  const firsts = told ? now.firsts - before.firsts : 0;
  const point = {
    at: now.at,
    rate: told ? (now.made - before.made) / passed : null,
    first: firsts > 0 ? (1000 * (now.first - before.first)) / firsts : null,
    running: metric("running"),
    waiting: metric("waiting"),
    ...Object.fromEntries(roomsOf(metric).map(({ tier, used }) => [tier, used])),
  };
  for (const { tier } of roomsOf(metric)) history[tier] ??= history.at.map(() => null);
  const old = history.at.findIndex((at) => at > now.at - SPAN);
  for (const [name, line] of Object.entries(history)) {
    line.splice(0, old < 0 ? line.length : old);
    line.push(point[name]);
  }
  before = now;
}

// The last value of a line that is not 0, with its age in seconds; null where there is none.
export function lastOf(name) {
  const at = history[name].findLastIndex((value) => value);
  return at < 0 ? null : { value: history[name][at], age: Date.now() / 1000 - history.at[at] };
}

// { metric, error }: the latest figures, null before the first; and why the last sample failed.
export function useMetrics() {
  const [seen, setSeen] = useState({ metric: latest, error: null });
  useEffect(() => {
    let timer = 0;
    const leaving = new AbortController();
    const look = async () => {
      clearTimeout(timer);
      if (document.visibilityState === "visible") {
        try {
          latest = metricsOf(await (await call("metrics", { signal: leaving.signal })).text());
          note(latest);
          setSeen({ metric: latest, error: null });
        } catch (error) {
          if (error.name === "AbortError") return;
          setSeen((old) => ({ ...old, error }));
        }
      }
      timer = setTimeout(look, LOOK);
    };
    look();
    document.addEventListener("visibilitychange", look);
    return () => {
      leaving.abort();
      clearTimeout(timer);
      document.removeEventListener("visibilitychange", look);
    };
  }, []);
  return seen;
}
