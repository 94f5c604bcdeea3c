// The server's figures: running turns, speed, latency, tiers.

import { html } from "./vendor/htm-3.1.1/standalone.module.js";
import { bytes, count, milliseconds } from "./bits.js";
import { SPAN, history, lastOf, roomsOf, useMetrics } from "./metrics.js";
import { Plot } from "./plot.js";
import { ALWAYS, nameOf } from "./tiers.js";

const FRESH = 5; // seconds for which a figure counts as current
const NO_TURN = ["Nothing has been answered since you opened this view.", "Nothing was answered in the last five minutes."];

// A proxy in front of several servers does not pass on /metrics.
const reasonOf = (error) => (error.status === 404 ? "The server's figures cannot be read from here." : error.message);
const short = (value) => (value < 1000 ? String(Math.round(value)) : `${Math.round(value / 100) / 10}k`);

export function Live() {
  const { metric, error } = useMetrics();
  if (!metric && !error) return html`<p class="hint panel-hint">Looking…</p>`;
  const told = metric ?? (() => null);
  return html`<div class="live" tabindex="-1">
    ${error && html`<p class="hint" role="status">${reasonOf(error)}${metric && " These are the last figures."}</p>`}
    <section aria-label="Turns">
      <div class="gauges">
        <${Gauge} name="Running" value=${told("running")} />
        <${Gauge} name="Waiting" value=${told("waiting")} />
        <${Gauge} name="First token" ...${lastOf("first")} words=${milliseconds} />
        <${Gauge} name="Tokens a second" ...${lastOf("rate")} />
      </div>
    </section>
    <${Rooms} rooms=${roomsOf(metric)} />
    <${Minutes} rooms=${roomsOf(metric)} />
  </div>`;
}

function Gauge({ name, value = null, age = 0, words = count }) {
  return html`<div class="gauge"><span>${name}</span><b>${value === null ? "–" : words(value)}</b>
    ${age > FRESH && html`<small>${agoOf(age)}</small>`}</div>`;
}

const agoOf = (seconds) => (seconds < 60 ? `${Math.round(seconds)} s ago` : `${Math.floor(seconds / 60)} min ago`);

function Rooms({ rooms }) {
  const shown = rooms.filter(({ tier, used, whole }) => ALWAYS.includes(tier) || used > 0 || whole > 0);
  return html`<section aria-labelledby="live-room">
    <h3 id="live-room">Room for cache</h3>
    ${shown.map((room) => html`<${Room} key=${room.tier} ...${room} />`)}
  </section>`;
}

// A tier without room that holds nothing does not exist; one that holds something has no limit.
function Room({ tier, used, whole, isPaged }) {
  const name = capital(nameOf(tier));
  const isOff = whole === 0 && !used;
  const sizes = isPaged ? `${count(used)} of ${count(whole)} pages` : `${bytes(used)} of ${bytes(whole)}`;
  const told = whole === null ? "–" : isOff ? "off" : whole ? sizes : bytes(used);
  return html`<div class="room">
    <div><span>${name}</span><span>${told}</span></div>
    ${
      whole > 0 &&
      html`<meter class="hidden" min="0" max=${whole} value=${used} aria-label=${name}>${told}</meter>
    <span class="room-bar" aria-hidden="true"><i class=${`part ${tier}`}
      style=${{ width: `${Math.max(used ? 1 : 0, (100 * used) / whole)}%` }}></i></span>`
    }
  </div>`;
}

const capital = (words) => words[0].toUpperCase() + words.slice(1);

function Minutes({ rooms }) {
  const lines = (...all) => all.map(([of, name]) => ({ of, name })).filter(({ of }) => history[of]?.some(Boolean));
  const linesOf = (tiers) => lines(...tiers.map(({ tier }) => [tier, nameOf(tier)]));
  const pages = linesOf(rooms.filter(({ isPaged }) => isPaged));
  const kept = linesOf(rooms.filter(({ isPaged }) => !isPaged));
  const turns = lines(["waiting", "waiting"], ["running", "running"]); // the last one is drawn on top
  const isIdle = ["rate", "first", "running", "waiting"].every((of) => lastOf(of) === null);
  const isFull = Date.now() / 1000 - history.at[0] > 0.95 * SPAN; // there are no figures from before the first sample
  return html`<section aria-labelledby="live-time">
    <h3 id="live-time">Last five minutes</h3>
    ${
      isIdle
        ? html`<p class="hint">${NO_TURN[Number(isFull)]}</p>`
        : html`<${Plot} title="Tokens a second" lines=${lines(["rate", "tokens"])} told=${short} empty="None was written." />
      <${Plot} title="Milliseconds to the first token" lines=${lines(["first", "milliseconds"])} told=${short}
        empty="None was started." dots=${true} />
      <${Plot} title="Turns" lines=${turns} told=${short} empty="None was running or waiting." />`
    }
    <${Plot} title="Pages of cache in use" lines=${pages} told=${short} empty="None was in use." />
    ${kept.length > 0 && html`<${Plot} title="Bytes of cache kept" lines=${kept} told=${bytes} />`}
  </section>`;
}
