// The cost of a turn, as a bar and in words.

import { html } from "./vendor/htm-3.1.1/standalone.module.js";
import { count, milliseconds, plural } from "./bits.js";
import { costOf, loadedOf, reusedOf, totalOf } from "./family.js";
import { inOrder, sourceOf } from "./tiers.js";

const COMPUTED = [
  ["recomputed", "Computed again"],
  ["fresh", "New in this turn"],
  ["reply", "Written as the reply"],
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

// The cost of a turn in a few words.
export function summaryOf(turn) {
  const cost = costOf(turn);
  const reused = reusedOf(cost);
  const words = [];
  if (reused) words.push(`${count(reused)} of ${count(turn.prompt_tokens)} tokens reused${loadedIn(cost)}`);
  else words.push(plural(turn.prompt_tokens, "new token"));
  if (cost.recomputed) words.push(`${count(cost.recomputed)} computed again`);
  const wait = turn.cache?.prefill_ms;
  if (wait !== null && wait !== undefined) words.push(milliseconds(wait));
  return words.join(" · ");
}

const loadedIn = (cost) => (loadedOf(cost) ? ` (${count(loadedOf(cost))} loaded)` : "");

// The cost of all turns of a branch, in a few words.
export function branchSummaryOf(spent) {
  const words = [`${count(reusedOf(spent))} reused${loadedIn(spent)}`];
  if (spent.recomputed) words.push(`${count(spent.recomputed)} computed again`);
  return [...words, `${count(spent.fresh)} new`].join(" · ");
}

const MISSES = {
  evicted: "No tier held that part any more, so it was computed again.",
  damaged: "A file of the cache failed its checks and was not used.",
  recompute_cheaper: "Computing it again was quicker than loading it.",
  no_room: "The device had no room to load it into.",
  no_checkpoint: "This model's state can only go back to a checkpoint.",
  edited_history: "The messages that came were not the logged ones.",
  template_drift: "The chat template made other tokens of the same messages.",
  fingerprint: "The session was written under another tokenizer or template.",
  diverged: "The prompt leaves what the cache holds.",
};

export const missOf = (turn) => (turn.cache?.miss ? MISSES[turn.cache.miss.reason] : null);
