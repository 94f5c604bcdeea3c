// The cost of a turn, as a bar and in words.

import { html } from "./vendor/htm-3.1.1/standalone.module.js";
import { count, milliseconds } from "./bits.js";
import { costOf, loadedOf, reusedOf, totalOf } from "./family.js";
import { inOrder, sourceOf } from "./tiers.js";
import { plural, t } from "./words.js";

const COMPUTED = [
  ["recomputed", t("Computed again")],
  ["fresh", t("New in this turn")],
  ["reply", t("Written as the reply")],
];

// The parts of a cost that are not 0, in the order in which they are drawn, as { part, words, tokens }.
export function partsOf(cost) {
  const reused = inOrder(new Set(Object.keys(cost.reused)));
  return [
    ...reused.map((tier) => ({ part: tier, words: sourceOf(tier), tokens: cost.reused[tier] })),
    ...COMPUTED.map(([part, words]) => ({ part, words, tokens: cost[part] })),
  ].filter(({ tokens }) => tokens > 0);
}

// A bar of the tokens of a turn, or of any `cost`; `scale` is the number of tokens that fill the bar.
export function CostBar({ turn, cost = costOf(turn), scale = null }) {
  const whole = scale ?? totalOf(cost);
  return html`<span class="cost-bar" aria-hidden="true">
    ${partsOf(cost).map(({ part, tokens }) => html`<i class=${`part ${part}`} style=${{ width: `${(100 * tokens) / whole}%` }}></i>`)}
  </span>`;
}

const DRAFTERS = {
  grammar: t("Drafted by the grammar"),
  prediction: t("Drafted by the client's prediction"),
  history: t("Drafted from this conversation"),
  sessions: t("Drafted from other conversations"),
  model: t("Drafted by the draft model"),
  heads: t("Drafted by the model's own layers"),
};

export const DRAFT_SOURCES = Object.keys(DRAFTERS);
export const drafterOf = (source) => DRAFTERS[source] ?? source;

// What was drafted for a reply, as { source, drafted, accepted }.
export const draftsOf = (turn) =>
  Object.entries(turn.cache?.speculation ?? {}).map(([source, counts]) => ({ source, ...counts }));

// The cost of a turn in a few words.
export function summaryOf(turn) {
  const cost = costOf(turn);
  const reused = reusedOf(cost);
  const words = [];
  if (reused) words.push(`${t("{some} of {all} tokens reused", { some: count(reused), all: count(turn.prompt_tokens) })}${loadedIn(cost)}`);
  else words.push(plural(turn.prompt_tokens, "{n} new token", "{n} new tokens"));
  if (cost.recomputed) words.push(t("{n} computed again", { n: count(cost.recomputed) }));
  const right = draftsOf(turn).reduce((sum, { accepted }) => sum + accepted, 0);
  if (right) words.push(t("{n} drafted", { n: count(right) }));
  const wait = turn.cache?.prefill_ms;
  if (wait !== null && wait !== undefined) words.push(milliseconds(wait));
  return words.join(" · ");
}

// The tokens a second of a reply behind its first token; null for one that is too short, or older than this figure.
const rateOf = ({ cache, completion_tokens: tokens }) => (cache?.decode_ms > 0 ? (1000 * (tokens - 1)) / cache.decode_ms : null);

export const speedOf = (turn) => (rateOf(turn) ? t("{number} tokens/s", { number: count(rateOf(turn)) }) : null);

const loadedIn = (cost) => (loadedOf(cost) ? ` ${t("({n} loaded)", { n: count(loadedOf(cost)) })}` : "");

// The cost of all turns of a branch, in a few words.
export function branchSummaryOf(spent) {
  const words = [`${t("{n} reused", { n: count(reusedOf(spent)) })}${loadedIn(spent)}`];
  if (spent.recomputed) words.push(t("{n} computed again", { n: count(spent.recomputed) }));
  return [...words, t("{n} new", { n: count(spent.fresh) })].join(" · ");
}

const MISSES = {
  evicted: t("No tier held that part any more, so it was computed again."),
  damaged: t("A file of the cache failed its checks and was not used."),
  recompute_cheaper: t("Computing it again was quicker than loading it."),
  no_room: t("The device had no room to load it into."),
  no_checkpoint: t("This model's state can only go back to a checkpoint."),
  window_freed: t("What windowed layers held of that part had made room for other sessions."),
  edited_history: t("The messages that were sent are not those in the log."),
  template_drift: t("The chat template made other tokens of the same messages."),
  fingerprint: t("The session was written under another tokenizer or template."),
  diverged: t("The prompt differs from what is cached."),
  other_adapter: t("That part was computed with another adapter of the model, or with none."),
};

export const missOf = (turn) => (turn.cache?.miss ? MISSES[turn.cache.miss.reason] : null);
